"""What one read of logit rows gives, and the entropy that follows from it: the same for every implementation."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

TINY = np.float32(np.finfo(np.float32).tiny)
"""A probability below float32's smallest normal number is 0: some backends flush such numbers and some do not."""

_LOG_TINY = np.float32(np.log(TINY))
_LOG2_E = np.float32(np.log2(np.e))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowOperands:
    """What is given per row besides its logits; None where nothing is.

    Attributes:
      token_ids: `[N]` int32, the token whose logit is wanted; clipped into the row.
      scale: `[N]` float32, one over the temperature.
      threshold: `[N]` float32; logits below it count as -inf.
      vocab_size: `[N]` int32; columns at or beyond it are not there.
    """

    token_ids: Array | None = None
    scale: Array | None = None
    threshold: Array | None = None
    vocab_size: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowStatistics:
    """Statistics of `N` rows of logits.

    The log-probability of a kept logit is `(logit - shift) * scale - log_mass`: relative to the maximum, which stays
    precise for large logits and low temperatures, where `logit * scale - logsumexp` does not.

    Attributes:
      argmax: `[N]` int32, lowest index on ties; unspecified for a row with a NaN.
      max: `[N]` float32, unscaled; unspecified for a row with a NaN.
      log_mass: `[N]` float32, the log of the sum of `exp((logit - max) * scale)` over the kept columns; the maximum
        itself where that is infinite, NaN in a row with a NaN.
      top_values: `[N, min(k, V)]` float32, the largest kept logits in descending order, -inf where fewer are kept;
        unspecified for a row with a NaN.
      entropy: `[N]` float32, nats: `-sum p log p` over the top values, not renormalised; NaN where the maximum is not
        finite and in a row with a NaN.
      token_logits: `[N]` float32, the logit of the row's token, kept or not; None where none were asked for.
      has_nan: `[N]` bool.
    """

    argmax: Array
    max: Array
    log_mass: Array
    top_values: Array
    entropy: Array
    token_logits: Array | None
    has_nan: Array

    @property
    def shift(self) -> Array:
        """`[N]` float32: the maximum, or 0 where it is not finite."""
        return shift_of(self.max)


def shift_of(row_max: Array) -> Array:
    """The maximum of a row where it is finite, otherwise 0, so that differences from it are never NaN by themselves."""
    return jnp.where(jnp.isfinite(row_max), row_max, 0.0)


def exponent_rate(scale: Any) -> Any:
    """What turns a difference of logits into a power of two: `exp(x * scale) == 2 ** (x * exponent_rate(scale))`.

    Never infinite: a difference of 0 would become NaN. `scale` None is 1.
    """
    return _LOG2_E if scale is None else jnp.minimum(scale * _LOG2_E, np.finfo(np.float32).max)


def probability(log_probability: Array) -> Array:
    """`exp`, with what is below float32's smallest normal number as 0, on every backend; NaN stays NaN."""
    return jnp.where(log_probability < _LOG_TINY, 0.0, jnp.exp(log_probability))


def top_k_entropy(top_values: Array, row_max: Array, log_mass: Array, scale: Array | None) -> Array:
    """Section 2 of the rule: H in nats over the top k of the full softmax, not renormalised.

    Args:
      top_values: `[N, k]` float32, the largest kept logits.
      row_max: `[N]` float32.
      log_mass: `[N]` float32, relative to the maximum.
      scale: `[N]` float32, one over the temperature; None is 1.

    Returns:
      `[N]` float32, NaN where the maximum is not finite and where `log_mass` is NaN.
    """
    difference = top_values - shift_of(row_max)[:, None]
    log_probability = (difference if scale is None else difference * scale[:, None]) - log_mass[:, None]
    p = probability(log_probability)
    entropy = -jnp.sum(jnp.where(p == 0, 0.0, p * log_probability), axis=1)
    return jnp.where(jnp.isfinite(row_max), entropy, jnp.nan)
