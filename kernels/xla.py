"""Row statistics in plain XLA, for every platform; made for the CPU, where each pass runs at memory speed or near it.

What XLA CPU does to the plain forms is said where it is avoided; `kernels/README.md` has the figures.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fly_jax.kernels import blocks
from fly_jax.kernels.statistics import RowOperands, RowStatistics, exponent_rate, shift_of, top_k_entropy

# 2 ** r - 1 over r on [-1/2, 1/2], lowest power first: 2 ** r to 2e-9 but for rounding, and 2 ** 0 is exactly 1, so
# that equal logits give masses that are whole numbers. (Minimax, by linear programming.)
_EXP2_MINUS_1 = tuple(
    np.float32(each)
    for each in (0.6931472028, 0.2402264801, 0.05550332348, 0.009618429334, 0.001339893518, 0.0001535515531)
)

# Slices of a row that are added elementwise.
_SLICES = 8


def row_statistics(logits: Array, operands: RowOperands, *, k: int) -> RowStatistics:
    """As `fly_jax.kernels.row_statistics`; what is not used of the result costs nothing."""
    num_rows, num_columns = logits.shape
    keys = lax.optimization_barrier(blocks.block_keys(logits, operands.vocab_size))
    block_max = blocks.from_key(keys, logits.dtype)
    argmax, row_max = blocks.argmax_and_max_of_blocks(logits, keys, operands.vocab_size)
    mass = row_mass(
        logits,
        shift_of(row_max),
        scale=operands.scale,
        threshold=operands.threshold,
        vocab_size=operands.vocab_size,
    )
    log_mass = jnp.where(jnp.isinf(row_max), row_max, jnp.log(mass))
    top_values = blocks.top_values(logits, block_max, k, operands.vocab_size, _at_least(operands.threshold))
    token_logits = None
    if operands.token_ids is not None:
        rows = jnp.arange(num_rows, dtype=jnp.int32)
        token_logits = blocks.gather_elements(logits, rows, jnp.clip(operands.token_ids, 0, num_columns - 1))
    return RowStatistics(
        argmax=argmax,
        max=row_max,
        log_mass=log_mass,
        top_values=top_values,
        entropy=top_k_entropy(top_values, row_max, log_mass, operands.scale),
        token_logits=token_logits,
        has_nan=jnp.isnan(row_max),
    )


def entropies_at(
    logits: Array, operands: RowOperands, rows: Array, wanted: Array, log_mass: Array | None, *, k: int
) -> Array:
    """As `fly_jax.kernels.entropies_at`; of a row, only its mass is computed, and only where that is not known.

    `log_mass` `[N]` is that of the statistics, or None where computing it for all rows would be for this alone.
    """
    # The same as for the statistics, so that XLA computes it once.
    keys = lax.optimization_barrier(blocks.block_keys(logits, operands.vocab_size))
    block_max = blocks.from_key(keys, logits.dtype)
    row_max = blocks.from_key(jnp.max(keys, axis=1), logits.dtype)[rows]
    own = jax.tree.map(lambda values: values[rows], operands)
    top_values = blocks.top_values(logits, block_max[rows], k, own.vocab_size, _at_least(own.threshold), rows=rows)
    if log_mass is None:
        own_log_mass = jnp.log(_masses_at(logits, own, rows, wanted, shift_of(row_max)))
    else:
        own_log_mass = log_mass[rows]
    return jnp.where(wanted, top_k_entropy(top_values, row_max, own_log_mass, own.scale), jnp.nan)


def _masses_at(logits: Array, own: RowOperands, rows: Array, wanted: Array, shift: Array) -> Array:
    """`[R]` float32: the masses of the wanted `rows`, one after the other, NaN elsewhere; `own`, `shift` are `[R]`."""

    def look(slot: tuple[Array, RowOperands, Array]) -> Array:
        row, own, shift = slot
        # The copy of the row is the result of a cond, so that it is made: fused into the loop over it, it is 6 times
        # as slow.
        own_logits = lax.cond(
            row >= 0,
            lambda row, logits: lax.dynamic_slice_in_dim(logits, row, 1, axis=0),
            lambda row, logits: lax.slice_in_dim(logits, 0, 1, axis=0),
            row,
            logits,
        )
        own = jax.tree.map(lambda value: value[None], own)
        return row_mass(own_logits, shift[None], scale=own.scale, threshold=own.threshold, vocab_size=own.vocab_size)[0]

    def skip(slot: tuple[Array, RowOperands, Array]) -> Array:
        # Derived from the row, so that under shard_map both branches vary over the same axes.
        return slot[0].astype(jnp.float32) * 0.0 + jnp.nan

    return lax.map(lambda each: lax.cond(each[0], look, skip, each[1]), (wanted, (rows, own, shift)))


def row_mass(
    logits: Array,
    shift: Array,
    *,
    scale: Array | None = None,
    threshold: Array | None = None,
    vocab_size: Array | None = None,
) -> Array:
    """The mass of each row: the sum of `exp((logits - shift) * scale)` over the kept columns.

    Args:
      logits: `[N, V]` float32, bfloat16 or float16.
      shift: `[N]` float32, the maximum of each row, or any finite number where that is not finite.
      scale: `[N]` float32, one over the temperature; None is 1.
      threshold: `[N]` float32; logits below it are left out.
      vocab_size: int32 scalar or `[N]`; columns at or beyond it are left out.

    Returns:
      `[N]` float32, to about 2e-6; NaN for a row with a NaN, and for one with +inf.
    """
    num_columns = logits.shape[1]
    rate = jnp.broadcast_to(exponent_rate(scale), shift.shape)
    if threshold is not None:
        # In a loop over thresholds XLA would move everything else out of it, and keep copies of all rows.
        logits, threshold = lax.optimization_barrier((logits, threshold))

    def weights(first: int, width: int) -> Array:
        values = logits[:, first : first + width].astype(jnp.float32)
        weight = _exp2((values - shift[:, None]) * rate[:, None])
        if threshold is not None:
            weight = jnp.where(values < threshold[:, None], 0.0, weight)
        return weight if vocab_size is None else jnp.where(_inside(values, first, vocab_size), weight, 0.0)

    return _sum_of_slices(num_columns, weights, lambda values: jnp.sum(_opaque(values, shift), axis=1))


def count_from(logits: Array, threshold: Array, vocab_size: Array | None = None) -> Array:
    """`[N]` int32: how many logits of each row are at or above `threshold` `[N]` float32."""
    logits, threshold = lax.optimization_barrier((logits, threshold))

    def kept(first: int, width: int) -> Array:
        values = logits[:, first : first + width].astype(jnp.float32)
        mask = values >= threshold[:, None]
        if vocab_size is not None:
            mask &= _inside(values, first, vocab_size)
        return mask.astype(jnp.int32)

    return _sum_of_slices(logits.shape[1], kept, lambda counts: jnp.sum(counts, axis=1, dtype=jnp.int32))


def mask_columns(logits: Array, vocab_size: Array | None) -> Array:
    """`logits` `[N, V]` as float32, columns at or beyond `vocab_size` (scalar or `[N]`) as -inf."""
    values = logits.astype(jnp.float32)
    return values if vocab_size is None else jnp.where(_inside(values, 0, vocab_size), values, -jnp.inf)


def _at_least(threshold: Array | None) -> Callable[[Array], Array] | None:
    return None if threshold is None else lambda values: ~(values < threshold[:, None])


def _inside(values: Array, first: int, vocab_size: Array) -> Array:
    columns = first + lax.broadcasted_iota(jnp.int32, values.shape, 1)
    return columns < jnp.reshape(vocab_size, (-1, 1))


def _sum_of_slices(num_columns: int, part: Callable[[int, int], Array], add_up: Callable[[Array], Array]) -> Array:
    """`[N]`: the sum over a row of what `part` gives for a slice of it (its first column and width), elementwise.

    A sum of eight slices is elementwise: one vectorised loop on every core, which leaves an eighth to be added up.
    """
    width, rest = divmod(num_columns, _SLICES)
    sums = []
    if width:
        sums.append(add_up(blocks.tree(lax.add, [part(i * width, width) for i in range(_SLICES)])))
    if rest:
        sums.append(add_up(part(width * _SLICES, rest)))
    return blocks.tree(lax.add, sums)


@jax.custom_jvp
def _exp2(exponent: Array) -> Array:
    """`2 ** exponent` for exponents of at most 127, by polynomial; 0 below -126; NaN for NaN and +inf."""
    whole = lax.round(exponent, lax.RoundingMethod.TO_NEAREST_EVEN)
    rest = exponent - whole
    power = jnp.full_like(rest, _EXP2_MINUS_1[-1])
    for coefficient in (*_EXP2_MINUS_1[-2::-1], np.float32(1)):
        power = power * rest + coefficient
    # The low bits of the sum are `whole + 127`: the exponent field of `2 ** whole`. XLA's conversion to integers
    # saturates and would cost more. It stays right when fast-math reassociates.
    field = lax.bitcast_convert_type(whole + np.float32(1.5 * 2**23 + 127), jnp.uint32) << jnp.uint32(23)
    return jnp.where(exponent < -126.0, 0.0, power * lax.bitcast_convert_type(field, jnp.float32))


@_exp2.defjvp
def _exp2_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    power = _exp2(*primals)
    return power, power * np.float32(np.log(2)) * tangents[0]


@jax.custom_jvp
def _opaque(values: Array, shift: Array) -> Array:
    """`values` `[N, C]`, and XLA CPU does not fuse what made them into the reduction that follows.

    It would fuse float arithmetic with a reduction into one library call ("YNN fusion"), which does one operation after
    the other on arrays of the whole size. That the mask is 0 it does not see; LLVM does, so that it costs nothing. (A
    barrier would not do: barriers are gone by then.)
    """
    mask = jnp.where(shift > np.inf, jnp.uint32(1), jnp.uint32(0))[:, None]
    return lax.bitcast_convert_type(lax.bitcast_convert_type(values, jnp.uint32) ^ mask, jnp.float32)


@_opaque.defjvp
def _opaque_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return _opaque(*primals), tangents[0]
