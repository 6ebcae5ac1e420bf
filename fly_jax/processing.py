"""Temperature, min-p, top-k and top-p as two numbers a row: a divisor and a cut-off on the scaled logits.

A processed copy of the logits is never built: the processed value of a column is `logits / divisor` where that is at
or above the cut-off, and -inf elsewhere. All ties at a cut-off are kept.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fly_jax import kernels

GREEDY_TEMPERATURE = 1e-5
"""A request with a temperature below this is greedy, as in vLLM."""

TINY = np.float32(np.finfo(np.float32).tiny)
"""A probability below float32's smallest normal number is 0: some backends flush such numbers and some do not."""

_LOG_TINY = np.float32(np.log(TINY))
_MAX = np.float32(np.finfo(np.float32).max)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["temperature", "top_k", "top_p", "min_p"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the target's logits are processed.

    Attributes:
      temperature: `[B]` float32; below 1e-5 (or NaN) is greedy. None: every request is greedy, and the rest is unused.
      top_k: `[B]` int32; 0 or at least V turns it off.
      top_p: `[B]` float32; 1 or more turns it off, 0 or less keeps the maximum only.
      min_p: `[B]` float32; 0 or less turns it off, 1 or more keeps the maximum only.
    """

    temperature: Array | None = None
    top_k: Array | None = None
    top_p: Array | None = None
    min_p: Array | None = None


def is_greedy(temperature: Array) -> Array:
    """Whether a temperature (float32, any shape) means greedy decoding."""
    return ~(temperature >= GREEDY_TEMPERATURE)


def divisor(temperature: Array) -> Array:
    """What the logits are divided by: 1 for greedy requests, and always finite."""
    return jnp.where(is_greedy(temperature), 1.0, jnp.minimum(temperature, _MAX))


def probability(log_probability: Array) -> Array:
    """`exp`, with what is below float32's smallest normal number as 0, on every backend; NaN stays NaN."""
    return jnp.where(log_probability < _LOG_TINY, 0.0, jnp.exp(log_probability))


def cutoffs(
    logits: Array, row_max: Array, row_divisor: Array, params: SamplingParams, *, vocab_size: Array | None = None
) -> Array | None:
    """The smallest scaled logit that min-p, top-k and top-p keep, applied in this order.

    Args:
      logits: `[N, V]` float32, bfloat16 or float16.
      row_max: `[N]` float32, the scaled maximum of each row (any finite number where there is none).
      row_divisor: `[N]` float32.
      params: per row, `[N]`; a greedy row is not masked.
      vocab_size: int32 scalar; columns at or beyond it are not there.

    Returns:
      `[N]` float32, at most `row_max`; -inf where nothing is masked. None where nothing masks any row.
    """
    if params.top_k is None and params.top_p is None and params.min_p is None:
        return None
    assert params.temperature is not None
    active = ~is_greedy(params.temperature)
    cutoff = jnp.full_like(row_max, -jnp.inf)
    if params.min_p is not None:
        on = active & (params.min_p > 0)
        cutoff = jnp.where(on, row_max + jnp.log(jnp.clip(params.min_p, TINY, 1.0)), cutoff)
    if params.top_k is not None:
        on = active & (params.top_k > 0) & (params.top_k < logits.shape[1])
        kth = _top_k_cutoff(logits, row_max, row_divisor, jnp.where(on, params.top_k, 1), vocab_size)
        cutoff = jnp.where(on, jnp.maximum(cutoff, kth), cutoff)
    if params.top_p is not None:
        on = active & (params.top_p < 1)
        nucleus = _top_p_cutoff(logits, row_max, row_divisor, cutoff, params.top_p, vocab_size)
        cutoff = jnp.where(on, jnp.maximum(cutoff, nucleus), cutoff)
    return jnp.minimum(cutoff, row_max)


def _top_k_cutoff(logits: Array, row_max: Array, row_divisor: Array, top_k: Array, vocab_size: Array | None) -> Array:
    scaled = kernels.scale(kernels.mask_columns(logits, vocab_size), row_divisor)

    def enough(cutoff: Array) -> Array:
        # Sums over blocks: float32 counts are exact below 2**24.
        kept = kernels.block_sums((scaled >= cutoff[:, None]).astype(jnp.float32))
        return jnp.sum(kept, axis=1) >= top_k.astype(jnp.float32)

    lowest = jnp.full_like(row_max, -_MAX)
    return _largest_passing(enough, lowest, row_max)


def _top_p_cutoff(
    logits: Array, row_max: Array, row_divisor: Array, cutoff: Array, top_p: Array, vocab_size: Array | None
) -> Array:
    def mass(cutoff: Array) -> Array:
        return kernels.row_mass(logits, row_max, divisor=row_divisor, cutoff=cutoff, vocab_size=vocab_size)

    wanted = top_p * mass(cutoff)
    # Below this the probability relative to the maximum's is 0 in float32.
    lowest = jnp.maximum(cutoff, jnp.maximum(row_max + _LOG_TINY, -_MAX))
    nucleus = _largest_passing(lambda cutoff: mass(cutoff) >= wanted, lowest, row_max)
    # Where even everything falls short of the mass by rounding, nothing is cut.
    return jnp.where(mass(nucleus) >= wanted, nucleus, cutoff)


def _largest_passing(passes: Callable[[Array], Array], lowest: Array, highest: Array) -> Array:
    """The largest float32 in `[lowest, highest]` that passes; `passes` is True below some number and False above.

    A binary search over the floats in their order: exact after at most 32 steps, whatever the values are.
    """

    def unfinished(bounds: tuple[Array, Array]) -> Array:
        low, high = bounds
        return jnp.any(low < high)

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = high - (high - low) // jnp.uint32(2)
        passed = passes(_from_order(middle))
        return jnp.where(passed, middle, low), jnp.where(passed, high, jnp.maximum(middle - jnp.uint32(1), low))

    low, high = _to_order(jnp.minimum(lowest, highest)), _to_order(highest)
    return _from_order(lax.while_loop(unfinished, halve, (low, high))[0])


def _to_order(values: Array) -> Array:
    """Uint32 in the order of the floats."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    negative = bits >> jnp.uint32(31) == jnp.uint32(1)
    return jnp.where(negative, ~bits, bits | jnp.uint32(0x80000000))


def _from_order(order: Array) -> Array:
    negative = order >> jnp.uint32(31) == jnp.uint32(0)
    return lax.bitcast_convert_type(jnp.where(negative, ~order, order & jnp.uint32(0x7FFFFFFF)), jnp.float32)
