"""Sections 2 and 3 of the rule: which native rejections are deferred, that is, which rejected draft tokens are kept."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from fly_jax.config import FlyConfig
from fly_jax.rule.acceptance import Acceptance
from fly_jax.rule.edge import Inputs
from fly_jax.rule.scoring import TargetScores


@dataclasses.dataclass(frozen=True)
class Deferral:
    """Which rejections are deferred, past the stop too.

    Attributes:
      deferred: `[B, K]` bool.
      entropy: `[B, K]` float32 nats where conditions 1, 2 and 4 of a deferral hold, NaN elsewhere.
    """

    deferred: Array
    entropy: Array


def defer(inputs: Inputs, target: TargetScores, native: Acceptance, config: FlyConfig | None) -> Deferral:
    """A rejection is kept if the next W positions are natively accepted, inside the draft, and the gate is open.

    The entropy is looked at only where everything else lets a rejection be deferred.
    """
    num_positions = native.accepted.shape[1]
    nowhere = Deferral(jnp.zeros_like(native.accepted), jnp.full(native.accepted.shape, jnp.nan, jnp.float32))
    if config is None or num_positions < 2:
        return nowhere
    window_size = config.window_size_for(num_positions)
    # Two deferrals of a request are at least W + 1 apart.
    most_deferrals = num_positions // (window_size + 1)
    if most_deferrals == 0:
        return nowhere

    position = jnp.arange(num_positions, dtype=jnp.int32)[None]
    candidate = (
        ~native.accepted
        & native.deferrable
        & (position + window_size < inputs.num_draft_tokens[:, None])
        & _window_accepted(native.accepted, window_size)
    )
    nth = jnp.cumsum(candidate, axis=1, dtype=jnp.int32) - 1
    slot = jnp.arange(most_deferrals, dtype=jnp.int32)
    in_slot = candidate[:, None, :] & (nth[:, None, :] == slot[None, :, None])
    slot_position = jnp.sum(jnp.where(in_slot, position[:, None, :], 0), axis=2, dtype=jnp.int32)
    slot_rows = jnp.take_along_axis(inputs.row_index, slot_position, axis=1)
    slot_entropy = target.entropies(slot_rows, jnp.any(in_slot, axis=2))
    entropy = jnp.take_along_axis(slot_entropy, jnp.clip(nth, 0, most_deferrals - 1), axis=1)
    entropy = jnp.where(candidate, entropy, jnp.nan)
    threshold = jnp.broadcast_to(jnp.asarray(config.entropy_threshold, jnp.float32), native.accepted.shape[:1])
    return Deferral(candidate & (entropy >= threshold[:, None]), entropy)


def _window_accepted(accepted: Array, window_size: int) -> Array:
    """`[B, K]` bool: the `window_size` positions after each are all inside the array and natively accepted."""
    num_positions = accepted.shape[1]
    count = jnp.pad(jnp.cumsum(accepted, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    inside = count[:, window_size + 1 :] - count[:, 1 : num_positions - window_size + 1] == window_size
    return jnp.pad(inside, ((0, 0), (0, window_size)))
