"""The target's log-probabilities of the tokens a verification emitted."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fly_jax.config import SamplingParams
from fly_jax.rule.edge import check_logits, check_sampling_params, check_vocab_size
from fly_jax.rule.scoring import score_rows
from fly_jax.verify import Verification


def emitted_logprobs(
    target_logits: Any,
    verification: Verification,
    *,
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    vocab_size: Any = None,
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
    shape = jnp.shape(target_logits)
    if len(shape) != 3 or shape[:2] != verification.token_ids.shape:
        raise ValueError(
            f"target_logits must be [B, K + 1, V] with [B, K + 1] = {list(verification.token_ids.shape)}, "
            f"got {list(shape)}"
        )
    num_requests, num_rows, num_columns = shape
    if num_requests == 0:
        return jnp.zeros((0, num_rows), jnp.float32)
    logits = check_logits("target_logits", target_logits, ("B", "K + 1", "V")).reshape(-1, num_columns)
    params = check_sampling_params(temperature, top_k, top_p, min_p, num_requests)
    if params.temperature is None:
        # Greedy requests are scored raw.
        params = check_sampling_params(0.0, None, None, None, num_requests)
    params = jax.tree.map(lambda values: jnp.repeat(values, num_rows, total_repeat_length=len(logits)), params)
    return _emitted_logprobs(logits, verification.token_ids, params, check_vocab_size(vocab_size, num_columns))


# Compiled as a whole, so that only what is used of the rows' statistics is computed.
@jax.jit
def _emitted_logprobs(logits: Array, token_ids: Array, params: SamplingParams, vocab_size: Array | None) -> Array:
    num_rows, num_columns = logits.shape
    # In XLA on every platform: unlike the kernels it can be differentiated, as a policy's log-probabilities are.
    target = score_rows(logits, params, vocab_size=vocab_size, implementation="xla")
    rows = jnp.arange(num_rows, dtype=jnp.int32).reshape(token_ids.shape)
    emitted = token_ids >= 0
    assert target.softmax is not None
    # A bonus token of the caller's may lie anywhere.
    known = emitted & (token_ids < (num_columns if vocab_size is None else vocab_size))
    token_logits = target.token_logits(rows, jnp.where(known, token_ids, 0))
    log_probability = target.softmax.log_probability(rows, token_logits)
    log_probability = jnp.where(known & ~target.excludes(rows, token_logits), log_probability, -jnp.inf)
    return jnp.where(emitted & target.valid[rows], log_probability, jnp.nan)
