"""Row statistics in plain XLA.

The vocabulary axis is reduced to the maxima of blocks of 128 columns first; everything else is looked up inside the
few blocks that matter. On CPU this reads the logits once at memory speed, where `jnp.argmax` and `lax.top_k` over
the vocabulary cost 60 to 300 times as much.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

BLOCK = 128
"""Columns per block, here and in the two-step inverse CDF."""

_NEG_INF = np.float32(-np.inf)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["argmax", "max", "block_max", "has_nan"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class RowStatistics:
    """What one read of `N` rows of logits gives.

    Attributes:
      argmax: `[N]` int32, lowest index on ties; unspecified for a row with a NaN.
      max: `[N]` float32, unscaled; unspecified for a row with a NaN.
      block_max: `[N, ceil(V / 128)]` float32.
      has_nan: `[N]` bool.
    """

    argmax: Array
    max: Array
    block_max: Array
    has_nan: Array


def row_statistics(logits: Array, *, vocab_size: Array | None = None) -> RowStatistics:
    """Argmax, maximum and block maxima of each row, and whether it holds a NaN.

    Args:
      logits: `[N, V]` float32, bfloat16 or float16.
      vocab_size: int32 scalar; columns at or beyond it count as -inf.

    Returns:
      The statistics of the unscaled logits.
    """
    block_max = _block_max(logits, vocab_size)
    argmax, row_max = _argmax_from_blocks(logits, block_max, vocab_size)
    return RowStatistics(argmax, row_max, block_max, _has_nan(logits, block_max, vocab_size))


def row_mass(
    logits: Array,
    row_max: Array,
    *,
    scale: Array | None = None,
    threshold: Array | None = None,
    vocab_size: Array | None = None,
) -> Array:
    """The mass of each row relative to its maximum: the sum of `exp((logits - row_max) * scale)` over kept columns.

    A log-probability is then `(logit - row_max) * scale - log(mass)`, which stays precise for large logits and low
    temperatures.

    Args:
      logits: `[N, V]` float32, bfloat16 or float16.
      row_max: `[N]` float32, the maximum of each row (any finite number where there is none).
      scale: `[N]` float32, one over the temperature; None is 1.
      threshold: `[N]` float32; logits below it are left out.
      vocab_size: int32 scalar; columns at or beyond it are left out.

    Returns:
      `[N]` float32; NaN for a row with a NaN.
    """
    # Keeps XLA from sharing one float32 copy of 16-bit logits with the pass that looks for NaN: the two barriers must
    # differ, or they are merged.
    logits, row_max = lax.optimization_barrier((logits, row_max))
    values = mask_columns(logits, vocab_size)
    exponent = values - row_max[:, None]
    mass = jnp.exp(exponent if scale is None else exponent * scale[:, None])
    if threshold is not None:
        mass = jnp.where(values < threshold[:, None], 0.0, mass)
    return lax.optimization_barrier(jnp.sum(block_sums(mass), axis=1))


def top_values(logits: Array, block_max: Array, k: int, *, vocab_size: Array | None = None) -> Array:
    """The `k` largest values of each row, in descending order.

    The k largest values lie in the k blocks with the largest maxima, so only those are searched.

    Args:
      logits: `[R, V]` float32 without NaN.
      block_max: `[R, ceil(V / 128)]` float32, their block maxima.
      k: how many; at most V are returned.
      vocab_size: int32 scalar; columns at or beyond it count as -inf.

    Returns:
      `[R, min(k, V)]` float32.
    """
    num_rows, num_columns = logits.shape
    # One barrier on each output of top_k: without it XLA CPU replaces the TopK call by a full stable sort.
    blocks = lax.optimization_barrier(lax.top_k(block_max, min(k, block_max.shape[1]))[1])
    columns = (blocks[:, :, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)[None, None]).reshape(num_rows, -1)
    limit = jnp.int32(num_columns) if vocab_size is None else vocab_size
    values = jnp.take_along_axis(logits, jnp.minimum(columns, num_columns - 1), axis=1)
    values = jnp.where(columns < limit, values, _NEG_INF)
    return lax.optimization_barrier(lax.top_k(values, min(k, num_columns))[0])


def gather_rows(values: Array, rows: Array) -> Array:
    """`[R, V]` float32 rows of `values` `[N, V]`; `rows` `[R]` int32 are in range."""
    # Gathering the bits keeps XLA CPU from converting all of a 16-bit array to float32 first.
    return lax.optimization_barrier(_as_float32(lax.optimization_barrier(_bits(values)[rows]), values.dtype))


def gather_elements(values: Array, rows: Array, columns: Array) -> Array:
    """Float32 elements `values[rows, columns]`, in the shape of the int32 indices, which are in range."""
    return _as_float32(_bits(values)[rows, columns], values.dtype)


def mask_columns(logits: Array, vocab_size: Array | None) -> Array:
    """`logits` `[N, V]` as float32, columns at or beyond `vocab_size` as -inf."""
    return _mask(logits, vocab_size).astype(jnp.float32)


def block_sums(values: Array) -> Array:
    """`[N, ceil(V / 128)]` sums over blocks of 128 columns of `values` `[N, V]` float32."""
    return _block_reduce(values, np.zeros((), np.float32), lax.add)


def first_true(mask: Array) -> Array:
    """`[N]` int32 index of the first True of each row of `mask` `[N, C]`; C where there is none."""
    return jnp.min(jnp.where(mask, _columns(mask), mask.shape[1]), axis=1, initial=mask.shape[1])


def _block_max(logits: Array, vocab_size: Array | None) -> Array:
    maxima = _block_reduce(_mask(logits, vocab_size), np.array(-np.inf, logits.dtype), lax.max)
    return lax.optimization_barrier(maxima.astype(jnp.float32))


def _block_reduce(values: Array, initial: np.ndarray, operation: Callable[[Array, Array], Array]) -> Array:
    num_rows, num_columns = values.shape
    if num_columns % BLOCK == 0:
        blocks = values.reshape(num_rows, num_columns // BLOCK, BLOCK)
        return lax.reduce(blocks, initial, operation, (2,))
    # A window takes any number of columns; padding or slicing first would copy the whole array.
    padding = ((0, 0), (0, -num_columns % BLOCK))
    return lax.reduce_window(values, initial, operation, (1, BLOCK), (1, BLOCK), padding)


def _argmax_from_blocks(logits: Array, block_max: Array, vocab_size: Array | None) -> tuple[Array, Array]:
    num_rows, num_columns = logits.shape
    row_max = jnp.max(block_max, axis=1)
    block = jnp.minimum(first_true(block_max == row_max[:, None]), block_max.shape[1] - 1)
    columns = block[:, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)[None]
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    values = gather_elements(logits, rows, jnp.minimum(columns, num_columns - 1))
    limit = jnp.int32(num_columns) if vocab_size is None else vocab_size
    offset = first_true((values == row_max[:, None]) & (columns < limit))
    return jnp.minimum(block * BLOCK + offset, num_columns - 1), row_max


def _has_nan(logits: Array, block_max: Array, vocab_size: Array | None) -> Array:
    # XLA CPU's maximum and minimum lose NaN on long rows; a sum never does.
    if logits.dtype == jnp.float16:
        # Of float16 it would be taken of a float32 copy: rows one by one are cheaper.
        return lax.map(lambda row: jnp.any(jnp.isnan(_mask(row[None], vocab_size))), logits)
    # The barrier keeps XLA from sharing one float32 copy of 16-bit logits between this and the maxima.
    masked = _mask(lax.optimization_barrier(logits), vocab_size)
    total = lax.optimization_barrier(jnp.sum(masked, axis=1, dtype=jnp.float32))
    suspect = jnp.isnan(total) | jnp.isnan(jnp.max(block_max, axis=1))

    def look(suspect: Array) -> Array:
        # The plain sum is NaN for +inf beside -inf as well; this one is not.
        total = jnp.sum(-jnp.abs(mask_columns(logits, vocab_size)), axis=1)
        return suspect & jnp.isnan(total)

    return lax.cond(jnp.any(suspect), look, lambda suspect: suspect, suspect)


def _mask(logits: Array, vocab_size: Array | None) -> Array:
    if vocab_size is None:
        return logits
    return jnp.where(_columns(logits) < vocab_size, logits, jnp.array(-jnp.inf, logits.dtype))


def _columns(values: Array) -> Array:
    return lax.broadcasted_iota(jnp.int32, values.shape, 1)


def _bits(values: Array) -> Array:
    return lax.bitcast_convert_type(values, jnp.uint16 if values.dtype.itemsize == 2 else jnp.uint32)


def _as_float32(bits: Array, dtype: jnp.dtype) -> Array:
    return lax.bitcast_convert_type(bits, dtype).astype(jnp.float32)
