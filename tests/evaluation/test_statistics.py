"""The figures of an evaluation against what they are defined as."""

import numpy as np
import pytest
import scipy.stats
from records import one_by_one, part, record, tasks, text

from fly_jax.evaluation.statistics import Interval, quality, repetition, speed

FAMILIES = {task.name: task.family for task in tasks(100)}


def test_accuracy_and_retention_and_who_is_lost():
    records = one_by_one([1, 1, 0, 1, 0], fly=[1, 0, 1, 0, 0])
    found = quality(records, "fly", FAMILIES, greedy=True)
    assert found.accuracy.value == pytest.approx(0.4)
    assert found.retention.value == pytest.approx(0.4 / 0.6)
    assert (found.num_tasks, found.num_lost, found.num_won) == (5, 2, 1)
    assert found.accuracy_by_family == {"even": pytest.approx(2 / 3), "odd": 0.0}
    assert found.num_by_family == {"even": 3, "odd": 2}
    same = quality(records, "standard", FAMILIES, greedy=True)
    assert same.retention == Interval(1.0)
    assert (same.num_lost, same.num_won) == (0, 0)


def test_where_all_tasks_agree_the_bounds_are_three_tasks_away():
    scores = [1, 1, 0, 1, 0, 1, 1, 1]
    found = quality(one_by_one(scores), "fly", FAMILIES, greedy=True)
    assert (found.changed, found.num_lost) == (1.0, 0)
    assert found.retention == Interval(1.0, 0.5, 1.5)
    perfect = quality(one_by_one([1] * 8), "fly", FAMILIES, greedy=True)
    assert perfect.accuracy == Interval(1.0, 5 / 8, 1.0)
    assert perfect.retention == Interval(1.0, 5 / 8, 11 / 8)


def test_the_intervals_are_those_of_scipys_bootstrap():
    scores = np.random.default_rng(1).integers(0, 2, 60)
    fly = np.where(np.arange(60) % 7 == 0, 0, scores)
    found = quality(one_by_one(scores, fly=fly), "fly", FAMILIES, greedy=True)

    def interval(statistic, *samples):
        result = scipy.stats.bootstrap(
            samples, statistic, paired=len(samples) > 1, vectorized=True, method="percentile", rng=3, n_resamples=20_000
        )
        return result.confidence_interval

    expected = interval(np.mean, fly)
    assert (found.accuracy.low, found.accuracy.high) == pytest.approx((expected.low, expected.high), abs=0.02)
    expected = interval(lambda ours, theirs, axis: np.mean(ours, axis) / np.mean(theirs, axis), fly, scores)
    assert (found.retention.low, found.retention.high) == pytest.approx((expected.low, expected.high), abs=0.02)
    assert found.retention.low < found.retention.value < found.retention.high < 1.0


def test_over_nothing_there_is_no_retention():
    found = quality(one_by_one([0, 0, 0]), "fly", FAMILIES, greedy=True)
    assert found.retention is None
    assert found.accuracy == Interval(0.0)
    alone = quality(one_by_one([1]), "fly", FAMILIES, greedy=True)
    assert (alone.accuracy, alone.retention) == (Interval(1.0), Interval(1.0))


def test_seeds_of_a_task_are_one_observation():
    both = [
        record(1, seed, 0, target_only=part([text(0, 1)]), standard=part([text(0, 1)]), fly=part([text(0, seed)]))
        for seed in (0, 1)
    ]
    found = quality(both, "fly", FAMILIES, greedy=False)
    assert (found.num_tasks, found.accuracy.value, found.num_lost, found.changed) == (1, 0.5, 1, None)


def test_what_the_drafts_did():
    found = quality(one_by_one([1, 1, 1]), "fly", FAMILIES, greedy=True)
    assert found.acceptance_rate == 0.75
    assert found.acceptance_by_position == (1.0, 0.5)
    assert found.tokens_per_cycle == 2.0
    assert found.deferrals == 25.0
    assert found.changed == 1.0
    target_only = quality(one_by_one([1]), "target-only", FAMILIES, greedy=True)
    assert (target_only.acceptance_rate, target_only.acceptance_by_position) == (None, ())
    assert (target_only.changed, target_only.tokens_per_cycle) == (0.0, 1.0)


def test_speed_is_of_decoding_and_ratios_are_of_the_same_batches():
    records = one_by_one([1] * 6)
    found = speed(records, "fly", "standard")
    assert (found.num_batches, found.num_tokens, found.tokens_per_second) == (6, 24, 4.0)
    assert found.over_target_only == Interval(4.0, 4.0, 4.0)
    assert found.over_standard.value == pytest.approx(2.1)
    assert 2.0 <= found.over_standard.low < 2.1 < found.over_standard.high <= 2.2
    assert found.total_over_standard == pytest.approx((6 + 3) / (12.6 + 3))
    alone = speed(records[:5], "fly", "standard")
    assert (alone.over_target_only.low, alone.over_target_only.high) == (None, None)


@pytest.mark.parametrize(
    ("token_ids", "expected"), [((1, 2, 3), 0.0), ((1, 2, 3, 4), 0.0), ((7,) * 8, 0.8), ((1, 2, 3, 4) * 2, 0.2)]
)
def test_repetition_is_the_share_of_repeated_4_grams(token_ids, expected):
    assert repetition(token_ids) == pytest.approx(expected)
