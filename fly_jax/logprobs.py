"""The target's log-probabilities of the tokens a verification emitted."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fly_jax.rule import edge
from fly_jax.rule.scoring import score_rows
from fly_jax.rule.thresholds import RowParams
from fly_jax.verify import Verification


def emitted_logprobs(
    target_logits: ArrayLike,
    verification: Verification,
    *,
    temperature: ArrayLike | None = None,
    top_k: ArrayLike | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    vocab_size: ArrayLike | None = None,
) -> Array:
    """The target's log-probability of each emitted token, in nats.

    Without sampling parameters it is that of the raw logits (what engines return as `logprobs`); with them, of the
    processed distribution. A token that is excluded, or outside the vocabulary, has -inf. Differentiable with respect
    to the logits.

    Args:
      target_logits: `[B, K + 1, V]` as given to `fly_verify`.
      verification: its result.
      temperature: `[B]` float32 or a scalar; greedy requests are scored unscaled and unmasked.
      top_k: `[B]` int32 or a scalar.
      top_p: `[B]` float32 or a scalar.
      min_p: `[B]` float32 or a scalar.
      vocab_size: int or traced scalar.

    Returns:
      `[B, K + 1]` float32; NaN past `num_tokens`, and for a row that is not a distribution.

    Raises:
      TypeError, ValueError: as `fly_verify`.
    """
    positions = edge.check_positions(target_logits, verification.token_ids.shape)
    num_requests, num_rows, num_columns = positions.shape
    if num_requests == 0:
        return jnp.zeros((0, num_rows), jnp.float32)
    logits = positions.reshape(-1, num_columns)
    # Greedy requests are scored raw.
    params = edge.check_sampling_params(temperature, top_k, top_p, min_p, num_requests) or RowParams(
        jnp.zeros((num_requests,), jnp.float32)
    )
    params = jax.tree.map(lambda values: jnp.repeat(values, num_rows, total_repeat_length=len(logits)), params)
    limit = edge.check_vocab_size(vocab_size, num_columns, num_columns)
    return _emitted_logprobs(logits, verification.token_ids, params, limit)


# Compiled as a whole, so that only what is used of the rows' statistics is computed.
@jax.jit
def _emitted_logprobs(logits: Array, token_ids: Array, params: RowParams, vocab_size: Array | None) -> Array:
    num_rows, num_columns = logits.shape
    # In XLA on every platform: unlike the kernels it can be differentiated, as a policy's log-probabilities are.
    target = score_rows(logits, params, vocab_size=vocab_size, implementation="xla")
    rows = jnp.arange(num_rows, dtype=jnp.int32).reshape(token_ids.shape)
    emitted = token_ids >= 0
    # A bonus token of the caller's may lie anywhere.
    known = emitted & (token_ids < (num_columns if vocab_size is None else vocab_size))
    log_probability = target.token_log_probability(rows, jnp.where(known, token_ids, 0))
    return jnp.where(emitted & target.valid[rows], jnp.where(known, log_probability, -jnp.inf), jnp.nan)
