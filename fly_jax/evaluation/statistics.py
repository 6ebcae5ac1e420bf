"""The figures of an evaluation, from the records of its units.

Accuracy is the mean score of the tasks (over seeds first). Its interval is a percentile bootstrap over tasks; that of
retention, a mode's accuracy over target-only's, resamples the same tasks for both. Where all tasks agree there is
nothing to resample, and the bounds are three tasks away (the rule of three, Hanley and Lippman-Hand 1983). Speeds are
of decoding: tokens over seconds without prefill and compilation, every mode on the same batches; the interval of a
ratio of speeds resamples batches. Of fewer than 6 observations no interval is given: a bootstrap of so few is too
narrow.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fly_jax.decode.prepare import TARGET_ONLY

CONFIDENCE = 0.95
NUM_RESAMPLES = 10_000
LEAST_OBSERVATIONS = 6
NGRAM = 4
"""Repetition is counted in runs of so many tokens."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """A figure with its bootstrap interval.

    Attributes:
      value: the figure.
      low: lower end at a confidence of 95%; None where it is not given.
      high: upper end.
    """

    value: float
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class Quality:
    """What a mode writes, at one batch size.

    Attributes:
      accuracy: mean score.
      retention: accuracy over target-only's; None where that is 0. Without an interval where no text is changed.
      num_tasks: tasks scored.
      num_lost: tasks that target-only solves (more often, with several seeds) and this mode does not.
      num_won: the reverse.
      accuracy_by_family: by name.
      num_by_family: tasks, by name.
      changed: share of texts that are not target-only's, token for token; None where tokens are drawn at random.
      repetition: share of a text's 4-grams that have occurred in it before, mean over texts (seq-rep-4 of Welleck et
        al. 2019, arXiv:1908.04319).
      tokens_per_cycle: emitted tokens a target step of a request.
      acceptance_rate: drafts kept over drafts proposed, deferred ones included; None without drafts.
      acceptance_by_position: the same for each position of a draft, over the drafts that reach it
        (`AcceptanceCounts.acceptance_rate_per_position` divides by all drafts, as vLLM does). Both end with the text.
      deferrals: tokens kept by a deferral, a hundred emitted tokens.
    """

    accuracy: Interval
    retention: Interval | None
    num_tasks: int
    num_lost: int
    num_won: int
    accuracy_by_family: Mapping[str, float]
    num_by_family: Mapping[str, int]
    changed: float | None
    repetition: float
    tokens_per_cycle: float
    acceptance_rate: float | None
    acceptance_by_position: tuple[float | None, ...]
    deferrals: float


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast a mode is, at one batch size.

    Attributes:
      num_batches: decoded.
      num_tokens: emitted, of all requests.
      prefill_seconds: of all batches.
      decode_seconds: of all batches.
      tokens_per_second: of decoding.
      over_target_only: ratio of tokens per second.
      over_standard: the same.
      total_over_standard: ratio of whole times, prefill included: below 1 is faster.
    """

    num_batches: int
    num_tokens: int
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float
    over_target_only: Interval
    over_standard: Interval
    total_over_standard: float


def quality(records: Sequence[Mapping[str, Any]], mode: str, families: Mapping[str, str], *, greedy: bool) -> Quality:
    """The quality of a mode.

    Args:
      records: the units of one batch size.
      mode: its name.
      families: of each task, by the task's name.
      greedy: whether nothing was drawn at random.
    """
    texts, reference = _texts(records, mode), _texts(records, TARGET_ONLY)
    scores, reference_scores = _mean_scores(texts), _mean_scores(reference)
    names = list(scores)
    ours, theirs = (np.asarray([each[name] for name in names]) for each in (scores, reference_scores))
    by_family: dict[str, list[float]] = {}
    for name in names:
        by_family.setdefault(families[name], []).append(scores[name])
    parts = [record["modes"][mode] for record in records]
    drafted, accepted = (
        np.asarray([part[f"{name}_per_position"] for part in parts]).sum(0) for name in ("drafted", "accepted")
    )
    num_tokens = sum(len(text["token_ids"]) for text in texts.values())
    changed = np.mean([text["token_ids"] != reference[key]["token_ids"] for key, text in texts.items()])
    return Quality(
        accuracy=_accuracy(ours),
        retention=_retention(ours, theirs, same=greedy and changed == 0),
        num_tasks=len(names),
        num_lost=int(np.sum(ours < theirs)),
        num_won=int(np.sum(ours > theirs)),
        accuracy_by_family={family: float(np.mean(values)) for family, values in by_family.items()},
        num_by_family={family: len(values) for family, values in by_family.items()},
        changed=float(changed) if greedy else None,
        repetition=float(np.mean([repetition(text["token_ids"]) for text in texts.values()])),
        tokens_per_cycle=num_tokens / sum(text["num_cycles"] for text in texts.values()),
        acceptance_rate=_ratio(accepted.sum(), drafted.sum()),
        acceptance_by_position=tuple(_ratio(*pair) for pair in zip(accepted, drafted, strict=True)),
        deferrals=100.0 * sum(text["num_deferred"] for text in texts.values()) / num_tokens,
    )


def speed(records: Sequence[Mapping[str, Any]], mode: str, standard: str) -> Speed:
    """The speed of a mode.

    Args:
      records: the units of one batch size.
      mode: its name.
      standard: the name of standard verification.
    """
    tokens, seconds, prefill = _timing(records, mode)

    def over(other: str) -> Interval:
        other_tokens, other_seconds, _ = _timing(records, other)
        return _bootstrap(_speed_ratio, [tokens, seconds, other_tokens, other_seconds])

    _, standard_seconds, standard_prefill = _timing(records, standard)
    return Speed(
        num_batches=len(records),
        num_tokens=int(tokens.sum()),
        prefill_seconds=float(prefill.sum()),
        decode_seconds=float(seconds.sum()),
        tokens_per_second=float(tokens.sum() / seconds.sum()),
        over_target_only=over(TARGET_ONLY),
        over_standard=over(standard),
        total_over_standard=float((seconds + prefill).sum() / (standard_seconds + standard_prefill).sum()),
    )


def repetition(token_ids: Sequence[int], n: int = NGRAM) -> float:
    """The share of a text's n-grams that have occurred in it before; 0 for a text without any."""
    ngrams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return 1.0 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def _texts(records: Sequence[Mapping[str, Any]], mode: str) -> dict[tuple[str, int], Mapping[str, Any]]:
    """The texts of a mode, by task and seed."""
    return {(text["task"], record["unit"][1]): text for record in records for text in record["modes"][mode]["texts"]}


def _mean_scores(texts: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[str, float]:
    scores: dict[str, list[float]] = {}
    for (task, _), text in texts.items():
        scores.setdefault(task, []).append(text["score"])
    return {task: float(np.mean(values)) for task, values in scores.items()}


def _timing(records: Sequence[Mapping[str, Any]], mode: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, seconds of decoding and of prefill of each batch."""
    parts = [record["modes"][mode] for record in records]
    names = ("num_tokens", "decode_seconds", "prefill_seconds")
    tokens, seconds, prefill = (np.asarray([part[name] for part in parts], np.float64) for name in names)
    return tokens, seconds, prefill


def _bootstrap(statistic: Callable[..., np.ndarray], samples: Sequence[np.ndarray]) -> Interval:
    """A statistic of samples that belong together, with its percentile interval; the seed is fixed.

    `statistic` reduces the last axis. A resample in which it is not a number, as a retention over nothing, is left out.
    """
    value = float(statistic(*samples))
    count = len(samples[0])
    if count < LEAST_OBSERVATIONS:
        return Interval(value)
    index = np.random.default_rng(0).integers(0, count, (NUM_RESAMPLES, count))
    with np.errstate(invalid="ignore", divide="ignore"):
        resampled = statistic(*(each[index] for each in samples))
    resampled = resampled[np.isfinite(resampled)]
    tail = (1.0 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1.0 - tail])
    return Interval(value, float(low), float(high))


def _accuracy(scores: np.ndarray) -> Interval:
    interval = _bootstrap(lambda scores: np.mean(scores, -1), [scores])
    if interval.low is None or interval.low != interval.high:
        return interval
    rule_of_three = min(3 / len(scores), 1.0)
    return Interval(interval.value, max(interval.value - rule_of_three, 0.0), min(interval.value + rule_of_three, 1.0))


def _retention(ours: np.ndarray, theirs: np.ndarray, *, same: bool) -> Interval | None:
    if not np.mean(theirs) > 0:
        return None
    if same:
        return Interval(float(np.mean(ours) / np.mean(theirs)))
    interval = _bootstrap(lambda ours, theirs: np.mean(ours, -1) / np.mean(theirs, -1), [ours, theirs])
    if interval.low is None or interval.low != interval.high:
        return interval
    rule_of_three = 3 / float(np.sum(theirs))
    return Interval(interval.value, max(interval.value - rule_of_three, 0.0), interval.value + rule_of_three)


def _speed_ratio(
    tokens: np.ndarray, seconds: np.ndarray, other_tokens: np.ndarray, other_seconds: np.ndarray
) -> np.ndarray:
    return (tokens.sum(-1) / seconds.sum(-1)) / (other_tokens.sum(-1) / other_seconds.sum(-1))


def _ratio(count: Any, total: Any) -> float | None:
    return float(count / total) if total else None
