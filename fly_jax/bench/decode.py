"""`fly-jax bench decode`: decoding steps against their floors, as ratios of one interleaved run.

A machine's speed drifts by more than the differences of interest, so every ratio is taken within a round in which both
sides ran one after the other, and medians and quartiles are over rounds.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fly_jax import defaults
from fly_jax.bench.ratios import Ratio
from fly_jax.config import FlyConfig, SamplingParams
from fly_jax.decode.checkpoints.load import LoadedModel
from fly_jax.decode.cycle import DecodeState
from fly_jax.decode.drafters import PromptLookup, empty_cache
from fly_jax.decode.generate import Generator
from fly_jax.decode.model import Decoder, KVCache
from fly_jax.decode.prompts import BUILTIN_PROMPTS
from fly_jax.errors import UserError
from fly_jax.noise import request_keys

NUM_DRAFT_TOKENS = 8
"""K of the step and cycle ratios."""

PROMPT_NUM_DRAFT_TOKENS = defaults.NUM_SPECULATIVE_TOKENS
"""K of the comparison on the built-in prompts: the default of `fly-jax generate`."""

MAX_MODEL_LEN = 320
MAX_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class DecodeBench:
    """The ratios, and the median milliseconds of what they are made of."""

    ratios: tuple[Ratio, ...]
    milliseconds: dict[str, float]

    def fields(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`."""
        return {"ratios": [each.fields() for each in self.ratios], "milliseconds": self.milliseconds}


def measure(loaded: LoadedModel, *, rounds: int, progress: Callable[[str, float], None]) -> DecodeBench:
    """Measures everything.

    Args:
      loaded: the model; its weights must be float32, because a floor in another precision is another floor.
      rounds: of the steps; the built-in prompts are decoded in a fifth as many, at least once.
      progress: called with what is being done and the fraction done.

    Raises:
      UserError: the weights are not float32, or the model's context is shorter than the benchmark's.
    """
    if loaded.decoder.embedding[...].dtype != jnp.float32:
        raise UserError("The floor of this benchmark is reading float32 weights: load the model in float32.")
    seconds = _measure_steps(loaded.decoder, _encode(loaded)[0], rounds, progress)
    names = ("floor", "one", "many", "cycle", "products of one", "products of many")
    floor, one, many, cycle, products_one, products_many = (np.asarray(seconds[name]) for name in names)
    prompts = _measure_prompts(loaded, max(1, rounds // 5), progress)
    tokens = NUM_DRAFT_TOKENS + 1
    ratios = (
        _ratio(
            "one-token step / floor",
            "the model alone, jitted, 1 token; the floor is one jitted sum over the rows of every weight array: "
            "reading the float32 weights once",
            1.5,
            one / floor,
        ),
        _ratio(
            f"{tokens}-token step / one-token step",
            f"the model alone, jitted, {tokens} tokens and 1 token",
            1.8,
            many / one,
        ),
        _ratio(
            f"products of {tokens} rows / of one row",
            f"every weight matrix times {tokens} rows and times one: what XLA's products alone allow the ratio above",
            None,
            products_many / products_one,
        ),
        _ratio(
            "(cycle - step) / cycle",
            f"cycle: model, fly_verify, n-gram lookup, result on the host; step: the model alone, both {tokens} tokens",
            0.04,
            (cycle - many) / cycle,
        ),
        _ratio(
            "standard n-gram / target-only",
            f"tokens/s of decoding the built-in prompts, greedy, K = {PROMPT_NUM_DRAFT_TOKENS}, same texts",
            2.0,
            np.asarray(prompts),
            at_most=False,
        ),
    )
    return DecodeBench(ratios, {name: float(np.median(each)) * 1e3 for name, each in seconds.items()})


def _ratio(name: str, definition: str, goal: float | None, values: np.ndarray, *, at_most: bool = True) -> Ratio:
    return Ratio(name, definition, goal, at_most, tuple(values.tolist()))


def _encode(loaded: LoadedModel) -> list[list[int]]:
    codec = loaded.tokenizer
    raw = codec.chat_template is None
    return [codec.encode_chat([{"role": "user", "content": prompt.text}], raw=raw) for prompt in BUILTIN_PROMPTS]


def _measure_steps(
    decoder: Decoder, prompt_token_ids: Sequence[int], rounds: int, progress: Callable[[str, float], None]
) -> dict[str, list[float]]:
    """Seconds per round of each step."""
    weights, structure = jax.tree.flatten(decoder)

    def run_model(weights: list[jax.Array], cache: KVCache, token_ids: jax.Array) -> tuple[jax.Array, KVCache]:
        logits, cache = jax.tree.unflatten(structure, weights)(token_ids, cache)
        return logits, cache

    model = jax.jit(run_model, donate_argnums=1)
    floor = jax.jit(lambda weights: [jnp.sum(each, -1) for each in weights])
    products = jax.jit(lambda matrices, rows: [jnp.ones((len(rows), len(each))) @ each for each in matrices])
    matrices = [each for each in weights if each.ndim == 2]
    cache = empty_cache(decoder, 1, MAX_MODEL_LEN).advance(jnp.int32([len(prompt_token_ids)]))
    generator = Generator(decoder, drafter=PromptLookup(NUM_DRAFT_TOKENS), max_model_len=MAX_MODEL_LEN)
    state = _started(generator, prompt_token_ids)
    names = ("floor", "one", "many", "cycle", "products of one", "products of many")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    warm_up = 2
    for i in range(warm_up + rounds):
        progress("measure steps", i / (warm_up + rounds))
        timed = {}
        start = time.perf_counter()
        jax.block_until_ready(floor(weights))
        timed["floor"] = time.perf_counter() - start
        for name, num_tokens in (("one", 1), ("many", NUM_DRAFT_TOKENS + 1)):
            token_ids = jnp.ones((1, num_tokens), jnp.int32)
            start = time.perf_counter()
            _, cache = jax.block_until_ready(model(weights, cache, token_ids))
            timed[name] = time.perf_counter() - start
            start = time.perf_counter()
            jax.block_until_ready(products(matrices, token_ids[0]))
            timed[f"products of {name}"] = time.perf_counter() - start
        start = time.perf_counter()
        state, _ = generator.step(state, SamplingParams(), FlyConfig(), speculate=True)
        timed["cycle"] = time.perf_counter() - start
        if int(state.length[0]) + NUM_DRAFT_TOKENS + 1 > MAX_MODEL_LEN:
            state = _started(generator, prompt_token_ids)
        if i >= warm_up:
            for name, value in timed.items():
                seconds[name].append(value)
    return seconds


def _started(generator: Generator, prompt_token_ids: Sequence[int]) -> DecodeState:
    keys = request_keys(jax.random.key(0), 1)
    state = generator.start([prompt_token_ids], [MAX_MODEL_LEN], SamplingParams(), keys)
    state, _ = generator.step(state, SamplingParams(), None, speculate=False)
    return state


def _measure_prompts(loaded: LoadedModel, rounds: int, progress: Callable[[str, float], None]) -> list[float]:
    """Standard n-gram decoding's tokens/s over target-only's, all prompts together, once per round."""
    prompts = _encode(loaded)
    target_only = Generator(loaded.decoder, max_model_len=MAX_MODEL_LEN)
    standard = Generator(loaded.decoder, drafter=PromptLookup(PROMPT_NUM_DRAFT_TOKENS), max_model_len=MAX_MODEL_LEN)
    target_only.warm_up()
    standard.warm_up()
    ratios = []
    for i in range(rounds):
        seconds, tokens = {target_only: 0.0, standard: 0.0}, {target_only: 0, standard: 0}
        for j, prompt in enumerate(prompts):
            progress("measure prompts", (i * len(prompts) + j) / (rounds * len(prompts)))
            for generator in (target_only, standard):
                result = generator.generate(prompt, max_tokens=MAX_TOKENS, eos_token_ids=loaded.tokenizer.eos_token_ids)
                seconds[generator] += result.decode_seconds
                tokens[generator] += len(result.token_ids)
        speeds = {each: tokens[each] / seconds[each] for each in seconds}
        ratios.append(speeds[standard] / speeds[target_only])
    return ratios
