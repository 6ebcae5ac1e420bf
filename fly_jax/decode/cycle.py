"""One cycle of the decoding loop: `fly_verify` on the pending drafts, then the next drafts. Pure functions of a state.

In the shape descriptions, `B` denotes requests, `K` draft tokens per request and `L` the capacity of histories and
caches.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fly_jax.config import FlyConfig, SamplingParams
from fly_jax.decode.drafters import Draft, DraftContext, Drafter
from fly_jax.decode.model import Decoder, KVCache
from fly_jax.traces.record import TraceRows, trace_rows
from fly_jax.verify import fly_verify


@jax.tree_util.register_dataclass
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
    """

    history: Array
    length: Array
    limit: Array
    cache: KVCache
    draft: Draft
    drafter_state: Any
    keys: Array
    step: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CycleOutput:
    """What the host reads of a cycle.

    Attributes:
      token_ids: `[B, K+1]` int32, -1 padded; nothing but padding for a request that is not active.
      num_tokens: `[B]` int32, how many were emitted.
      deferred: `[B, K]` bool, which of them FLy kept against the target's choice.
      num_draft_tokens: `[B]` int32, how many drafts are pending now.
      invalid: `[B]` bool, whether the last token came from a row that is not a distribution.
      trace: what a trace holds of the cycle; None unless it is recorded.
    """

    token_ids: Array
    num_tokens: Array
    deferred: Array
    num_draft_tokens: Array
    invalid: Array
    trace: TraceRows | None = None


def prefill(
    structure: Any, weights: list[Array], cache: KVCache, drafter_state: Any, token_ids: Array, num_tokens: Array
) -> tuple[KVCache, Any]:
    """Feeds the first `num_tokens` `[B]` of `token_ids` `[B, T]` to both caches."""
    decoder, drafter = jax.tree.unflatten(structure, weights)
    _, cache = decoder.hidden(token_ids, cache)
    if drafter is not None:
        drafter_state = drafter.prefill(drafter_state, token_ids, num_tokens)
    return cache.advance(num_tokens), drafter_state


def cycle(
    structure: Any,
    weights: list[Array],
    *,
    state: DecodeState,
    active: Array,
    sampling: SamplingParams,
    config: FlyConfig | None,
    speculate: bool,
    record: bool = False,
) -> tuple[DecodeState, CycleOutput]:
    """Verifies the pending drafts (none unless `speculate`), appends what is emitted, proposes the next drafts.

    A request that is not `active` `[B]` takes part in the arithmetic, emits nothing and does not move.
    """
    decoder, drafter = jax.tree.unflatten(structure, weights)
    drafts = state.draft.token_ids if speculate else state.draft.token_ids[:, :0]
    num_draft_tokens = jnp.where(active & speculate, state.draft.num_draft_tokens, 0)
    last = jnp.take_along_axis(state.history, state.length[:, None] - 1, 1)
    logits, cache = decoder(jnp.concatenate([last, drafts], 1), state.cache)
    arguments: dict[str, Any] = {
        "num_draft_tokens": num_draft_tokens,
        "draft_probs": state.draft.draft_probs if speculate else None,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
    }
    key = None if sampling.temperature is None else _step_keys(state.keys, state.step)
    verification = fly_verify(logits, drafts, config=config, key=key, **arguments)
    trace = trace_rows(logits, drafts, verification, **arguments) if record else None
    token_ids = jnp.where(active[:, None], verification.token_ids, -1)
    num_tokens = jnp.where(active, verification.num_tokens, 0)
    state = dataclasses.replace(
        state,
        history=_append(state.history, state.length, token_ids),
        length=state.length + num_tokens,
        cache=cache.advance(num_tokens),
        step=state.step + 1,
    )
    if drafter is not None:
        state = _propose(decoder, drafter, state, sampling)
    output = CycleOutput(
        token_ids, num_tokens, verification.deferred, state.draft.num_draft_tokens, verification.invalid, trace
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
