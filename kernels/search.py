"""Searches for the cut-offs of top-k and top-p, without sorting the vocabulary."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fly_jax.kernels import blocks
from fly_jax.kernels.xla import count_from, row_mass

# A k up to this is looked up in the blocks with the largest maxima.
_MOST_LOOKED_UP = 128

# So few candidates are sorted.
_FEW = 64


def kth_largest(logits: Array, row_max: Array, k: Array, active: Array, vocab_size: Array | None = None) -> Array:
    """The k-th largest logit of each row.

    A k of at most 128 is looked up in the 128 blocks with the largest maxima. When an active row has a larger one, all
    rows are searched, by bisection over the floats in their order.

    Args:
      logits: `[N, V]` float32, bfloat16 or float16.
      row_max: `[N]` float32.
      k: `[N]` int32, at least 1.
      active: `[N]` bool; the result of other rows is unspecified.
      vocab_size: `[N]` int32; columns at or beyond it are not there.

    Returns:
      `[N]` float32; -inf where the row has fewer than k.
    """
    dtype = logits.dtype
    most = min(_MOST_LOOKED_UP, logits.shape[1])

    # Outside the branch, where XLA finds it computed already, with the row statistics.
    block_max = blocks.from_key(blocks.block_keys(logits, vocab_size), dtype)

    def look_up() -> Array:
        values = blocks.top_values(logits, block_max, most, vocab_size)
        return jnp.take_along_axis(values, jnp.clip(k - 1, 0, most - 1)[:, None], axis=1)[:, 0]

    def search() -> Array:
        high = _key(row_max, dtype)
        low = jnp.where(active, np.uint32(0), high)
        return largest_passing(lambda value: count_from(logits, value, vocab_size) >= k, low, high, dtype)

    return lax.cond(jnp.any(active & (k > most)), search, look_up)


def smallest_in_nucleus(
    logits: Array,
    row_max: Array,
    scale: Array,
    top_p: Array,
    active: Array,
    *,
    threshold: Array,
    vocab_size: Array | None = None,
) -> Array:
    """The largest logit of each row at or above which lies `top_p` of the mass that `threshold` keeps.

    A bracket shrinks, by interpolation of the mass, until few logits are left in it; these are sorted.

    Args:
      logits: `[N, V]` float32, bfloat16 or float16.
      row_max: `[N]` float32, finite.
      scale: `[N]` float32, one over the temperature.
      top_p: `[N]` float32.
      active: `[N]` bool; a row is left alone where False, or where top_p is 1 or more.
      threshold: `[N]` float32, at most the maximum; logits below it are not there.
      vocab_size: `[N]` int32; columns at or beyond it are not there.

    Returns:
      `[N]` float32; -inf where the row is left alone, or is not a distribution.
    """
    dtype, num_columns = logits.dtype, logits.shape[1]
    floor = jnp.maximum(threshold, np.float32(jnp.finfo(dtype).min))
    total = row_mass(logits, row_max, scale=scale, threshold=floor, vocab_size=vocab_size)
    search = _Search(logits, row_max, scale, floor, top_p * total, vocab_size)
    active = active & (top_p < 1) & jnp.isfinite(total) & (total > 0)
    # All logits below this together weigh half of what may be left out.
    rare = jnp.log(jnp.maximum((1 - top_p) * total / (2 * num_columns), np.float32(1e-37))) / scale
    high = _key(row_max, dtype)
    low = jnp.minimum(_key(jnp.maximum(floor, row_max + rare), dtype), high)
    unit = jnp.ones_like(total)
    bracket = _Bracket(low, high, total, jnp.zeros_like(total), unit, unit)

    # Whether a row is finished is decided once and carried: computed again in the condition it may round differently,
    # and a row that only the condition takes for unfinished would never move.
    def unfinished(state: tuple[Array, Array, _Bracket]) -> Array:
        return jnp.any(state[1])

    def narrow(state: tuple[Array, Array, _Bracket]) -> tuple[Array, Array, _Bracket]:
        step, moving, bracket = state
        bracket = search.narrow(step, bracket, moving)
        return step + 1, active & search.is_crowded(bracket), bracket

    _, _, bracket = lax.while_loop(unfinished, narrow, (jnp.int32(0), active & search.is_crowded(bracket), bracket))
    return jnp.where(active, search.pick(bracket), -jnp.inf)


def largest_passing(passes: Callable[[Array], Array], low: Array, high: Array, dtype: Any = jnp.float32) -> Array:
    """The largest number that passes, where all up to some number do and none above.

    A binary search over the floats in their order: exact after at most 32 steps, whatever the numbers are, but for
    subnormal ones where the backend flushes them.

    Args:
      passes: of `[N]` float32, numbers of `dtype`; `[N]` bool.
      low: `[N]` uint32, the key of a number that passes.
      high: `[N]` uint32, the key of one above which none does; a row is left alone where it is not above `low`.
      dtype: whose keys these are.

    Returns:
      `[N]` float32.
    """

    def unfinished(bounds: tuple[Array, Array]) -> Array:
        return jnp.any(bounds[0] < bounds[1])

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = _middle(low, high)
        moving, passed = low < high, passes(blocks.from_key(middle, dtype))
        return (
            jnp.where(moving & passed, middle, low),
            jnp.where(moving & ~passed, jnp.maximum(middle - np.uint32(1), low), high),
        )

    return blocks.from_key(lax.while_loop(unfinished, halve, (low, high))[0], dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Bracket:
    """Where the logit searched for lies; every field `[N]`.

    Attributes:
      low: the key of a number no larger than it.
      high: the key of a number no smaller.
      mass_low: the mass at or above `low`; reaches what is wanted.
      mass_above: the mass above `high`; does not.
      trust_low: the weight of the lower end in the interpolation, halved each time it stays (the Illinois rule).
      trust_above: that of the upper end.
    """

    low: Array
    high: Array
    mass_low: Array
    mass_above: Array
    trust_low: Array
    trust_above: Array


@dataclasses.dataclass(frozen=True)
class _Search:
    logits: Array
    row_max: Array
    scale: Array
    floor: Array
    wanted: Array
    vocab_size: Array | None

    def is_crowded(self, bracket: _Bracket) -> Array:
        """Whether more than a few logits may be left: each weighs at least as much as the lower end."""
        inside = bracket.mass_low - bracket.mass_above
        return (bracket.low < bracket.high) & (inside >= (_FEW - 1) * self._weight(self._value(bracket.low)))

    def narrow(self, step: Array, bracket: _Bracket, moving: Array) -> _Bracket:
        """One more mass, and the part of the bracket that it leaves of each row that is `moving`."""
        low, high = bracket.low, bracket.high
        over = (bracket.mass_low - self.wanted) * bracket.trust_low
        under = (self.wanted - bracket.mass_above) * bracket.trust_above
        share = jnp.clip(over / (over + under), 1e-3, 1 - 1e-3)
        weight_low, weight_high = self._weight(self._value(low)), self._weight(self._value(high))
        guess = self.row_max + jnp.log(weight_low + (weight_high - weight_low) * share) / self.scale
        # Bisection now and then, and after some steps always, bounds the number of steps whatever the logits are.
        bisect = (step % 4 == 3) | (step > (8 if self.logits.dtype.itemsize == 2 else 20))
        probe = jnp.where(bisect, _middle(low, high), _key(guess, self.logits.dtype))
        probe = jnp.clip(probe, jnp.minimum(low + np.uint32(1), high), high)
        threshold = jnp.maximum(self._value(probe), self.floor)
        mass = row_mass(self.logits, self.row_max, scale=self.scale, threshold=threshold, vocab_size=self.vocab_size)
        up, down = moving & (mass >= self.wanted), moving & ~(mass >= self.wanted)
        return _Bracket(
            low=jnp.where(up, probe, low),
            high=jnp.where(down, jnp.maximum(probe - np.uint32(1), low), high),
            mass_low=jnp.where(up, mass, bracket.mass_low),
            mass_above=jnp.where(down, mass, bracket.mass_above),
            trust_low=jnp.where(up, 1.0, jnp.where(down, bracket.trust_low / 2, bracket.trust_low)),
            trust_above=jnp.where(down, 1.0, jnp.where(up, bracket.trust_above / 2, bracket.trust_above)),
        )

    def pick(self, bracket: _Bracket) -> Array:
        """The logit, once few are left in the bracket."""
        low, high = jnp.maximum(self._value(bracket.low), self.floor), self._value(bracket.high)
        # Zeros of both signs are equal as numbers, and differ as keys.
        low = jnp.where(low == 0, np.float32(-0.0), low)
        high = jnp.where(high == 0, np.float32(0.0), high)
        dtype = self.logits.dtype
        # `floor` need not be a number of the dtype: its key may be that of one just below it, which top_values drops.
        low_key, high_key = (blocks.to_key(each.astype(dtype)) for each in (low, high))

        def inside_keys(keys: Array) -> Array:
            return (keys >= blocks.rowwise(low_key, keys.ndim)) & (keys <= blocks.rowwise(high_key, keys.ndim))

        block_max = blocks.from_key(blocks.block_keys(self.logits, self.vocab_size, inside_keys), dtype)
        values = blocks.top_values(
            self.logits,
            block_max,
            _FEW,
            self.vocab_size,
            lambda values: (values >= low[:, None]) & (values <= high[:, None]),
        )
        present = values > -jnp.inf
        weights = jnp.where(present, jnp.exp((values - self.row_max[:, None]) * self.scale[:, None]), 0.0)
        reached = bracket.mass_above[:, None] + jnp.cumsum(weights, axis=1)
        # Where rounding leaves none that reaches it, the smallest.
        last = jnp.maximum(jnp.sum(present, axis=1, dtype=jnp.int32) - 1, 0)
        index = jnp.minimum(blocks.first_true(present & (reached >= self.wanted[:, None])), last)
        picked = jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]
        return jnp.where(bracket.low < bracket.high, picked, self._value(bracket.low))

    def _value(self, keys: Array) -> Array:
        return blocks.from_key(keys, self.logits.dtype)

    def _weight(self, values: Array) -> Array:
        return jnp.exp((values - self.row_max) * self.scale)


def _key(values: Array, dtype: jnp.dtype) -> Array:
    return blocks.to_key(values.astype(dtype)).astype(jnp.uint32)


def _middle(low: Array, high: Array) -> Array:
    return high - (high - low) // np.uint32(2)
