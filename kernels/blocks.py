"""Blocks of 128 columns, and what is looked up in them.

XLA CPU does three things to a plain maximum over the vocabulary: it loses NaN, it takes a reduction of floats out of
its vectorised loops, and it converts all of a 16-bit array to float32 when any part of it is. Unsigned integers in the
order of the floats suffer from none of them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

BLOCK = 128
"""Columns per block, here and in the two-step inverse CDF."""

# A reduction of 128 columns does not vectorise; an elementwise tree of four slices of 32 does, and leaves 32.
_LANES = 32


def block_keys(logits: Array, vocab_size: Array | None = None, keep: Callable[[Array], Array] | None = None) -> Array:
    """The maxima of each block, as keys (see `to_key`).

    Args:
      logits: `[N, V]` float32, bfloat16 or float16.
      vocab_size: `[N]` int32; columns at or beyond it count as -inf.
      keep: given keys `[N, ...]`, which of them count; the others do as -inf.

    Returns:
      `[N, ceil(V / 128)]` uint32 or uint16.
    """
    num_rows, num_columns = logits.shape
    whole = num_columns // BLOCK * BLOCK
    # The bits of the whole array first: a slice of bfloat16 takes 2.5 times as long as one of its bits.
    bits = _bits(logits)

    def keys_of(bits: Array, columns: Array) -> Array:
        keys = _ordered(bits, logits.dtype)
        kept = None if keep is None else keep(keys)
        if vocab_size is not None:
            inside = columns < rowwise(vocab_size, keys.ndim)
            kept = inside if kept is None else kept & inside
        return keys if kept is None else jnp.where(kept, keys, _zero(keys))

    maxima = []
    if whole:
        blocks = bits[:, :whole].reshape(num_rows, whole // BLOCK, BLOCK)
        shape = (num_rows, whole // BLOCK, _LANES)
        first = BLOCK * lax.broadcasted_iota(jnp.int32, shape, 1) + lax.broadcasted_iota(jnp.int32, shape, 2)
        lanes = [keys_of(blocks[:, :, i : i + _LANES], first + i) for i in range(0, BLOCK, _LANES)]
        largest = tree(jnp.maximum, lanes)
        maxima.append(lax.optimization_barrier(lax.reduce(largest, _zero(largest), lax.max, (2,))))
    if whole < num_columns:
        rest = keys_of(bits[:, whole:], whole + lax.broadcasted_iota(jnp.int32, (1, num_columns - whole), 1))
        maxima.append(lax.optimization_barrier(lax.reduce(rest, _zero(rest), lax.max, (1,))[:, None]))
    return maxima[0] if len(maxima) == 1 else jnp.concatenate(maxima, axis=1)


def to_key(values: Array) -> Array:
    """Unsigned integers of the values' width in the order of the floats: -inf is 0, any NaN is above +inf."""
    return _ordered(_bits(values), values.dtype)


def from_key(keys: Array, dtype: jnp.dtype) -> Array:
    """The values of `dtype` whose keys these are, as float32; keys may be wider than the dtype."""
    sign, magnitude, lowest = _key_constants(dtype)
    keys = keys.astype(jnp.uint16 if lowest.dtype.itemsize == 2 else jnp.uint32)
    ordered = lax.bitcast_convert_type(keys, lowest.dtype) + lowest
    return lax.bitcast_convert_type(ordered ^ ((ordered >> sign) & magnitude), dtype).astype(jnp.float32)


def argmax_and_max(values: Array, vocab_size: Array | None = None) -> tuple[Array, Array]:
    """The column `[N]` int32 (lowest on ties) and the value `[N]` float32 of the maximum of `values` `[N, V]`."""
    return argmax_and_max_of_blocks(values, block_keys(values, vocab_size), vocab_size)


def argmax_and_max_of_blocks(values: Array, keys: Array, vocab_size: Array | None) -> tuple[Array, Array]:
    """As `argmax_and_max`, from the keys of the blocks' maxima; column 0 and NaN for a row with a NaN."""
    row_max = from_key(jnp.max(keys, axis=1), values.dtype)
    # Not the keys, which differ for zeros of both signs.
    block = first_true(from_key(keys, values.dtype) == row_max[:, None])
    inside, columns = _columns_of(values, jnp.minimum(block, keys.shape[1] - 1)[:, None], vocab_size)
    offset = first_true((inside == row_max[:, None]) & (columns >= 0))
    return jnp.where(offset < BLOCK, block * BLOCK + offset, 0), row_max


def top_values(
    values: Array,
    block_max: Array,
    k: int,
    vocab_size: Array | None = None,
    keep: Callable[[Array], Array] | None = None,
    rows: Array | None = None,
) -> Array:
    """The `k` largest kept values of each row; they lie in the k blocks with the largest maxima of kept values.

    Args:
      values: `[N, V]`.
      block_max: `[N, ceil(V / 128)]` float32.
      k: at most V are returned.
      vocab_size: `[N]` int32.
      keep: given float32 values `[N, C]`, which of them count.
      rows: `[R]` int32, in range; then everything but `values` is of these rows, `[R]`. None: of all.

    Returns:
      `[N, min(k, V)]` float32 in descending order, -inf where fewer are kept.
    """
    # A barrier on each side of top_k: without them XLA CPU replaces the TopK call by a full stable sort.
    wanted = min(k, block_max.shape[1])
    blocks = lax.optimization_barrier(lax.top_k(lax.optimization_barrier(block_max), wanted)[1])
    found, columns = _columns_of(values, blocks, vocab_size, rows)
    kept = columns >= 0 if keep is None else (columns >= 0) & keep(found)
    found = lax.optimization_barrier(jnp.where(kept, found, -jnp.inf))
    return lax.optimization_barrier(lax.top_k(found, min(k, values.shape[1]))[0])


def gather_rows(values: Array, rows: Array) -> Array:
    """`[R, V]` float32 rows of `values` `[N, V]`; `rows` `[R]` int32 are in range."""
    gathered = lax.optimization_barrier(_bits(values)[rows])
    return lax.optimization_barrier(lax.bitcast_convert_type(gathered, values.dtype).astype(jnp.float32))


@jax.custom_jvp
def gather_elements(values: Array, rows: Array, columns: Array) -> Array:
    """Float32 elements `values[rows, columns]`, in the shape of the int32 indices, which are in range."""
    return lax.bitcast_convert_type(_bits(values)[rows, columns], values.dtype).astype(jnp.float32)


@gather_elements.defjvp
def _gather_elements_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    # Bits have no gradient of their own.
    _, rows, columns = primals
    return gather_elements(*primals), tangents[0][rows, columns].astype(jnp.float32)


def first_true(mask: Array) -> Array:
    """`[N]` int32 index of the first True of each row of `mask` `[N, C]`; C where there is none."""
    columns = lax.broadcasted_iota(jnp.int32, mask.shape, 1)
    return jnp.min(jnp.where(mask, columns, mask.shape[1]), axis=1, initial=mask.shape[1])


def block_sums(values: Array) -> Array:
    """`[N, ceil(V / 128)]` sums over blocks of 128 columns of `values` `[N, V]` float32."""
    num_rows, num_columns = values.shape
    if num_columns % BLOCK == 0:
        return jnp.sum(values.reshape(num_rows, num_columns // BLOCK, BLOCK), axis=2)
    # A window takes any number of columns; padding or slicing first would copy the whole array.
    padding = ((0, 0), (0, -num_columns % BLOCK))
    return lax.reduce_window(values, np.float32(0), lax.add, (1, BLOCK), (1, BLOCK), padding)


def tree(operation: Callable[[Array, Array], Array], values: list[Array]) -> Array:
    """All values combined pairwise, elementwise."""
    while len(values) > 1:
        pairs = [values[i : i + 2] for i in range(0, len(values), 2)]
        values = [operation(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return values[0]


def _columns_of(
    values: Array, blocks: Array, vocab_size: Array | None, rows: Array | None = None
) -> tuple[Array, Array]:
    """The float32 values of `blocks` `[N, C]` and their columns, `[N, 128 C]`; -1 beyond the vocabulary."""
    num_rows, num_columns = blocks.shape[0], values.shape[1]
    shape = (*blocks.shape, BLOCK)
    columns = blocks[:, :, None] * BLOCK + lax.broadcasted_iota(jnp.int32, shape, 2)
    columns = columns.reshape(num_rows, blocks.shape[1] * BLOCK)
    index = lax.broadcasted_iota(jnp.int32, columns.shape, 0)
    rows = index if rows is None else jnp.broadcast_to(rows[:, None], columns.shape)
    found = gather_elements(values, rows, jnp.minimum(columns, num_columns - 1))
    limit = num_columns if vocab_size is None else jnp.minimum(vocab_size, num_columns)[:, None]
    return found, jnp.where(columns < limit, columns, -1)


def rowwise(values: Array, ndim: int) -> Array:
    """`values` `[N]` with `ndim` axes, to go with arrays `[N, ...]`."""
    return values.reshape(values.shape + (1,) * (ndim - 1))


def _bits(values: Array) -> Array:
    return lax.bitcast_convert_type(values, jnp.int16 if values.dtype.itemsize == 2 else jnp.int32)


def _ordered(bits: Array, dtype: jnp.dtype) -> Array:
    sign, magnitude, lowest = _key_constants(dtype)
    ordered = bits ^ ((bits >> sign) & magnitude)
    return lax.bitcast_convert_type(ordered - lowest, jnp.uint16 if bits.dtype.itemsize == 2 else jnp.uint32)


@functools.cache
def _key_constants(dtype: jnp.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The shift to the sign, the mask of the magnitude, and the place of -inf among the signed integers."""
    integer: Any = np.int16 if np.dtype(dtype).itemsize == 2 else np.int32
    magnitude = np.array(np.iinfo(integer).max, integer)
    lowest = np.bitwise_xor(np.array(-np.inf, dtype).view(integer), magnitude)
    return np.array(8 * np.dtype(integer).itemsize - 1, integer), magnitude, np.asarray(lowest)


def _zero(keys: Array) -> np.ndarray:
    return np.zeros((), keys.dtype)
