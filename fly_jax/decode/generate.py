"""Decoding a batch of prompts: a host loop around one jitted cycle, which verifies drafts with `fly_verify`.

Target-only, standard and FLy decoding are the same loop: without drafts, with `config=None` and with a `FlyConfig`.
In the shape descriptions, `B` denotes requests, `K` draft tokens per request and `L` the capacity of histories and
caches.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fly_jax.compat import num_programs
from fly_jax.config import FlyConfig, SamplingParams
from fly_jax.decode.cycle import CycleOutput, DecodeState, cycle, prefill
from fly_jax.decode.drafters import Drafter, DraftModel, check_drafter, empty_cache, empty_draft
from fly_jax.decode.model import Decoder
from fly_jax.errors import UserError
from fly_jax.metrics import AcceptanceCounts
from fly_jax.noise import request_keys
from fly_jax.traces.record import TraceRows

PREFILL_CHUNK = 64
"""Tokens per prefill step: prompts of any length share one compilation."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """One decoded text.

    Attributes:
      token_ids: emitted tokens, the end-of-sequence token included.
      deferred: for each of them, whether FLy kept it against the target's choice.
      counts: of the verified drafts up to the text's last token; drafts past it are as if they had not been made.
      num_cycles: target steps after prefill until the text was done.
      prefill_seconds: time of filling the caches with the prompts of the batch: the same for all of its texts.
      decode_seconds: time of the cycles of the batch until its last text was done: the same for all of its texts.
      finish_reason: "stop" at an end-of-sequence token or where `find_end` found one, "length" at the limit.
    """

    token_ids: tuple[int, ...]
    deferred: tuple[bool, ...]
    counts: AcceptanceCounts
    num_cycles: int
    prefill_seconds: float
    decode_seconds: float
    finish_reason: str


@dataclasses.dataclass
class _Text:
    """A text while it is decoded."""

    max_tokens: int
    eos_token_ids: Collection[int]
    find_end: Callable[[Sequence[int]], int | None] | None
    counts: AcceptanceCounts
    token_ids: list[int] = dataclasses.field(default_factory=list)
    deferred: list[bool] = dataclasses.field(default_factory=list)
    num_cycles: int = 0
    finish_reason: str | None = None

    def extend(self, token_ids: list[int], deferred: Array, num_draft_tokens: int, *, invalid: bool) -> None:
        """Adds and counts what a cycle emitted, up to the end of the text."""
        before = len(self.token_ids)
        end = next((before + i + 1 for i, each in enumerate(token_ids) if each in self.eos_token_ids), None)
        self.token_ids = [*self.token_ids, *token_ids][:end]
        found = None if self.find_end is None else self.find_end(self.token_ids)
        self.token_ids = self.token_ids[:found]
        num_kept = len(self.token_ids) - before
        # The last token of a cycle is the target's own and has no deferral flag.
        self.deferred += [*deferred.tolist(), False][:num_kept]
        self.num_cycles += 1
        if num_draft_tokens > 0:
            counts = _counts(num_kept, len(token_ids), deferred, num_draft_tokens, invalid=invalid)
            self.counts = jax.tree.map(np.add, self.counts, counts)
        if end is not None or found is not None:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_tokens:
            self.finish_reason = "length"


def _counts(
    num_kept: int, num_tokens: int, deferred: Array, num_draft_tokens: int, *, invalid: bool
) -> AcceptanceCounts:
    """Of a cycle with drafts: what it emitted past the `num_kept` tokens might as well not have been drafted."""

    def count(values: Any) -> Any:
        return np.asarray(values, np.int32)

    is_cut = num_kept < num_tokens
    num_drafted, num_accepted = (num_kept, num_kept) if is_cut else (num_draft_tokens, num_tokens - 1)
    position = np.arange(len(deferred))
    return AcceptanceCounts(
        num_requests=count(1),
        num_drafts=count(1),
        num_tokens=count(num_kept),
        drafted_per_position=count(position < num_drafted),
        accepted_per_position=count(position < num_accepted),
        deferred_per_position=count(deferred & (position < num_kept)),
        num_stops=count(num_accepted < num_drafted),
        num_invalid=count(invalid and not is_cut),
    )


def context_length(decoder: Decoder, drafter: Drafter | None) -> int:
    """Tokens of prompt and output that the target, and a model that drafts for it, can hold."""
    models = [decoder, drafter.decoder] if isinstance(drafter, DraftModel) else [decoder]
    return min(model.config.max_position_embeddings for model in models)


class Generator:
    """Decodes with one target and one drafter; each of its steps is compiled once for a batch size.

    The compiled steps are: prefill, a cycle of one token for when nothing was proposed, and one of K + 1 tokens (for
    each kind of configuration and sampling it is used with).

    Attributes:
      max_model_len: tokens of prompt and output together that fit.
    """

    def __init__(self, decoder: Decoder, *, drafter: Drafter | None = None, max_model_len: int) -> None:
        """Allocates nothing and compiles nothing yet.

        Args:
          decoder: the target.
          drafter: where drafts come from; None is target-only decoding.
          max_model_len: capacity of the caches. Every step attends over all of it: take what is needed.

        Raises:
          UserError: the drafter does not fit the target, or `max_model_len` exceeds a model's context.
        """
        context = context_length(decoder, drafter)
        if not 2 <= max_model_len <= context:
            raise UserError(
                f"max_model_len must be between 2 and the model's context of {context} tokens, got {max_model_len}."
            )
        if drafter is not None:
            check_drafter(drafter, decoder)
        self.max_model_len = max_model_len
        # A cache must have room for the widest step, however short the context.
        self._num_speculative_tokens = 0 if drafter is None else drafter.num_speculative_tokens
        self._capacity = max(max_model_len, PREFILL_CHUNK, self._num_speculative_tokens + 1)
        self._decoder, self._drafter = decoder, drafter
        # Flattening a module costs a share of a millisecond: once here, instead of in every cycle.
        self._weights, structure = jax.tree.flatten((decoder, drafter))
        self._prefill = jax.jit(functools.partial(prefill, structure), donate_argnums=(1, 2))
        self._cycle = jax.jit(
            functools.partial(cycle, structure), static_argnames=("speculate", "record"), donate_argnames=("state",)
        )

    def check_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """Refuses a prompt that cannot be read, or leaves no room for output.

        Raises:
          UserError: the prompt is empty, too long, or has a token that the model does not know.
        """
        if not prompt_token_ids:
            raise UserError("The prompt is empty.")
        if len(prompt_token_ids) >= self.max_model_len:
            raise UserError(
                f"The prompt has {len(prompt_token_ids)} tokens and the context {self.max_model_len}; "
                f"shorten it to at most {self.max_model_len - 1}."
            )
        num_tokens = self._decoder.config.vocab_size
        outside = [each for each in prompt_token_ids if not 0 <= each < num_tokens]
        if outside:
            raise UserError(
                f"The prompt has the token id {outside[0]}, but the model has only {num_tokens} tokens: leave out what "
                "its tokenizer has beyond them."
            )

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        config: FlyConfig | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        max_tokens: int = 128,
        eos_token_ids: Collection[int] = (),
        seed: int = 0,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Generation:
        """Decodes one prompt: `generate_batch` of one."""
        (generation,) = self.generate_batch(
            [prompt_token_ids],
            config=config,
            sampling=sampling,
            max_tokens=max_tokens,
            eos_token_ids=eos_token_ids,
            seed=[seed],
            on_tokens=on_tokens,
        )
        return generation

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        config: FlyConfig | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        max_tokens: int | Sequence[int] = 128,
        eos_token_ids: Collection[int] = (),
        seed: int | Sequence[int] = 0,
        batch_size: int | None = None,
        on_tokens: Callable[[int], None] | None = None,
        on_trace: Callable[[TraceRows, np.ndarray], None] | None = None,
        find_end: Callable[[Sequence[int]], int | None] | None = None,
    ) -> list[Generation]:
        """Decodes prompts of any lengths together; each advances by what it accepts, until all are done.

        A text depends on its own prompt, sampling and seed only, up to float rounding, which differs between batch
        sizes and can decide where the target's two best tokens are within it. Memory is allocated once, at the start.

        Args:
          prompts: token ids of each, at least one prompt and one token.
          config: None for standard, lossless verification, else FLy's settings; its threshold may be `[batch_size]`.
          sampling: scalars, or arrays of `[batch_size]`; the default is greedy.
          max_tokens: most tokens to emit, of all or of each; also bounded by `max_model_len`.
          eos_token_ids: tokens that end a text.
          seed: of all drawing, of the batch or of each prompt; greedy decoding uses none. With a seed of its own a
            prompt draws the same in any batch.
          batch_size: rows to compile for; with fewer prompts the rest is padding. None: the number of prompts.
          on_tokens: called after each cycle with the number of tokens so far, of all texts.
          on_trace: called after each cycle with what a trace holds of it and `[batch_size]` bool, which requests took
            part. Recording costs another look at the logits: None does without.
          find_end: called after each cycle with the tokens of each text so far; how many of them are the whole text, at
            least one of the cycle's, or None where it goes on.

        Returns:
          One text for each prompt, in their order.

        Raises:
          UserError: see `check_prompt`; or an argument is out of range, or not of one value per prompt.
        """
        size = len(prompts) if batch_size is None else batch_size
        if not 1 <= len(prompts) <= size:
            raise UserError(f"prompts must be 1 to {max(size, 1)} (batch_size), got {len(prompts)}.")
        for prompt in prompts:
            self.check_prompt(prompt)
        most = _each("max_tokens", max_tokens, len(prompts), 1, np.iinfo(np.int32).max)
        seeds = _each("seed", seed, len(prompts), 0, 2**32 - 1)
        keys = _keys(seeds[0] if isinstance(seed, int | np.integer) else seeds, size)
        limits = [min(len(prompt) + each, self.max_model_len) for prompt, each in zip(prompts, most, strict=True)]
        zeros = jax.device_get(AcceptanceCounts.zeros(self._num_speculative_tokens))
        texts = [
            _Text(limit - len(prompt), eos_token_ids, find_end, zeros)
            for prompt, limit in zip(prompts, limits, strict=True)
        ]

        start = time.perf_counter()
        state = self.start(prompts, limits, sampling, keys)
        prefilled = time.perf_counter()
        active = np.arange(size) < len(prompts)
        num_draft_tokens = np.zeros(size, np.int32)
        while active.any():
            speculate = bool((num_draft_tokens[active] > 0).any())
            record = on_trace is not None
            state, output = self.step(state, sampling, config, speculate=speculate, active=active, record=record)
            if on_trace is not None and output.trace is not None:
                on_trace(output.trace, active.copy())
            for i in np.flatnonzero(active):
                emitted = output.token_ids[i, : output.num_tokens[i]].tolist()
                texts[i].extend(emitted, output.deferred[i], int(num_draft_tokens[i]), invalid=bool(output.invalid[i]))
                active[i] = texts[i].finish_reason is None
            num_draft_tokens = np.asarray(output.num_draft_tokens)
            if on_tokens is not None:
                on_tokens(sum(len(text.token_ids) for text in texts))
        seconds = prefilled - start, time.perf_counter() - prefilled
        return [
            Generation(
                tuple(text.token_ids),
                tuple(text.deferred),
                text.counts,
                text.num_cycles,
                *seconds,
                str(text.finish_reason),
            )
            for text in texts
        ]

    def warm_up(
        self,
        *,
        config: FlyConfig | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        batch_size: int = 1,
    ) -> None:
        """Compiles every step that decoding will use with these arguments."""
        prompts, limits = [[0, 0]] * batch_size, [self.max_model_len] * batch_size
        state = self.start(prompts, limits, sampling, _keys([0] * batch_size, batch_size))
        state, _ = self.step(state, sampling, config, speculate=False)
        if self._drafter is not None:
            self.step(state, sampling, config, speculate=True)

    def num_programs(self) -> int:
        """How many steps have been compiled so far."""
        return num_programs(self._prefill) + num_programs(self._cycle)

    def start(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], sampling: SamplingParams, keys: Array
    ) -> DecodeState:
        """The state after prefill, with no drafts yet.

        Args:
          prompts: at most `B`; the other requests are padding.
          limits: for each prompt, the length at which it is done.
          sampling: of the steps that will follow.
          keys: `[B]`, of the requests.
        """
        size = len(keys)
        lengths, bounds = np.ones(size, np.int32), np.ones(size, np.int32)
        history = np.zeros((size, self._capacity), np.int32)
        for i, prompt in enumerate(prompts):
            history[i, : len(prompt)] = prompt
            lengths[i], bounds[i] = len(prompt), limits[i]
        cache = empty_cache(self._decoder, size, self._capacity)
        drafter_state = None if self._drafter is None else self._drafter.init_state(size, self._capacity)
        for begin in range(0, max(lengths) - 1, PREFILL_CHUNK):
            chunk = np.zeros((size, PREFILL_CHUNK), np.int32)
            count = np.clip(lengths - 1 - begin, 0, PREFILL_CHUNK).astype(np.int32)
            available = history[:, begin : begin + PREFILL_CHUNK]
            chunk[:, : available.shape[1]] = available
            cache, drafter_state = self._prefill(self._weights, cache, drafter_state, chunk, count)
        draft = empty_draft(self._drafter, size, self._decoder.config.vocab_size, sampling)
        state = DecodeState(
            history=jnp.asarray(history),
            length=jnp.asarray(lengths),
            limit=jnp.asarray(bounds),
            cache=cache,
            draft=draft,
            drafter_state=drafter_state,
            keys=keys,
            step=jnp.int32(0),
        )
        return jax.block_until_ready(state)

    def step(
        self,
        state: DecodeState,
        sampling: SamplingParams,
        config: FlyConfig | None,
        *,
        speculate: bool,
        active: np.ndarray | None = None,
        record: bool = False,
    ) -> tuple[DecodeState, CycleOutput]:
        """One cycle, read back to the host: of K + 1 tokens, or of one where the pending drafts need not be looked at.

        `state` is consumed: its buffers hold the new state. `active` `[B]` bool says which requests go on; None is all.
        `record` asks for what a trace holds of the cycle.
        """
        if active is None:
            active = np.ones(state.length.shape, bool)
        # Without drafts there is nothing to defer: all configurations share that compilation.
        state, output = self._cycle(
            self._weights,
            state=state,
            active=active,
            sampling=sampling,
            config=config if speculate else None,
            speculate=speculate,
            record=record,
        )
        return state, jax.device_get(output)


def _keys(seed: int | Sequence[int], batch_size: int) -> Array:
    """`[batch_size]` keys: of one seed and the request's index, or of one seed per request."""
    if isinstance(seed, int):
        return request_keys(jax.random.key(seed), batch_size)
    seeds = np.zeros(batch_size, np.uint32)
    seeds[: len(seed)] = seed
    return _keys_of(seeds)


@jax.jit
def _keys_of(seeds: Array) -> Array:
    return jax.vmap(lambda seed: request_keys(jax.random.key(seed), 1)[0])(seeds)


def _each(name: str, value: int | Sequence[int], num_prompts: int, least: int, most: int) -> list[int]:
    """One value per prompt, in range."""
    values = [value] * num_prompts if isinstance(value, int | np.integer) else list(value)
    if len(values) != num_prompts:
        raise UserError(f"{name} must be one number or one for each of {num_prompts} prompts, got {len(values)}.")
    wrong = [each for each in values if not least <= each <= most]
    if wrong:
        bounds = f"at least {least}" if name == "max_tokens" else f"in [{least}, 2**32)"
        raise UserError(f"{name} must be {bounds}, got {wrong[0]}.")
    return values
