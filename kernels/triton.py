"""Row statistics as one Pallas kernel, lowered through Triton: CUDA and ROCm from the same source.

Each program reads a share of one row in groups of 16 bytes. Each lane keeps the mass of what it read and the k groups
with the largest maxima: the k largest values are in those, which are read once more at the end. All that is done with
every logit is then a conversion, a maximum and an `exp2`; keeping the largest values themselves takes three times as
many instructions, more than there is time for while 16-bit logits arrive. Few rows are split over several programs;
what they found is merged by XLA.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from fly_jax import compat
from fly_jax.kernels.statistics import RowOperands, RowStatistics, exponent_rate, shift_of, top_k_entropy

MAX_TOP_K = 8
"""The running largest groups are held in registers."""

NAME = "row_statistics"
"""Of the kernel, in profiles and in compiled modules."""

_NEG_INF = np.float32(-np.inf)
_GROUP_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a row is read.

    Attributes:
      block: columns a program reads at a time, a power of two.
      num_loads: into how many loads a block is cut, a power of two; all are issued before the first is used.
      num_warps: of one program.
      num_programs: how many programs fill the device; a row is split where there are fewer rows.
    """

    block: int
    num_loads: int
    num_warps: int
    num_programs: int


# By platform and bytes of a logit. Each thread has 64 bytes in flight: with four programs on each of an H100's 132
# multiprocessors that is 32 KiB a multiprocessor, where 3.35 TB/s at a latency of 700 ns take 18; two on each of an
# MI300X's 304 compute units, whose programs have twice the threads, come to the same. Half of it would be too little
# for few rows; twice of it takes twice the registers, up to 144 at k = 8.
TILES = {
    ("cuda", 4): Tile(block=2048, num_loads=4, num_warps=4, num_programs=528),
    ("cuda", 2): Tile(block=4096, num_loads=4, num_warps=4, num_programs=528),
    ("rocm", 4): Tile(block=4096, num_loads=4, num_warps=4, num_programs=608),
    ("rocm", 2): Tile(block=8192, num_loads=4, num_warps=4, num_programs=608),
}


def row_statistics(
    logits: Array,
    operands: RowOperands,
    *,
    k: int,
    platform: str,
    interpret: bool = False,
    tile: Tile | None = None,
    splits: int | None = None,
) -> RowStatistics:
    """As `fly_jax.kernels.row_statistics`, with at most `MAX_TOP_K` largest values.

    Args:
      logits: `[N, V]` float32, bfloat16 or float16, V at least 1.
      operands: per row.
      k: how many largest values.
      platform: "cuda" or "rocm", whose tile is taken.
      interpret: runs the kernel as plain JAX, on any platform.
      tile: instead of the platform's.
      splits: of a row; None takes what fills the device.

    Returns:
      The statistics.
    """
    num_rows, num_columns = logits.shape
    k = min(k, num_columns)
    tile = tile or TILES[platform, logits.dtype.itemsize]
    if splits is None:
        blocks = pl.cdiv(num_columns, tile.block)
        steps = pl.cdiv(blocks, pl.cdiv(tile.num_programs, max(num_rows, 1)))
        # The fewest programs a row that take no more steps.
        splits = pl.cdiv(blocks, steps)
    parts = _call(logits, operands, k=k, tile=tile, splits=splits, interpret=interpret)
    return _merge(parts, operands.scale, k)


def _call(
    logits: Array, operands: RowOperands, *, k: int, tile: Tile, splits: int, interpret: bool
) -> dict[str, Array]:
    """What each of the `S` programs of a row found: `top` `[N, S, k]`; `argmax`, `mass`, `token` `[N, S]`."""
    num_rows = logits.shape[0]
    given = {name: value for name, value in vars(operands).items() if value is not None}
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "top": ((num_rows, splits, k), jnp.float32),
        "argmax": ((num_rows, splits), jnp.int32),
        "mass": ((num_rows, splits), jnp.float32),
    }
    if "token_ids" in given:
        shapes["token"] = ((num_rows, splits), jnp.float32)
    if num_rows == 0:
        return {name: jnp.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}
    call = functools.partial(_pallas_call, interpret=True) if interpret else _lowered_call
    results = call(
        logits,
        *given.values(),
        inputs=("logits", *given),
        outputs=tuple((name, *shape) for name, shape in shapes.items()),
        tile=tile,
        splits=splits,
    )
    return dict(zip(shapes, results, strict=True))


def _pallas_call(
    logits: Array,
    *operands: Array,
    inputs: tuple[str, ...],
    outputs: tuple[tuple[str, tuple[int, ...], Any], ...],
    tile: Tile,
    splits: int,
    interpret: bool = False,
) -> Sequence[Array]:
    num_rows, num_columns = logits.shape
    # Offsets into all rows together must fit an int32.
    flat = num_rows * num_columns < 2**31 - tile.block * splits
    kernel = functools.partial(
        _kernel,
        inputs=inputs,
        outputs=tuple(name for name, _, _ in outputs),
        num_columns=num_columns,
        tile=tile,
        splits=splits,
    )
    results: Sequence[Array] = pl.pallas_call(
        kernel,
        grid=(num_rows, splits),
        out_shape=[compat.shape_like(logits, shape, dtype) for _, shape, dtype in outputs],
        # Triton pipelines only loads that feed matrix products.
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=1),
        interpret=interpret,
        name=NAME,
    )(logits.reshape(-1) if flat else logits, *operands)
    return results


_lowered_call = compat.lowered_quietly("fly_jax_triton_call", _pallas_call)


@dataclasses.dataclass(frozen=True)
class _Row:
    """One row of the logits, as a program reads it. Numbers are int32 or float32, traced or not.

    Attributes:
      ref: `[N * V]` or `[N, V]` logits.
      index: of the row.
      num_columns: V.
      start: the first element of the row's first group, in `[N * V]` logits; otherwise None.
      shift: how many columns of that group belong to the row before.
      end: how many columns there are.
      exponent_rate: turns a difference of logits into a power of two.
      threshold: of the row, or None.
    """

    ref: Any
    index: Array
    num_columns: int
    start: Any
    shift: Any
    end: Any
    exponent_rate: Any
    threshold: Array | None

    def load(self, offset: Array, masked: bool) -> Array:
        """Float32 logits at `offset`, counted from `start`, whatever the threshold; -inf outside the row.

        Args:
          offset: int32, whole groups along the last axis.
          masked: some may lie outside the row.
        """
        source = self.ref.at[self.start + offset] if self.ref.ndim == 1 else self.ref.at[self.index, offset]
        if not masked:
            return plt.load(source).astype(jnp.float32)
        end = self.shift + self.end
        if self.ref.ndim == 1 or self.num_columns % _group(self.ref) == 0:
            # Whole groups are loaded, since a load is wide only where its mask is the same for all of a group. The last
            # may reach up to 14 bytes past the array: no memory ends inside an aligned 16 bytes.
            end = _round_down(end + np.int32(_group(self.ref) - 1), _group(self.ref))
        other = np.array(_NEG_INF, self.ref.dtype)
        values = plt.load(source, mask=offset < end, other=other).astype(jnp.float32)
        column = offset - self.shift
        return jnp.where((column >= 0) & (column < self.end), values, _NEG_INF)

    def element(self, column: Array) -> Array:
        """The float32 logit of one column, whether it counts or not."""
        own = self.ref[self.start + self.shift + column] if self.ref.ndim == 1 else self.ref[self.index, column]
        return own.astype(jnp.float32)

    def keep(self, values: Array, logits: Array | None = None, otherwise: Any = _NEG_INF) -> Array:
        """`values`, but `otherwise` where their `logits`, by default themselves, are below the threshold."""
        if self.threshold is None:
            return values
        return jnp.where((values if logits is None else logits) < self.threshold, otherwise, values)

    def power(self, values: Array, shift: Array) -> Array:
        """`exp((values - shift) * scale)`."""
        return jnp.exp2((values - shift) * self.exponent_rate)


def _row(ref: Any, index: Array, num_columns: int, operands: dict[str, Array]) -> _Row:
    start: Any = index * num_columns if ref.ndim == 1 else None
    shift: Any = np.int32(0)
    if _most_shift(ref, num_columns):
        aligned = _round_down(start, _group(ref))
        start, shift = aligned, start - aligned
    end: Any = np.int32(num_columns)
    if "vocab_size" in operands:
        end = jnp.clip(operands["vocab_size"], 0, num_columns)
    rate = exponent_rate(operands.get("scale"))
    return _Row(ref, index, num_columns, start, shift, end, rate, operands.get("threshold"))


def _group(ref: Any) -> int:
    return _GROUP_BYTES // ref.dtype.itemsize


def _most_shift(ref: Any, num_columns: int) -> int:
    """How many columns of its first group may belong to the row before."""
    return _group(ref) - 1 if ref.ndim == 1 and num_columns % _group(ref) else 0


def _round_down(value: Any, multiple: int) -> Any:
    # lax.div: `//` would hide from Triton that the result is a multiple, and loads would become narrow.
    return lax.div(value, np.int32(multiple)) * np.int32(multiple)


def _kernel(
    *refs: Any, inputs: tuple[str, ...], outputs: tuple[str, ...], num_columns: int, tile: Tile, splits: int
) -> None:
    ref = dict(zip(inputs + outputs, refs, strict=True))
    index, split = pl.program_id(0), pl.program_id(1)
    operands = {name: ref[name][index] for name in inputs if name != "logits"}
    row = _row(ref["logits"], index, num_columns, operands)
    k = ref["top"].shape[2]
    if "token_ids" in operands:
        ref["token"][index, split] = row.element(jnp.clip(operands["token_ids"], 0, num_columns - 1))

    def loop(first: Any, last: Any, carry: tuple[Array, ...], masked: bool) -> tuple[Array, ...]:
        def step(i: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            return _update(row, (i * np.int32(splits) + split) * np.int32(tile.block), carry, tile, masked)

        if isinstance(last - first, np.integer) and last <= first + 1:
            return step(first, carry) if first < last else carry
        return lax.fori_loop(first, last, step, carry)

    lanes = tile.block // tile.num_loads // _group(row.ref)
    carry = (
        jnp.zeros((lanes,), jnp.float32),
        *[jnp.full((lanes,), _NEG_INF)] * k,
        *[jnp.zeros((lanes,), jnp.int32)] * k,
    )
    # Only the first step and the last, or the last two, can touch another row.
    stride, most_shift = np.int32(tile.block * splits), _most_shift(row.ref, num_columns)
    first = np.int32(min(most_shift, 1))
    last, steps = row.end // stride, (row.end + np.int32(most_shift) + stride - np.int32(1)) // stride
    last = max(last, first) if isinstance(last, np.integer) else jnp.maximum(last, first)
    carry = loop(np.int32(0), first, carry, True)
    carry = loop(first, last, carry, False)
    carry = loop(last, steps, carry, True)
    mass, top, groups = carry[0], list(carry[1 : k + 1]), list(carry[k + 1 :])
    ref["mass"][index, split] = jnp.sum(mass * row.power(top[0], shift_of(jnp.max(top[0]))))
    ref["argmax"][index, split], top = _largest_values(row, top, groups)
    for rank, value in enumerate(top):
        ref["top"][index, split, rank] = value


def _update(row: _Row, offset: Array, carry: tuple[Array, ...], tile: Tile, masked: bool) -> tuple[Array, ...]:
    """One block of the row into the mass and the largest groups of each lane."""
    group_size, k = _group(row.ref), len(carry) // 2
    lanes = tile.block // tile.num_loads // group_size
    mass, top, groups = carry[0], list(carry[1 : k + 1]), list(carry[k + 1 :])
    lane = lax.broadcasted_iota(jnp.int32, (lanes, group_size), 0) * group_size
    within = lane + lax.broadcasted_iota(jnp.int32, (lanes, group_size), 1)
    starts = [offset + np.int32(i * lanes * group_size) for i in range(tile.num_loads)]
    blocks = [row.load(start + within, masked) for start in starts]
    # What maximum makes of NaN differs between Triton and the interpreter. A NaN is found in the mass; a comparison
    # with one is False, so that it is nowhere else.
    maxima = [row.keep(jnp.max(values, axis=1)) for values in blocks]
    shift = shift_of(functools.reduce(jnp.maximum, maxima, top[0]))
    mass = mass * row.power(top[0], shift)
    for values in blocks:
        mass += jnp.sum(row.keep(row.power(values, shift[:, None]), values, 0.0), axis=1)
    for start, value in zip(starts, maxima, strict=True):
        group = start + lax.iota(jnp.int32, lanes) * group_size
        for rank in range(k):
            higher = value > top[rank]
            top[rank], value = jnp.where(higher, value, top[rank]), jnp.where(higher, top[rank], value)
            groups[rank], group = jnp.where(higher, group, groups[rank]), jnp.where(higher, groups[rank], group)
    return mass, *top, *groups


def _largest_values(row: _Row, top: list[Array], groups: list[Array]) -> tuple[Array, list[Array]]:
    """The column of the maximum, and the k largest values, from the largest groups of each lane."""
    k = len(top)
    lane = lax.iota(jnp.int32, _group(row.ref))
    values = [jnp.full(lane.shape, _NEG_INF)] * k
    argmax: Any = np.int32(0)
    for rank in range(k):
        largest = jnp.max(top[0])
        group = jnp.min(jnp.where(top[0] == largest, groups[0], np.int32(2**31 - 1)))
        winner = groups[0] == group
        top = _next_up(top, winner, _NEG_INF)
        groups = _next_up(groups, winner, np.int32(0))
        # Without a group there is nothing, though group 0 is read.
        candidates = jnp.where(largest > _NEG_INF, row.keep(row.load(group + lane, masked=True)), _NEG_INF)
        if rank == 0:
            argmax = jnp.min(jnp.where(candidates == largest, group + lane - row.shift, np.int32(2**31 - 1)))
            argmax = jnp.where(largest > _NEG_INF, argmax, 0)
        for i in range(k):
            higher = candidates > values[i]
            values[i], candidates = jnp.where(higher, candidates, values[i]), jnp.where(higher, values[i], candidates)
    found = []
    for _ in range(k):
        found.append(jnp.max(values[0]))
        first = jnp.min(jnp.where(values[0] == found[-1], lane, np.int32(len(lane))))
        values = _next_up(values, lane == first, _NEG_INF)
    return argmax, found


def _next_up(ranked: list[Array], winner: Array, last: Any) -> list[Array]:
    """Where `winner`, each rank takes the value of the one below it."""
    below = [*ranked[1:], jnp.full_like(ranked[0], last)]
    return [jnp.where(winner, lower, each) for each, lower in zip(ranked, below, strict=True)]


def _merge(parts: dict[str, Array], scale: Array | None, k: int) -> RowStatistics:
    """The statistics of the rows from those of their splits."""
    top, argmax, mass = parts["top"], parts["argmax"], parts["mass"]
    if top.shape[1] == 1:
        row_max, argmax, mass, top = top[:, 0, 0], argmax[:, 0], mass[:, 0], top[:, 0]
    else:
        split_max = top[:, :, 0]
        row_max = jnp.max(split_max, axis=1)
        is_max = split_max == row_max[:, None]
        difference = jnp.where(is_max, 0.0, split_max - row_max[:, None])
        if scale is not None:
            difference = difference * scale[:, None]
        mass = jnp.sum(mass * jnp.exp(difference), axis=1)
        argmax = jnp.min(jnp.where(is_max, argmax, jnp.iinfo(jnp.int32).max), axis=1)
        top = lax.top_k(top.reshape(top.shape[0], top.shape[1] * k), k)[0]
    has_nan = jnp.isnan(mass)
    log_mass = jnp.where(jnp.isinf(row_max) & ~has_nan, row_max, jnp.log(mass))
    return RowStatistics(
        argmax=argmax,
        max=row_max,
        log_mass=log_mass,
        top_values=top,
        entropy=top_k_entropy(top, row_max, log_mass, scale),
        token_logits=parts["token"][:, 0] if "token" in parts else None,
        has_nan=has_nan,
    )
