"""Temperature, min-p, top-k and top-p as two numbers a row: a scale, and a threshold on the logits.

A processed copy of the logits is never built: the processed value of a column is `logit / temperature` where the logit
is at or above the threshold, and -inf elsewhere. All ties at a cut-off are kept, also those that the division makes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fly_jax import kernels
from fly_jax.kernels.blocks import to_key
from fly_jax.kernels.search import largest_passing

GREEDY_TEMPERATURE = 1e-5
"""A request with a temperature below this is greedy, as in vLLM."""

_MAX = np.float32(np.finfo(np.float32).max)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowParams:
    """How logits are processed, per row or per request: `fly_jax.config.SamplingParams` as arrays of one length `R`.

    Attributes:
      temperature: `[R]` float32.
      top_k: `[R]` int32; None where no row has it, and so the next two.
      top_p: `[R]` float32.
      min_p: `[R]` float32.
    """

    temperature: Array
    top_k: Array | None = None
    top_p: Array | None = None
    min_p: Array | None = None


def is_greedy(temperature: Array) -> Array:
    """Whether a temperature (float32, any shape) means greedy decoding."""
    return ~(temperature >= GREEDY_TEMPERATURE)


def divisor(temperature: Array) -> Array:
    """What the logits are divided by: 1 for greedy requests, and always finite."""
    return jnp.where(is_greedy(temperature), 1.0, jnp.minimum(temperature, _MAX))


def scale(divisor: Array) -> Array:
    """One over the divisor, and never 0, so that -inf stays what it is."""
    return jnp.maximum(1.0 / divisor, kernels.TINY)


def divide(values: Array, divisor: Array) -> Array:
    """The correctly rounded quotient of float32 arrays of one shape, on every backend.

    XLA turns a division by a broadcast into a product with the reciprocal, which rounds differently; it cannot see that
    this is one.
    """
    return values / jnp.where(jnp.isnan(values), 1.0, divisor)


def thresholds(
    logits: Array, row_max: Array, row_divisor: Array, params: RowParams, *, vocab_size: Array | None = None
) -> Array | None:
    """The smallest logit of each row that min-p, top-k and top-p keep, applied in this order.

    Args:
      logits: `[N, V]` float32, bfloat16 or float16.
      row_max: `[N]` float32, the maximum of each row (any finite number where there is none).
      row_divisor: `[N]` float32, the temperature to divide by.
      params: per row, `[N]`; a greedy row is not masked.
      vocab_size: int32 scalar; columns at or beyond it are not there.

    Returns:
      `[N]` float32 on the logits as they are, at most `row_max`; -inf where nothing is masked. None where no row is.
    """
    if params.top_k is None and params.top_p is None and params.min_p is None:
        return None
    active = ~is_greedy(params.temperature)
    threshold = jnp.full_like(row_max, -jnp.inf)
    if vocab_size is not None:
        vocab_size = jnp.broadcast_to(vocab_size, row_max.shape)
    if params.min_p is not None:
        cutoff = divide(row_max, row_divisor) + jnp.log(jnp.clip(params.min_p, kernels.TINY, 1.0))
        least = _least_logit(cutoff, row_max, row_divisor)
        threshold = jnp.where(active & (params.min_p > 0), least, threshold)
    if params.top_k is not None:
        on = active & (params.top_k > 0) & (params.top_k < logits.shape[1])
        kth = kernels.kth_largest(logits, row_max, jnp.where(on, params.top_k, 1), on, vocab_size)
        least = _least_logit(divide(kth, row_divisor), row_max, row_divisor)
        threshold = jnp.where(on, jnp.maximum(threshold, least), threshold)
    if params.top_p is not None:
        last = kernels.smallest_in_nucleus(
            logits, row_max, scale(row_divisor), params.top_p, active, threshold=threshold, vocab_size=vocab_size
        )
        least = _least_logit(divide(last, row_divisor), row_max, row_divisor)
        threshold = jnp.where(active & (params.top_p < 1), jnp.maximum(threshold, least), threshold)
    return threshold


def _least_logit(cutoff: Array, row_max: Array, row_divisor: Array) -> Array:
    """The smallest logit whose quotient reaches the cut-off; `row_max` is known to."""
    low, high = to_key(-row_max), to_key(jnp.full_like(cutoff, _MAX))
    return -largest_passing(lambda negated: divide(-negated, row_divisor) >= cutoff, low, high)
