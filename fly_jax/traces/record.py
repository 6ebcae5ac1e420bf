"""What is recorded of a verification, computed on the device beside it: enough to replay any setting of FLy later.

About 55 bytes a draft token instead of its logits. `fly_jax.traces.file` collects, writes and reads them, and says what
each field is; `fly_jax.traces.replay` replays them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fly_jax.noise import VerifyNoise
from fly_jax.rule import edge
from fly_jax.rule.acceptance import accept
from fly_jax.rule.edge import Inputs
from fly_jax.rule.scoring import Softmax, score_draft, score_target
from fly_jax.verify import Verification

TOP_K = 8
"""How many log-probabilities of a row are recorded: the most that the GPU kernel gives in its one read."""

NATIVELY_ACCEPTED, DEFERRABLE, DEFERRED = 1, 2, 4
"""The bits of `flags`."""

ROW_FIELDS = {
    "draft_token_id": np.int32,
    "argmax_token_id": np.int32,
    "draft_logprob": np.float32,
    "top_logprobs": np.float32,
    "draft_prob": np.float32,
    "entropy": np.float32,
    "flags": np.uint8,
}
"""What is recorded of a draft token, and as what."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[*ROW_FIELDS, "num_draft_tokens", "num_accepted"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class TraceRows:
    """What is recorded of one verification; the fields are those of the file, padded: past a draft they mean nothing.

    Attributes:
      draft_token_id: `[B, K]` int32.
      argmax_token_id: `[B, K]` int32.
      draft_logprob: `[B, K]` float32.
      top_logprobs: `[B, K, 8]` float32.
      draft_prob: `[B, K]` float32.
      entropy: `[B, K]` float32.
      flags: `[B, K]` uint8.
      num_draft_tokens: `[B]` int32.
      num_accepted: `[B]` int32.
    """

    draft_token_id: Array
    argmax_token_id: Array
    draft_logprob: Array
    top_logprobs: Array
    draft_prob: Array
    entropy: Array
    flags: Array
    num_draft_tokens: Array
    num_accepted: Array


def trace_rows(
    target_logits: Any, draft_token_ids: Any, verification: Verification, *, draft_probs: Any = None, **arguments: Any
) -> TraceRows:
    """What is to be recorded of `verification`, made by `fly_verify` from the same arguments.

    Pure, and meant to be jitted together with `fly_verify`. It reads the logits once more, masks included. K may be 0.

    Args:
      target_logits: `[B, K + 1, V]` as given to `fly_verify`.
      draft_token_ids: `[B, K]` int32.
      verification: its result.
      draft_probs: `[B, K, Vd]` float32; None for one-hot drafts.
      **arguments: `num_draft_tokens`, `temperature`, `top_k`, `top_p`, `min_p` and `vocab_size` as in `fly_verify`.

    Returns:
      The rows, of `B` requests and `K` positions.

    Raises:
      TypeError, ValueError: as `fly_verify`; or `verification` is of other shapes.
    """
    ids, shape = np.shape(draft_token_ids), np.shape(target_logits)
    if len(ids) != 2 or len(shape) != 3 or shape[:2] != (ids[0], ids[1] + 1):
        raise ValueError(
            f"target_logits must be [B, K + 1, V] and draft_token_ids [B, K], got {list(shape)} and {list(ids)}"
        )

    def rows(length: int) -> Array:
        return jnp.arange(ids[0] * length, dtype=jnp.int32).reshape(ids[0], length)

    if draft_probs is not None:
        if np.shape(draft_probs)[:-1] != ids:
            raise ValueError(
                f"draft_probs must be [B, K, Vd] with B = {ids[0]}, K = {ids[1]}, got {list(np.shape(draft_probs))}"
            )
        draft_probs = jnp.reshape(draft_probs, (ids[0] * ids[1], np.shape(draft_probs)[-1]))
    return trace_flattened_rows(
        jnp.reshape(target_logits, (-1, shape[2])),
        rows(ids[1] + 1),
        draft_token_ids,
        verification,
        draft_row_index=rows(ids[1]),
        draft_probs=draft_probs,
        **arguments,
    )


def trace_flattened_rows(
    target_logits: Any,
    row_index: Any,
    draft_token_ids: Any,
    verification: Verification,
    *,
    draft_row_index: Any = None,
    num_draft_tokens: Any = None,
    draft_probs: Any = None,
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    vocab_size: Any = None,
) -> TraceRows:
    """`trace_rows` on flattened rows, beside `fly_verify_rows`.

    Args:
      target_logits: `[N, V]`.
      row_index: `[B, K + 1]` int32; the bonus rows may hold anything.
      draft_token_ids: `[B, K]` int32.
      verification: the result of `fly_verify_rows`.
      draft_row_index: `[B, K]` int32; None is `row_index[:, :K]`.
      num_draft_tokens: `[B]` int32; None is K.
      draft_probs: `[M, Vd]` float32; None for one-hot drafts.
      temperature: `[B]` float32 or a scalar; None: every request is greedy.
      top_k: `[B]` int32 or a scalar.
      top_p: `[B]` float32 or a scalar.
      min_p: `[B]` float32 or a scalar.
      vocab_size: int or traced scalar.

    Returns:
      The rows, of `B` requests and `K` positions.

    Raises:
      TypeError, ValueError: as `fly_verify_rows`; or `verification` is of other shapes.
    """
    shape = np.shape(draft_token_ids)
    if verification.natively_accepted.shape != shape:
        raise ValueError(
            f"verification must be of [B, K] = {list(shape)}, got {list(verification.natively_accepted.shape)}"
        )
    noise = None
    if temperature is not None:
        # Nothing that is recorded depends on it: native acceptance is the verification's.
        noise = VerifyNoise(jnp.zeros(shape, jnp.float32), jnp.zeros((shape[0], 2), jnp.float32))
    inputs = edge.from_arguments(
        target_logits,
        row_index,
        draft_token_ids,
        draft_row_index=draft_row_index,
        bonus_token_ids=jnp.zeros(shape[:1], jnp.int32),
        num_draft_tokens=num_draft_tokens,
        draft_probs=draft_probs,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        noise=noise,
        vocab_size=vocab_size,
    )
    return _trace(inputs, verification)


@jax.jit
def _trace(inputs: Inputs, verification: Verification) -> TraceRows:
    inputs = jax.tree.map(jax.lax.stop_gradient, inputs)
    rows = inputs.row_index[:, :-1]
    if rows.size == 0:
        return _nothing(inputs, verification)
    target, draft = score_target(inputs, TOP_K), score_draft(inputs)
    uniform = None if inputs.noise is None else jnp.zeros(rows.shape, jnp.float32)
    deferrable = accept(inputs, target, draft, uniform).deferrable
    statistics = target.statistics
    softmax = target.softmax
    if softmax is None:
        softmax = Softmax(statistics.shift, jnp.ones_like(statistics.max), statistics.log_mass)
    valid = target.valid[rows]
    is_distribution = valid & jnp.isfinite(statistics.max[rows])
    top_values = statistics.top_values[rows]
    missing = TOP_K - top_values.shape[2]
    top_values = jnp.pad(top_values, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)
    logits = target.token_logits(rows, inputs.draft_token_ids)
    logprob = jnp.where(target.excludes(rows, logits), -jnp.inf, softmax.log_probability(rows, logits))
    q = jnp.full(rows.shape, jnp.nan, jnp.float32)
    if draft is not None:
        known = inputs.draft_in_vocab & ~(draft.one_hot | inputs.greedy)[:, None]
        q = jnp.where(known, draft.token_probability(inputs.draft_token_ids), jnp.nan)
    bits = (
        (verification.natively_accepted, NATIVELY_ACCEPTED),
        (deferrable, DEFERRABLE),
        (verification.deferred, DEFERRED),
    )
    return TraceRows(
        draft_token_id=jnp.where(inputs.draft_in_vocab, inputs.draft_token_ids, -1),
        argmax_token_id=jnp.where(valid, statistics.argmax[rows], -1),
        draft_logprob=jnp.where(is_distribution & inputs.draft_in_vocab, logprob, jnp.nan),
        top_logprobs=jnp.where(is_distribution[..., None], softmax.log_probability(rows, top_values), jnp.nan),
        draft_prob=q,
        entropy=verification.entropy,
        flags=sum((mask.astype(jnp.uint8) * jnp.uint8(bit) for mask, bit in bits), jnp.uint8(0)),
        num_draft_tokens=inputs.num_draft_tokens,
        num_accepted=verification.num_accepted,
    )


def _nothing(inputs: Inputs, verification: Verification) -> TraceRows:
    shape = inputs.draft_token_ids.shape
    empty = {
        name: jnp.zeros((*shape, TOP_K) if name == "top_logprobs" else shape, dtype)
        for name, dtype in ROW_FIELDS.items()
    }
    return TraceRows(**empty, num_draft_tokens=inputs.num_draft_tokens, num_accepted=verification.num_accepted)
