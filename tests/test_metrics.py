import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fly_jax import FlyConfig, fly_verify
from fly_jax.metrics import AcceptanceCounts


def verification():
    """Request 0 keeps 3 of 3 with a deferral, request 1 stops at once, request 2 has no draft."""
    logits = np.full((3, 4, 12), -9.0, np.float32)
    logits[:, np.arange(4), [5, 7, 9, 3]] = 3.0
    logits[0, 0, 4] = 2.5
    drafts = np.array([[4, 7, 9], [6, 7, 9], [0, 0, 0]], np.int32)
    lengths = np.array([3, 3, 0], np.int32)
    return fly_verify(logits, drafts, num_draft_tokens=lengths, config=FlyConfig(1)), lengths


def test_counts_by_hand():
    counts = AcceptanceCounts.from_verification(*verification())
    assert int(counts.num_requests) == 3
    assert int(counts.num_drafts) == 2
    assert int(counts.num_tokens) == 4 + 1 + 1
    assert counts.drafted_per_position.tolist() == [2, 2, 2]
    assert counts.accepted_per_position.tolist() == [1, 1, 1]
    assert counts.deferred_per_position.tolist() == [1, 0, 0]
    assert int(counts.num_stops) == 1
    assert int(counts.num_invalid) == 0
    assert int(counts.num_draft_tokens) == 6
    assert int(counts.num_accepted) == 3
    assert int(counts.num_deferred) == 1


def test_rates_by_hand():
    counts = AcceptanceCounts.from_verification(*verification())
    assert counts.mean_acceptance_length() == 1 + 3 / 2
    assert counts.tokens_per_request() == 6 / 3
    assert counts.acceptance_rate() == 3 / 6
    assert counts.acceptance_rate_per_position().tolist() == [0.5, 0.5, 0.5]
    assert counts.deferral_rate() == 1 / 2
    assert counts.deferral_rate_per_position().tolist() == [0.5, 0.0, 0.0]
    assert counts.deferrals_per_draft() == 1 / 2


def test_counts_add_up():
    once = AcceptanceCounts.from_verification(*verification())
    chex.assert_trees_all_equal(AcceptanceCounts.zeros(3) + once + once, jax.tree.map(lambda x: 2 * x, once))
    chex.assert_trees_all_close((once + once).acceptance_rate(), once.acceptance_rate())


def test_counts_of_different_k_do_not_add_up():
    with pytest.raises(ValueError, match="counts must be of the same K to add up, got 3 and 1"):
        AcceptanceCounts.zeros(3) + AcceptanceCounts.zeros(1)


def test_every_rate_is_safe_without_drafts():
    counts = AcceptanceCounts.zeros(3)
    assert counts.mean_acceptance_length() == 1.0
    for rate in ("acceptance_rate", "deferral_rate", "deferrals_per_draft", "tokens_per_request"):
        assert getattr(counts, rate)() == 0.0
    assert counts.acceptance_rate_per_position().tolist() == [0.0] * 3
    assert counts.deferral_rate_per_position().tolist() == [0.0] * 3


def test_counting_is_traceable_and_carries_through_scan():
    result, lengths = verification()

    @jax.jit
    def run(result, lengths):
        def step(total, _):
            return total + AcceptanceCounts.from_verification(result, lengths), None

        return jax.lax.scan(step, AcceptanceCounts.zeros(3), length=5)[0]

    assert int(run(result, lengths).num_accepted) == 15


def test_rates_never_exceed_one():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(64, 9, 6)).astype(np.float32)
    drafts = logits[:, :8].argmax(-1).astype(np.int32)
    drafts[:, 0] = rng.integers(0, 6, 64)
    counts = AcceptanceCounts.from_verification(fly_verify(logits, drafts))
    assert int(counts.num_deferred) > 0
    for field in dataclasses.fields(counts):
        assert getattr(counts, field.name).dtype == jnp.int32
    assert 0 < counts.acceptance_rate() <= 1
    assert 0 < counts.deferral_rate() <= 1
    assert jnp.all(counts.acceptance_rate_per_position() <= 1)
    assert 1 <= counts.mean_acceptance_length() <= 9
