"""Drafters on their own: lookup against a plain search, model drafts against rollouts without a cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from fly_jax.decode.drafters import (
    DraftContext,
    DraftModel,
    LayerSkip,
    PromptLookup,
    SamplingParams,
    check_drafter,
    default_skip_layers,
    empty_draft,
)
from fly_jax.decode.model import Decoder, DecoderConfig, KVCache, random_decoder
from fly_jax.errors import UserError

CONFIG = DecoderConfig(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position_embeddings=64,
)
CAPACITY = 32
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def target() -> Decoder:
    return random_decoder(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def draft_decoder() -> Decoder:
    return random_decoder(CONFIG, jax.random.key(1))


@jax.jit
def hidden(decoder, token_ids, cache):
    return decoder.hidden(token_ids, cache)


def keys(num_requests, seed=0):
    return jax.random.split(jax.random.key(seed), num_requests)


def context(target, history, length, sampling=GREEDY, seed=0, cache=None):
    """The context after the given histories; the target's cache is filled here unless it is given."""
    history, length = jnp.asarray(history, jnp.int32), jnp.asarray(length, jnp.int32)
    if cache is None:
        cache = KVCache.zeros(CONFIG, history.shape[0], CAPACITY)
        _, cache = hidden(target, history, cache)
        cache = cache.advance(length - 1)
    return DraftContext(target, cache, history, length, keys(history.shape[0], seed), sampling)


def rollout(decoder, history, num_tokens, skip_layers=()):
    """Greedy continuation of one history, everything computed anew for each token."""
    tokens = list(history)
    for _ in range(num_tokens):
        padded = np.zeros((1, CAPACITY), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = full_logits(decoder, padded, skip_layers)
        tokens.append(int(np.argmax(np.asarray(logits)[0, len(tokens) - 1])))
    return tokens[len(history) :]


@functools.partial(jax.jit, static_argnames="skip_layers")
def full_logits(decoder, token_ids, skip_layers=()):
    cache = KVCache.zeros(decoder.config, token_ids.shape[0], CAPACITY)
    return decoder(jnp.asarray(token_ids), cache, skip_layers=skip_layers)[0]


def search(history, longest, shortest, k):
    """What prompt lookup is to find, as plain loops."""
    for n in range(longest, shortest - 1, -1):
        for start in range(len(history) - n - 1, -1, -1):
            if history[start : start + n] == history[len(history) - n :]:
                found = history[start + n :]
                return (found * k)[:k]  # at its end the text is taken to go on as it did
    return []


@pytest.mark.parametrize(("longest", "shortest", "k"), [(3, 1, 4), (5, 2, 8), (1, 1, 1), (3, 3, 40)])
def test_prompt_lookup_finds_the_longest_then_most_recent_match(target, longest, shortest, k):
    rng = np.random.default_rng(longest)
    length = rng.integers(1, CAPACITY + 1, 200)
    history = rng.integers(0, 4, (200, CAPACITY))  # what lies past the length must not matter
    drafter = PromptLookup(k, longest, shortest)
    cache = KVCache.zeros(CONFIG, 200, CAPACITY)
    draft, state, _ = jax.jit(drafter.propose)(None, context(target, history, length, cache=cache))
    assert state is None
    assert draft.draft_probs is None
    assert draft.token_ids.shape == (200, k)
    for b in range(200):
        expected = search(history[b, : length[b]].tolist(), longest, shortest, k)
        assert draft.token_ids[b, : draft.num_draft_tokens[b]].tolist() == expected
    assert 0 < np.mean(np.asarray(draft.num_draft_tokens) == 0) < 1 or longest == 1


@pytest.mark.parametrize("period", [1, 2, 5])
def test_prompt_lookup_goes_on_with_the_period_of_a_text(target, period):
    pattern, k = list(range(3, 3 + period)), 16
    history, length = np.resize(pattern, (1, CAPACITY)), CAPACITY - 2
    drafter = PromptLookup(k)
    draft, _, _ = jax.jit(drafter.propose)(None, context(target, history, [length]))
    assert draft.num_draft_tokens.tolist() == [k]
    assert draft.token_ids[0].tolist() == np.resize(pattern, length + k)[length:].tolist()


def test_draft_model_catches_up_after_any_number_of_accepted_tokens(target, draft_decoder):
    k = 3
    drafter = DraftModel(draft_decoder, k)
    rng = np.random.default_rng(0)
    history = np.zeros((k + 1, CAPACITY), np.int32)
    history[:] = rng.integers(0, CONFIG.vocab_size, CAPACITY)
    length = np.full(k + 1, 9)
    state = drafter.init_state(k + 1, CAPACITY)
    state = drafter.prefill(state, jnp.asarray(history[:, :16]), jnp.asarray(length - 1))
    propose = jax.jit(drafter.propose)
    for _ in range(3):
        draft, state, _ = propose(state, context(target, history, length))
        assert draft.num_draft_tokens.tolist() == [k] * (k + 1)
        for accepted in range(k + 1):
            expected = rollout(draft_decoder, history[accepted, : length[accepted]].tolist(), k)
            assert draft.token_ids[accepted].tolist() == expected
            # As verification would: request b keeps b draft tokens, then another one follows.
            emitted = [*expected[:accepted], (accepted * 7 + 3) % CONFIG.vocab_size]
            history[accepted, length[accepted] : length[accepted] + len(emitted)] = emitted
            length[accepted] += len(emitted)


def test_draft_model_drafts_from_a_history_of_one_token(target, draft_decoder):
    drafter = DraftModel(draft_decoder, 4)
    history = np.full((1, CAPACITY), 5)
    draft, _, _ = jax.jit(drafter.propose)(drafter.init_state(1, CAPACITY), context(target, history, [1]))
    assert draft.token_ids[0].tolist() == rollout(draft_decoder, [5], 4)


def test_layer_skip_drafts_what_the_shortened_model_says_on_the_targets_cache(target):
    history = np.random.default_rng(2).integers(0, CONFIG.vocab_size, (1, CAPACITY))
    # A history of one token: with a longer one the cache holds what all layers made of it.
    given = context(target, history, [1])
    draft, _, cache = jax.jit(LayerSkip((1,), 5).propose)(None, given)
    assert draft.token_ids[0].tolist() == rollout(target, history[0, :1].tolist(), 5, skip_layers=(1,))
    assert cache.length.tolist() == given.cache.length.tolist()


def test_layer_skip_changes_nothing_before_the_last_token(target):
    history = np.random.default_rng(3).integers(0, CONFIG.vocab_size, (2, CAPACITY))
    given = context(target, history, [7, 12])
    _, _, cache = jax.jit(LayerSkip((1,), 5).propose)(None, given)
    for before, after in zip(given.cache.keys + given.cache.values, cache.keys + cache.values, strict=True):
        for b, length in enumerate((7, 12)):
            np.testing.assert_array_equal(before[b, :, : length - 1], after[b, :, : length - 1])


@pytest.mark.parametrize("kind", ["draft-model", pytest.param("layer-skip", marks=pytest.mark.slow)])
def test_probabilistic_drafts_come_with_the_distribution_they_are_drawn_from(target, draft_decoder, kind):
    num_requests, k = 2000, 2
    drafter = (
        DraftModel(draft_decoder, k, "probabilistic") if kind == "draft-model" else LayerSkip((1,), k, "probabilistic")
    )
    sampling = SamplingParams(temperature=jnp.float32(1.3), top_k=jnp.int32(5))
    history = np.tile(np.random.default_rng(4).integers(0, CONFIG.vocab_size, CAPACITY), (num_requests, 1))
    given = context(target, history, np.full(num_requests, 6), sampling)
    state = drafter.init_state(num_requests, CAPACITY)
    if state is not None:
        state = drafter.prefill(state, given.history[:, :5], jnp.full(num_requests, 5, jnp.int32))
    draft, _, _ = jax.jit(drafter.propose)(state, given)
    expected_shapes = jax.tree.map(jnp.shape, empty_draft(drafter, num_requests, CONFIG.vocab_size, sampling))
    assert jax.tree.map(jnp.shape, draft) == expected_shapes
    probs, token_ids = np.asarray(draft.draft_probs), np.asarray(draft.token_ids)
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-5)
    assert np.all((probs > 0).sum(-1) == 5)
    assert np.all(np.take_along_axis(probs, token_ids[..., None], -1) > 0)
    kept = probs[0, 0] > 0
    observed = np.bincount(token_ids[:, 0], minlength=CONFIG.vocab_size)[kept]
    expected = probs[0, 0, kept].astype(np.float64)
    assert scipy.stats.chisquare(observed, num_requests * expected / expected.sum()).pvalue > 1e-3
    # Positions draw from streams of their own: equal draws at both would repeat the first token's quantile.
    assert not np.array_equal(token_ids[:, 0], token_ids[:, 1])


def test_a_greedy_target_gets_greedy_drafts_without_probabilities(target, draft_decoder):
    history = np.full((1, CAPACITY), 3)
    drafter = DraftModel(draft_decoder, 3, "probabilistic")
    draft, _, _ = jax.jit(drafter.propose)(drafter.init_state(1, CAPACITY), context(target, history, [1]))
    assert draft.draft_probs is None
    assert empty_draft(drafter, 1, CONFIG.vocab_size, GREEDY).draft_probs is None


def test_default_skip_layers():
    assert default_skip_layers(30) == (12, 13, 14, 15)
    for num_layers in range(2, 80):
        layers = default_skip_layers(num_layers)
        assert layers
        assert set(layers) < set(range(num_layers))
    with pytest.raises(UserError, match="at least 2 layers"):
        default_skip_layers(1)


def test_settings_that_cannot_work_are_refused(target, draft_decoder):
    with pytest.raises(UserError, match="num_speculative_tokens must be at least 1, got 0"):
        PromptLookup(0)
    with pytest.raises(UserError, match=r"prompt_lookup_min must be at least 1 and at most prompt_lookup_max \(2\)"):
        PromptLookup(4, 2, 3)
    with pytest.raises(UserError, match="draft_sample_method must be one of greedy, probabilistic, got 'random'"):
        DraftModel(draft_decoder, 4, "random")
    smaller = random_decoder(dataclasses.replace(CONFIG, vocab_size=23), jax.random.key(2))
    with pytest.raises(UserError, match="vocabulary has 23 tokens and the target's 24"):
        check_drafter(DraftModel(smaller, 4), target)
    with pytest.raises(UserError, match="between 0 and 1, got 3"):
        check_drafter(LayerSkip((1, 3), 4), target)
    for layers in ((), (1, 1), (0, 1)):
        with pytest.raises(UserError, match="1 to 1 different layers"):
            check_drafter(LayerSkip(layers, 4), target)
