"""The decoding loop: what it emits, when it stops, what it counts, how often it compiles."""

import collections
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import smollm2
from near_ties import gap_at_first_difference

from fly_jax import FlyConfig
from fly_jax.config import SamplingParams
from fly_jax.decode import generate
from fly_jax.decode.drafters import Draft, DraftModel, LayerSkip, PromptLookup, default_skip_layers
from fly_jax.decode.generate import Generator
from fly_jax.decode.model import DecoderConfig, KVCache, random_decoder
from fly_jax.decode.prompts import BUILTIN_PROMPTS
from fly_jax.errors import UserError

CONFIG = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=256,
)
MAX_MODEL_LEN = 160
K = 5
DECODER = random_decoder(CONFIG, jax.random.key(0))
OTHER_DECODER = random_decoder(CONFIG, jax.random.key(1))
PROMPT = tuple(np.random.default_rng(0).integers(0, 6, 75).tolist())
FLY = FlyConfig(window_size=1, entropy_threshold=0.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RandomDrafts:
    """Any tokens, any number of them."""

    num_speculative_tokens: int = dataclasses.field(metadata={"static": True})
    draft_sample_method = "greedy"

    def init_state(self, batch_size, capacity):
        return None

    def prefill(self, state, token_ids, num_tokens):
        return None

    def propose(self, state, context):
        shape = (context.length.shape[0], self.num_speculative_tokens)
        tokens, count = jax.random.split(context.keys[0])
        token_ids = jax.random.randint(tokens, shape, 0, 4, jnp.int32)
        return Draft(token_ids, jax.random.randint(count, shape[:1], 0, shape[1] + 1, jnp.int32)), None, context.cache


DRAFTERS = {
    "ngram": PromptLookup(K),
    "draft-model": DraftModel(OTHER_DECODER, K),
    "itself": DraftModel(DECODER, K),
    "layer-skip": LayerSkip((1,), K),
    "random": RandomDrafts(K),
    "one-token": LayerSkip((0,), 1),
}


@functools.cache
def generator(name=None):
    return Generator(DECODER, drafter=None if name is None else DRAFTERS[name], max_model_len=MAX_MODEL_LEN)


@functools.cache
def target_only(max_tokens=60):
    return generator().generate(PROMPT, max_tokens=max_tokens)


@jax.jit
def all_logits(decoder, token_ids):
    return decoder(token_ids, KVCache.zeros(CONFIG, token_ids.shape[0], token_ids.shape[1]))[0]


def argmax_after(token_ids):
    """The target's choice after every prefix."""
    padded = np.zeros((1, MAX_MODEL_LEN), np.int32)
    padded[0, : len(token_ids)] = token_ids
    return np.argmax(np.asarray(all_logits(DECODER, padded))[0], -1)


def test_target_only_follows_the_argmax():
    result = target_only()
    sequence = [*PROMPT, *result.token_ids]
    assert list(result.token_ids) == argmax_after(sequence)[len(PROMPT) - 1 : len(sequence) - 1].tolist()
    assert result.num_cycles == len(result.token_ids) == 60
    assert not any(result.deferred)
    assert result.finish_reason == "length"
    assert result.prefill_seconds > 0
    assert result.decode_seconds > 0


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_standard_decoding_equals_target_only(name):
    result = generator(name).generate(PROMPT, max_tokens=60)
    assert result.token_ids == target_only().token_ids
    assert not any(result.deferred)
    counts = result.counts
    with_drafts, without = int(counts.num_requests), result.num_cycles - int(counts.num_requests)
    assert int(counts.num_tokens) + without == 60
    assert int(counts.num_accepted) == int(counts.num_tokens) - with_drafts
    assert int(counts.num_deferred) == 0
    if name == "itself":
        assert float(counts.acceptance_rate()) == 1.0
        assert result.num_cycles == 1 + math.ceil(59 / (K + 1))


@pytest.mark.parametrize("name", ["layer-skip", pytest.param("draft-model", marks=pytest.mark.slow)])
def test_fly_with_an_infinite_threshold_is_standard(name):
    config = FlyConfig(window_size=1, entropy_threshold=math.inf)
    result = generator(name).generate(PROMPT, max_tokens=60, config=config)
    assert result.token_ids == target_only().token_ids
    assert not any(result.deferred)


@pytest.mark.parametrize("name", ["ngram", "layer-skip"])
def test_fly_differs_from_the_targets_choice_exactly_where_it_says(name):
    result = generator(name).generate(PROMPT, max_tokens=60, config=FLY)
    sequence = [*PROMPT, *result.token_ids]
    choices = argmax_after(sequence)[len(PROMPT) - 1 : len(sequence) - 1]
    differs = np.asarray(result.token_ids) != choices
    assert any(result.deferred)
    assert list(result.deferred) == differs.tolist()
    assert int(result.counts.num_deferred) == sum(result.deferred)


def test_stops_at_an_end_token_in_the_middle_of_an_accepted_run():
    tokens = target_only().token_ids
    first_seen = {token: tokens.index(token) for token in tokens}
    # The first cycle emits one token, then come runs of K + 1.
    end = next(i for token, i in first_seen.items() if i > 0 and 1 <= (i - 1) % (K + 1) < K)
    result = generator("itself").generate(PROMPT, max_tokens=60, eos_token_ids={tokens[end]})
    assert result.token_ids == tokens[: end + 1]
    assert len(result.deferred) == end + 1
    assert result.finish_reason == "stop"
    assert_counts_end_with_the_text(result)


def assert_counts_end_with_the_text(result):
    counts = result.counts
    without_drafts = result.num_cycles - int(counts.num_requests)
    assert int(counts.num_tokens) + without_drafts == len(result.token_ids)
    assert int(counts.num_deferred) == sum(result.deferred)
    assert int(counts.num_accepted) <= int(counts.num_draft_tokens)


@pytest.mark.parametrize("name", ["itself", "ngram"])
@pytest.mark.parametrize("length", range(1, 16))
def test_a_text_ends_with_the_token_that_completes_it(name, length):
    """Whatever else its cycle emitted: token ids, deferrals and counts are those of the text."""
    whole = generator(name).generate(PROMPT, max_tokens=40, config=FLY)

    def find_end(token_ids):
        return length if len(token_ids) >= length else None

    (result,) = generator(name).generate_batch([PROMPT], max_tokens=40, config=FLY, find_end=find_end)
    assert (result.token_ids, result.deferred) == (whole.token_ids[:length], whole.deferred[:length])
    assert result.finish_reason == "stop"
    assert_counts_end_with_the_text(result)
    if name == "itself":
        assert float(result.counts.acceptance_rate()) == 1.0 or length == 1
        assert result.num_cycles == 1 + math.ceil((length - 1) / (K + 1))


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6, 7, 8, 13])
@pytest.mark.parametrize("name", ["itself", "ngram"])
def test_emits_exactly_max_tokens(name, max_tokens):
    result = generator(name).generate(PROMPT, max_tokens=max_tokens)
    assert result.token_ids == target_only().token_ids[:max_tokens]
    assert result.finish_reason == "length"
    assert int(result.counts.num_tokens) + result.num_cycles - int(result.counts.num_requests) == max_tokens


def test_fills_the_context_and_stops_there():
    short = Generator(DECODER, drafter=DRAFTERS["itself"], max_model_len=len(PROMPT) + 17)
    result = short.generate(PROMPT, max_tokens=100)
    assert result.token_ids == target_only().token_ids[:17]
    assert result.finish_reason == "length"


def test_a_context_shorter_than_a_step_is_filled_too():
    short = Generator(DECODER, drafter=PromptLookup(100), max_model_len=12)
    result = short.generate(PROMPT[:10], max_tokens=100)
    assert len(result.token_ids) == 2


@pytest.mark.parametrize("length", [1, 2, 64, 65, 66, 128, 129, 130])
def test_prompts_of_any_length_share_the_prefill(length):
    prompt = np.random.default_rng(length).integers(0, CONFIG.vocab_size, length).tolist()
    result = generator("draft-model").generate(prompt, max_tokens=4)
    sequence = [*prompt, *result.token_ids]
    assert list(result.token_ids) == argmax_after(sequence)[length - 1 : len(sequence) - 1].tolist()


def test_prompts_that_do_not_fit_are_refused():
    short = Generator(DECODER, max_model_len=10)
    with pytest.raises(UserError, match="has 10 tokens and the context 10; shorten it to at most 9"):
        short.generate([1] * 10)
    with pytest.raises(UserError, match="prompt is empty"):
        short.generate([])
    with pytest.raises(UserError, match="max_tokens must be at least 1, got 0"):
        short.generate([1], max_tokens=0)
    with pytest.raises(UserError, match="between 2 and the model's context of 256 tokens, got 257"):
        Generator(DECODER, max_model_len=257)
    shorter = random_decoder(dataclasses.replace(CONFIG, max_position_embeddings=99), jax.random.key(1))
    with pytest.raises(UserError, match="context of 99 tokens"):
        Generator(DECODER, drafter=DraftModel(shorter, K), max_model_len=128)


def test_each_step_is_traced_once(monkeypatch):
    traces = collections.Counter()
    for name in ("prefill", "cycle"):
        monkeypatch.setattr(generate, name, counting(traces, name, getattr(generate, name)))
    fresh = Generator(DECODER, drafter=DRAFTERS["ngram"], max_model_len=MAX_MODEL_LEN)
    fresh.warm_up()
    for length, max_tokens in ((75, 30), (3, 9), (64, 1)):
        fresh.generate(PROMPT[:length], max_tokens=max_tokens)
    assert traces == {"prefill": 1, "cycle": 2}
    for threshold in (0.0, 0.3, 2.0):
        fresh.generate(PROMPT, max_tokens=30, config=FlyConfig(1, threshold))
    assert traces == {"prefill": 1, "cycle": 3}


def counting(traces, name, function):
    def traced(*args, **kwargs):
        traces[name] += 1
        return function(*args, **kwargs)

    return traced


def test_sampling_is_reproducible_by_its_seed():
    sampling = SamplingParams(temperature=1.0)
    drafter = DraftModel(OTHER_DECODER, K, "probabilistic")
    sampled = Generator(DECODER, drafter=drafter, max_model_len=MAX_MODEL_LEN)
    first, again, other = (
        sampled.generate(PROMPT, max_tokens=30, config=FLY, sampling=sampling, seed=seed) for seed in (0, 0, 1)
    )
    assert first.token_ids == again.token_ids
    assert first.deferred == again.deferred
    assert first.token_ids != other.token_ids
    assert 0 < float(first.counts.acceptance_rate()) < 1


def test_progress_is_called_after_each_cycle():
    seen = []
    result = generator("itself").generate(PROMPT, max_tokens=20, on_tokens=seen.append)
    assert len(seen) == result.num_cycles
    assert seen == sorted(seen)
    assert seen[-1] == 20


@pytest.mark.parametrize(
    ("method", "num_requests"),
    [
        pytest.param("probabilistic", 20_000, marks=pytest.mark.slow),
        pytest.param("greedy", 20_000, marks=pytest.mark.slow),
    ],
)
def test_standard_sampling_emits_the_targets_distribution(method, num_requests, report):
    temperature = 1.5
    small = dataclasses.replace(CONFIG, vocab_size=6, num_layers=1)
    target, draft = random_decoder(small, jax.random.key(2)), random_decoder(small, jax.random.key(3))
    sampling = SamplingParams(temperature=jnp.float32(temperature))
    decoding = Generator(target, drafter=DraftModel(draft, 2, method), max_model_len=8)
    prompt = [1, 4, 2]
    keys = jax.random.split(jax.random.key(5), num_requests)
    state = decoding.start([prompt] * num_requests, [8] * num_requests, sampling, keys)
    state, _ = decoding.step(state, sampling, None, speculate=False)
    state, output = decoding.step(state, sampling, None, speculate=True)
    pairs = np.asarray(state.history)[:, 3:5]
    prefixes = np.asarray([[*prompt, token, 0, 0, 0, 0] for token in range(6)], np.int32)
    cache = KVCache.zeros(small, 6, 8)
    probs = np.asarray(jax.nn.softmax(target(jnp.asarray(prefixes), cache)[0] / temperature), np.float64)
    expected = num_requests * probs[0, 2][:, None] * probs[:, 3]
    observed = np.zeros((6, 6))
    np.add.at(observed, (pairs[:, 0], pairs[:, 1]), 1)
    test = scipy.stats.chisquare(observed.ravel(), expected.ravel() * num_requests / expected.sum())
    report(f"chi-square p = {test.pvalue:.3f}, {np.mean(output.num_tokens):.2f} tokens a cycle")
    assert test.pvalue > 1e-3
    assert 1 < np.mean(output.num_tokens) < 3


@pytest.mark.model
@pytest.mark.parametrize("name", ["ngram", "draft-model", "layer-skip"])
def test_smollm2_standard_equals_target_only(name, report):
    loaded = smollm2.loaded()
    drafter = {
        "ngram": lambda: PromptLookup(16),
        # The target as its own draft model: every draft should be accepted.
        "draft-model": lambda: DraftModel(loaded.decoder, 4),
        "layer-skip": lambda: LayerSkip(default_skip_layers(loaded.config.num_layers), 8),
    }[name]()
    standard = smollm2.generator(drafter)
    arguments = {"max_tokens": 64, "eos_token_ids": loaded.tokenizer.eos_token_ids}
    num_near_ties, cycles, tokens = 0, 0, 0
    prompts = BUILTIN_PROMPTS[::2]
    for prompt in prompts:
        token_ids = smollm2.prompt_of([{"role": "user", "content": prompt.text}])
        result = standard.generate(token_ids, **arguments)
        texts = smollm2.target_only(token_ids, 64).token_ids, result.token_ids
        cycles, tokens = cycles + result.num_cycles, tokens + len(result.token_ids)
        if texts[0] != texts[1]:
            num_near_ties += 1
            assert gap_at_first_difference(loaded.decoder, token_ids, *texts) < 1e-3
    report(f"{name}: {num_near_ties} of {len(prompts)} texts differ, {tokens / cycles:.2f} tokens a cycle")
    assert num_near_ties == 0
