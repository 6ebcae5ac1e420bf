"""What is recorded of a verification, computed on the device beside it: enough to replay any setting of FLy later.

53 bytes per draft token instead of its logits. `fly_jax.traces.file` collects, writes and reads them, and says what
each field is; `fly_jax.traces.replay` replays them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from fly_jax.rule import edge
from fly_jax.rule.acceptance import deferrable
from fly_jax.rule.edge import Inputs
from fly_jax.rule.scoring import score_draft, score_target
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


@jax.tree_util.register_dataclass
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
    target_logits: ArrayLike,
    draft_token_ids: ArrayLike,
    verification: Verification,
    *,
    num_draft_tokens: ArrayLike | None = None,
    draft_probs: ArrayLike | None = None,
    temperature: ArrayLike | None = None,
    top_k: ArrayLike | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    vocab_size: ArrayLike | None = None,
) -> TraceRows:
    """What is to be recorded of `verification`, made by `fly_verify` from the same arguments.

    Pure, and meant to be jitted together with `fly_verify`. It reads the logits once more, masks included. K may be 0.

    Args:
      target_logits: `[B, K + 1, V]` as given to `fly_verify`.
      draft_token_ids: `[B, K]` int32.
      verification: its result.
      num_draft_tokens: `[B]` int32; None is K.
      draft_probs: `[B, K, Vd]` float32, bfloat16 or float16; None for one-hot drafts.
      temperature: `[B]` float32 or a scalar; None: every request is greedy.
      top_k: `[B]` int32 or a scalar.
      top_p: `[B]` float32 or a scalar.
      min_p: `[B]` float32 or a scalar.
      vocab_size: int or traced scalar.

    Returns:
      The rows, of `B` requests and `K` positions.

    Raises:
      TypeError, ValueError: as `fly_verify`; or `verification` is of other shapes.
    """
    rows = edge.flatten(target_logits, draft_token_ids, draft_probs=draft_probs)
    return trace_flattened_rows(
        rows.target_logits,
        rows.row_index,
        draft_token_ids,
        verification,
        draft_row_index=rows.draft_row_index,
        num_draft_tokens=num_draft_tokens,
        draft_probs=rows.draft_probs,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        vocab_size=vocab_size,
    )


def trace_flattened_rows(
    target_logits: ArrayLike,
    row_index: ArrayLike,
    draft_token_ids: ArrayLike,
    verification: Verification,
    *,
    draft_row_index: ArrayLike | None = None,
    num_draft_tokens: ArrayLike | None = None,
    draft_probs: ArrayLike | None = None,
    temperature: ArrayLike | None = None,
    top_k: ArrayLike | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    vocab_size: ArrayLike | None = None,
) -> TraceRows:
    """`trace_rows` on flattened rows, beside `fly_verify_rows`.

    Args:
      target_logits: `[N, V]`.
      row_index: `[B, K + 1]` int32; the bonus rows may hold anything.
      draft_token_ids: `[B, K]` int32.
      verification: the result of `fly_verify_rows`.
      draft_row_index: `[B, K]` int32; None is `row_index[:, :K]`.
      num_draft_tokens: `[B]` int32; None is K.
      draft_probs: `[M, Vd]` float32, bfloat16 or float16; None for one-hot drafts.
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
    inputs = edge.inputs_of(
        target_logits,
        row_index,
        draft_token_ids,
        draft_row_index=draft_row_index,
        # Any will do: bonus rows are then left alone.
        bonus_token_ids=jnp.zeros(shape[:1], jnp.int32),
        num_draft_tokens=num_draft_tokens,
        draft_probs=draft_probs,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        vocab_size=vocab_size,
    )
    return _trace(inputs, verification)


@jax.jit
def _trace(inputs: Inputs, verification: Verification) -> TraceRows:
    inputs = jax.tree.map(jax.lax.stop_gradient, inputs)
    rows, ids = inputs.draft_rows, inputs.draft_token_ids
    if rows.size == 0:
        return _nothing(inputs, verification)
    target, draft = score_target(inputs, TOP_K), score_draft(inputs)
    statistics = target.statistics
    valid = target.valid[rows]
    is_distribution = valid & jnp.isfinite(statistics.max[rows])
    top_values = statistics.top_values[rows]
    missing = TOP_K - top_values.shape[2]
    top_values = jnp.pad(top_values, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)
    q = jnp.full(rows.shape, jnp.nan, jnp.float32)
    if draft is not None and inputs.sampling is not None:
        known = inputs.draft_in_vocab & ~(draft.one_hot | inputs.sampling.greedy)[:, None]
        q = jnp.where(known, draft.token_probability(ids), jnp.nan)
    bits = (
        (verification.natively_accepted, NATIVELY_ACCEPTED),
        (deferrable(inputs, target, draft), DEFERRABLE),
        (verification.deferred, DEFERRED),
    )
    return TraceRows(
        draft_token_id=jnp.where(inputs.draft_in_vocab, ids, -1),
        argmax_token_id=jnp.where(valid, statistics.argmax[rows], -1),
        draft_logprob=jnp.where(
            is_distribution & inputs.draft_in_vocab, target.token_log_probability(rows, ids), jnp.nan
        ),
        top_logprobs=jnp.where(is_distribution[..., None], target.softmax.log_probability(rows, top_values), jnp.nan),
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
