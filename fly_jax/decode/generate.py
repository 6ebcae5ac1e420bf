"""The decoding loop: one jitted cycle that verifies the pending drafts with `fly_verify` and proposes the next ones.

Target-only, standard and FLy decoding are the same loop: without drafts, with `config=None` and with a `FlyConfig`.
In the shape descriptions, `B` denotes requests (1 here), `K` draft tokens per request and `L` the capacity of
histories and caches.
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

from fly_jax.config import FlyConfig
from fly_jax.decode.drafters import (
    Draft,
    DraftContext,
    Drafter,
    DraftModel,
    check_drafter,
    empty_cache,
    empty_draft,
)
from fly_jax.decode.errors import ModelError
from fly_jax.decode.model import Decoder, KVCache
from fly_jax.metrics import AcceptanceCounts
from fly_jax.noise import request_keys
from fly_jax.processing import SamplingParams
from fly_jax.verify import fly_verify

PREFILL_CHUNK = 64
"""Tokens per prefill step: prompts of any length share one compilation."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["history", "length", "limit", "cache", "draft", "drafter_state", "keys", "step", "counts"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything a cycle needs of the cycles before it.

    Attributes:
      history: `[B, L]` int32, prompt and emitted tokens.
      length: `[B]` int32, how many there are.
      limit: `[B]` int32, the length at which a request is done.
      cache: the target's; `cache.length == length - 1`, because the last token has not been fed yet.
      draft: proposed by the cycle before, not verified yet.
      drafter_state: the drafter's own.
      keys: `[B]` keys of the requests; the step is folded in by the cycle.
      step: int32 scalar, cycles so far.
      counts: of all cycles that verified drafts.
    """

    history: Array
    length: Array
    limit: Array
    cache: KVCache
    draft: Draft
    drafter_state: Any
    keys: Array
    step: Array
    counts: AcceptanceCounts


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["token_ids", "num_tokens", "deferred", "num_draft_tokens"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class CycleOutput:
    """What the host reads of a cycle.

    Attributes:
      token_ids: `[B, K+1]` int32, -1 padded.
      num_tokens: `[B]` int32, how many were emitted.
      deferred: `[B, K]` bool, which of them FLy kept against the target's choice.
      num_draft_tokens: `[B]` int32, how many drafts are pending now.
    """

    token_ids: Array
    num_tokens: Array
    deferred: Array
    num_draft_tokens: Array


@dataclasses.dataclass(frozen=True)
class Generation:
    """One decoded text.

    Attributes:
      token_ids: emitted tokens, the end-of-sequence token included.
      deferred: for each of them, whether FLy kept it against the target's choice.
      counts: of all verified drafts, also past an end-of-sequence token.
      num_cycles: target steps after prefill.
      prefill_seconds: time of filling the caches with the prompt.
      decode_seconds: time of the cycles.
      finish_reason: "stop" at an end-of-sequence token, "length" at the limit.
    """

    token_ids: tuple[int, ...]
    deferred: tuple[bool, ...]
    counts: AcceptanceCounts
    num_cycles: int
    prefill_seconds: float
    decode_seconds: float
    finish_reason: str


class Generator:
    """Decodes with one target and one drafter; each of its steps is compiled once.

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
          ModelError: the drafter does not fit the target, or `max_model_len` exceeds a model's context.
        """
        models = [decoder, drafter.decoder] if isinstance(drafter, DraftModel) else [decoder]
        context = min(model.config.max_position_embeddings for model in models)
        if not 2 <= max_model_len <= context:
            raise ModelError(
                f"max_model_len must be between 2 and the model's context of {context} tokens, got {max_model_len}."
            )
        if drafter is not None:
            check_drafter(drafter, decoder)
        self.max_model_len = max_model_len
        # A cache must have room for the widest step, however short the context.
        k = 0 if drafter is None else drafter.num_speculative_tokens
        self._capacity = max(max_model_len, PREFILL_CHUNK, k + 1)
        self._decoder, self._drafter = decoder, drafter
        # Flattening a module costs a share of a millisecond: once here, instead of in every cycle.
        self._weights, structure = jax.tree.flatten((decoder, drafter))
        self._prefill = jax.jit(functools.partial(_prefill, structure), donate_argnums=(1, 2))
        self._cycle = jax.jit(
            functools.partial(_cycle, structure), static_argnames=("speculate",), donate_argnames=("state",)
        )

    def check_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """Refuses a prompt that leaves no room for output.

        Raises:
          ModelError: the prompt is empty or too long.
        """
        if not prompt_token_ids:
            raise ModelError("The prompt is empty.")
        if len(prompt_token_ids) >= self.max_model_len:
            raise ModelError(
                f"The prompt has {len(prompt_token_ids)} tokens and the context {self.max_model_len}; "
                f"shorten it to at most {self.max_model_len - 1}."
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
        """Decodes one prompt.

        Args:
          prompt_token_ids: at least one token.
          config: None for standard, lossless verification, else FLy's settings.
          sampling: arrays of one request; the default is greedy.
          max_tokens: most tokens to emit; also bounded by `max_model_len`.
          eos_token_ids: tokens that end the text.
          seed: of all drawing; greedy decoding uses none.
          on_tokens: called after each cycle with the number of tokens so far.

        Raises:
          ModelError: see `check_prompt`; or `max_tokens` is below 1, or `seed` not in [0, 2**32).
        """
        self.check_prompt(prompt_token_ids)
        if max_tokens < 1:
            raise ModelError(f"max_tokens must be at least 1, got {max_tokens}.")
        if not 0 <= seed < 2**32:
            raise ModelError(f"seed must be in [0, 2**32), got {seed}.")
        start = time.perf_counter()
        limit = min(len(prompt_token_ids) + max_tokens, self.max_model_len)
        state = self.start(prompt_token_ids, limit, sampling, seed)
        prefilled = time.perf_counter()
        token_ids: list[int] = []
        deferred: list[bool] = []
        finish_reason = "length"
        num_cycles = num_draft_tokens = 0
        while len(token_ids) < limit - len(prompt_token_ids) and finish_reason == "length":
            state, output = self.step(state, sampling, config, speculate=num_draft_tokens > 0)
            num_cycles += 1
            num_draft_tokens = int(output.num_draft_tokens[0])
            emitted = output.token_ids[0, : output.num_tokens[0]].tolist()
            kept = _up_to_end(emitted, eos_token_ids)
            if kept and kept[-1] in eos_token_ids:
                finish_reason = "stop"
            token_ids += kept
            # The last token of a cycle is the target's own and has no deferral flag.
            deferred += [*output.deferred[0].tolist(), False][: len(kept)]
            if on_tokens is not None:
                on_tokens(len(token_ids))
        finished = time.perf_counter()
        return Generation(
            tuple(token_ids),
            tuple(deferred),
            jax.device_get(state.counts),
            num_cycles,
            prefilled - start,
            finished - prefilled,
            finish_reason,
        )

    def warm_up(self, *, config: FlyConfig | None = None, sampling: SamplingParams = SamplingParams()) -> None:  # noqa: B008
        """Compiles every step that `generate` will use with these arguments."""
        state = self.start([0, 0], self.max_model_len, sampling, seed=0)
        state, _ = self.step(state, sampling, config, speculate=False)
        if self._drafter is not None:
            self.step(state, sampling, config, speculate=True)

    def start(self, prompt_token_ids: Sequence[int], limit: int, sampling: SamplingParams, seed: int) -> DecodeState:
        """The state of one request after prefill, with no drafts yet; `limit` is the length at which it is done."""
        history = np.zeros((1, self._capacity), np.int32)
        history[0, : len(prompt_token_ids)] = prompt_token_ids
        cache = empty_cache(self._decoder, 1, self._capacity)
        drafter_state = None if self._drafter is None else self._drafter.init_state(1, self._capacity)
        to_fill = np.asarray(prompt_token_ids[:-1], np.int32)
        for begin in range(0, len(to_fill), PREFILL_CHUNK):
            chunk = np.zeros((1, PREFILL_CHUNK), np.int32)
            count = min(PREFILL_CHUNK, len(to_fill) - begin)
            chunk[0, :count] = to_fill[begin : begin + count]
            cache, drafter_state = self._prefill(
                self._weights, cache, drafter_state, chunk, np.asarray([count], np.int32)
            )
        draft = empty_draft(self._drafter, 1, self._decoder.config.vocab_size, sampling)
        state = DecodeState(
            history=jnp.asarray(history),
            length=jnp.int32([len(prompt_token_ids)]),
            limit=jnp.int32([limit]),
            cache=cache,
            draft=draft,
            drafter_state=drafter_state,
            keys=request_keys(jax.random.key(seed), 1),
            step=jnp.int32(0),
            # Copied, because a donated buffer may appear only once.
            counts=jax.tree.map(jnp.copy, AcceptanceCounts.zeros(draft.token_ids.shape[1])),
        )
        return jax.block_until_ready(state)

    def step(
        self, state: DecodeState, sampling: SamplingParams, config: FlyConfig | None, *, speculate: bool
    ) -> tuple[DecodeState, CycleOutput]:
        """One cycle, read back to the host: of K + 1 tokens, or of one where the pending drafts need not be looked at.

        `state` is consumed: its buffers hold the new state.
        """
        # Without drafts there is nothing to defer: all configurations share that compilation.
        state, output = self._cycle(
            self._weights, state=state, sampling=sampling, config=config if speculate else None, speculate=speculate
        )
        return state, jax.device_get(output)


def _prefill(
    structure: Any, weights: list[Array], cache: KVCache, drafter_state: Any, token_ids: Array, num_tokens: Array
) -> tuple[KVCache, Any]:
    """Feeds `num_tokens` `[B]` of `token_ids` `[B, T]` to both caches."""
    decoder, drafter = jax.tree.unflatten(structure, weights)
    _, cache = decoder.hidden(token_ids, cache)
    if drafter is not None:
        drafter_state = drafter.prefill(drafter_state, token_ids, num_tokens)
    return cache.advance(num_tokens), drafter_state


def _cycle(
    structure: Any,
    weights: list[Array],
    *,
    state: DecodeState,
    sampling: SamplingParams,
    config: FlyConfig | None,
    speculate: bool,
) -> tuple[DecodeState, CycleOutput]:
    """Verifies the pending drafts (none unless `speculate`), appends what is emitted, proposes the next drafts."""
    decoder, drafter = jax.tree.unflatten(structure, weights)
    drafts = state.draft.token_ids if speculate else state.draft.token_ids[:, :0]
    num_draft_tokens = state.draft.num_draft_tokens if speculate else jnp.zeros_like(state.length)
    last = jnp.take_along_axis(state.history, state.length[:, None] - 1, 1)
    logits, cache = decoder(jnp.concatenate([last, drafts], 1), state.cache)
    verification = fly_verify(
        logits,
        drafts,
        config=config,
        num_draft_tokens=num_draft_tokens,
        draft_probs=state.draft.draft_probs if speculate else None,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        key=None if sampling.temperature is None else _step_keys(state.keys, state.step),
    )
    length = state.length + verification.num_tokens
    state = dataclasses.replace(
        state,
        history=_append(state.history, state.length, verification.token_ids),
        length=length,
        cache=cache.advance(verification.num_tokens),
        step=state.step + 1,
    )
    if speculate:
        counts = AcceptanceCounts.from_verification(verification, num_draft_tokens)
        state = dataclasses.replace(state, counts=state.counts + counts)
    if drafter is not None:
        state = _propose(decoder, drafter, state, sampling)
    output = CycleOutput(
        verification.token_ids, verification.num_tokens, verification.deferred, state.draft.num_draft_tokens
    )
    return state, output


def _propose(decoder: Decoder, drafter: Drafter, state: DecodeState, sampling: SamplingParams) -> DecodeState:
    context = DraftContext(
        decoder, state.cache, state.history, state.length, _step_keys(state.keys, state.step), sampling
    )
    draft, drafter_state, cache = drafter.propose(state.drafter_state, context)
    # A cycle emits one token more than it accepts: no request passes its limit.
    room = jnp.maximum(state.limit - state.length - 1, 0)
    draft = dataclasses.replace(draft, num_draft_tokens=jnp.minimum(draft.num_draft_tokens, room))
    return dataclasses.replace(state, draft=draft, drafter_state=drafter_state, cache=cache)


def _append(history: Array, length: Array, token_ids: Array) -> Array:
    """`history` `[B, L]` with the `token_ids` `[B, T]` that are not padding written from `length` `[B]` on."""
    rows = jnp.arange(history.shape[0], dtype=jnp.int32)[:, None]
    columns = length[:, None] + jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]
    columns = jnp.where(token_ids >= 0, columns, history.shape[1])
    return history.at[rows, columns].set(token_ids, mode="drop")


def _step_keys(keys: Array, step: Array) -> Array:
    return jax.vmap(jax.random.fold_in, (0, None))(keys, step)


def _up_to_end(token_ids: list[int], eos_token_ids: Collection[int]) -> list[int]:
    for i, token_id in enumerate(token_ids):
        if token_id in eos_token_ids:
            return token_ids[: i + 1]
    return token_ids
