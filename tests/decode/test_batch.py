"""A batch of ragged prompts: every text is what its prompt gives alone."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import smollm2
from near_ties import gap_at_first_difference
from test_generate import CONFIG, DECODER, MAX_MODEL_LEN, OTHER_DECODER, K, generator

from fly_jax import FlyConfig
from fly_jax.config import SamplingParams
from fly_jax.decode.drafters import DraftModel, LayerSkip, PromptLookup, default_skip_layers
from fly_jax.decode.generate import Generator
from fly_jax.errors import UserError
from fly_jax.evaluation.tasks import load_tasks
from fly_jax.noise import request_keys

LENGTHS = (75, 1, 2, 64, 65, 66, 17)
PROMPTS = [np.random.default_rng(length).integers(0, 6, length).tolist() for length in LENGTHS]
MOST = (40, 3, 25, 1, 40, 17, 30)


def differing(decoder, prompts, ours, theirs):
    """How many texts differ; each of them must part at a near-tie."""
    pairs = [
        (prompt, *(each.token_ids for each in pair))
        for prompt, *pair in zip(prompts, ours, theirs, strict=True)
        if pair[0].token_ids != pair[1].token_ids
    ]
    for prompt, *texts in pairs:
        assert gap_at_first_difference(decoder, prompt, *texts) < 1e-3
    return len(pairs)


@pytest.mark.parametrize("name", ["ngram", "layer-skip", pytest.param("itself", marks=pytest.mark.slow)])
def test_each_text_is_what_its_prompt_gives_alone(name):
    one_by_one = [generator().generate(prompt, max_tokens=most) for prompt, most in zip(PROMPTS, MOST, strict=True)]
    together = generator(name).generate_batch(PROMPTS, max_tokens=MOST)
    assert [len(each.token_ids) for each in together] == list(MOST)
    assert differing(DECODER, PROMPTS, together, one_by_one) == 0
    for each in together:
        assert each.num_cycles <= len(each.token_ids)
        assert len(each.deferred) == len(each.token_ids)


def test_counts_and_deferrals_are_of_each_request():
    config = FlyConfig(window_size=1, entropy_threshold=0.0)
    ngram = generator("ngram")
    together = ngram.generate_batch(PROMPTS, max_tokens=MOST, config=config, batch_size=8)
    for prompt, most, each in zip(PROMPTS, MOST, together, strict=True):
        alone = ngram.generate(prompt, max_tokens=most, config=config)
        assert (each.token_ids, each.deferred, each.num_cycles) == (alone.token_ids, alone.deferred, alone.num_cycles)
        for name in ("num_requests", "num_drafts", "num_tokens", "num_accepted", "num_deferred", "num_stops"):
            assert int(getattr(each.counts, name)) == int(getattr(alone.counts, name)), name
    assert sum(sum(each.deferred) for each in together) > 0


def test_a_threshold_of_each_request():
    ngram = generator("ngram")
    thresholds = jnp.asarray([0.0, math.inf] * 3 + [0.0], jnp.float32)
    mixed = ngram.generate_batch(PROMPTS, config=FlyConfig(1, thresholds))
    for i, each in enumerate(mixed):
        config = FlyConfig(1, 0.0) if i % 2 == 0 else None
        assert each.token_ids == ngram.generate(PROMPTS[i], config=config).token_ids


@pytest.mark.slow
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_with_its_own_seed_a_prompt_draws_the_same_in_any_batch(method):
    sampling = SamplingParams(temperature=jnp.float32(1.0), top_k=jnp.int32(20))
    sampled = Generator(DECODER, drafter=DraftModel(OTHER_DECODER, K, method), max_model_len=MAX_MODEL_LEN)
    seeds = list(range(10, 10 + len(PROMPTS)))
    together = sampled.generate_batch(PROMPTS, sampling=sampling, max_tokens=12, seed=seeds, batch_size=8)
    backwards = sampled.generate_batch(PROMPTS[::-1], sampling=sampling, max_tokens=12, seed=seeds[::-1], batch_size=8)
    assert [each.token_ids for each in together] == [each.token_ids for each in backwards[::-1]]
    alone = sampled.generate(PROMPTS[2], sampling=sampling, max_tokens=12, seed=seeds[2])
    assert alone.token_ids == together[2].token_ids
    one_seed = sampled.generate_batch([PROMPTS[0]] * 8, sampling=sampling, max_tokens=12, seed=10)
    assert len({each.token_ids for each in one_seed}) > 1


def test_one_that_is_done_does_not_stop_the_others():
    tokens = generator().generate(PROMPTS[0], max_tokens=40).token_ids
    end = tokens[0]
    results = generator("ngram").generate_batch(PROMPTS, max_tokens=40, eos_token_ids={end})
    assert results[0].token_ids == (end,)
    assert (results[0].finish_reason, results[0].num_cycles) == ("stop", 1)
    for prompt, each in zip(PROMPTS, results, strict=True):
        alone = generator().generate(prompt, max_tokens=40, eos_token_ids={end})
        assert (each.token_ids, each.finish_reason) == (alone.token_ids, alone.finish_reason)
    assert {each.finish_reason for each in results} == {"stop", "length"}


def test_fewer_prompts_than_the_batch_size_compile_nothing_new():
    fresh = Generator(DECODER, drafter=PromptLookup(K), max_model_len=MAX_MODEL_LEN)
    fresh.warm_up(batch_size=4)
    sizes = fresh.num_programs()
    assert sizes == 3
    for count in (1, 3, 4):
        fresh.generate_batch(PROMPTS[:count], max_tokens=8, batch_size=4)
    assert fresh.num_programs() == sizes


def test_memory_is_allocated_once():
    itself = generator("itself")
    state = itself.start(PROMPTS, [MAX_MODEL_LEN] * len(PROMPTS), SamplingParams(), request_keys(jax.random.key(0), 7))

    def addresses(state):
        return [
            each.unsafe_buffer_pointer()
            for each in jax.tree.leaves((state.cache, state.drafter_state, state.history))
            if each.ndim > 1
        ]

    before = addresses(state)
    for speculate in (False, True, True):
        state, _ = itself.step(state, SamplingParams(), None, speculate=speculate)
        assert addresses(state) == before
    assert len(before) == 2 * 2 * CONFIG.num_layers + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "prompts must be 1 to 1 .batch_size., got 0"),
        ({"batch_size": 2}, "prompts must be 1 to 2 .batch_size., got 7"),
        ({"max_tokens": [1, 2]}, "max_tokens must be one number or one for each of 7 prompts, got 2"),
        ({"max_tokens": [1] * 6 + [0]}, "max_tokens must be at least 1, got 0"),
        ({"seed": [0] * 6 + [-1]}, "seed must be in .0, 2..32., got -1"),
        ({"prompts": [[1], []]}, "prompt is empty"),
    ],
)
def test_bad_batches_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        generator().generate_batch(**{"prompts": PROMPTS, **arguments})


@pytest.mark.model
@pytest.mark.parametrize("name", ["target-only", "ngram", "draft-model", "layer-skip"])
def test_smollm2_in_a_batch_gives_the_texts_of_the_target_alone(name, report):
    loaded = smollm2.loaded()
    drafter = {
        "target-only": None,
        "ngram": PromptLookup(8),
        # The target as its own draft model.
        "draft-model": DraftModel(loaded.decoder, 4),
        "layer-skip": LayerSkip(default_skip_layers(loaded.config.num_layers), 3),
    }[name]
    prompts = sorted((smollm2.prompt_of(task.messages) for task in load_tasks(None)), key=len)[::12]
    assert len(prompts) == 8
    decoding = smollm2.generator(drafter)
    arguments = {"max_tokens": 16, "eos_token_ids": loaded.tokenizer.eos_token_ids}
    alone = [smollm2.target_only(prompt, 16) for prompt in prompts]
    for batch_size in (3, 8) if name == "ngram" else (8,):
        batches = [
            each
            for i in range(0, len(prompts), batch_size)
            for each in decoding.generate_batch(prompts[i : i + batch_size], batch_size=batch_size, **arguments)
        ]
        count = differing(loaded.decoder, prompts, batches, alone)
        report(f"{name}, B = {batch_size}: {count} of {len(prompts)} texts differ, at near-ties")
        assert count <= 1
