"""Section 1 of the rule: native acceptance, the decision of standard lossless verification at every position."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from fly_jax import kernels
from fly_jax.noise import Noise
from fly_jax.rule.edge import Inputs
from fly_jax.rule.scoring import DraftDistribution, TargetScores


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Native decisions, and which draft tokens a deferral may keep.

    Attributes:
      accepted: `[B, K]` bool; False at and beyond `num_draft_tokens`.
      deferrable: `[B, K]` bool: condition 1 of a deferral, in a valid row.
    """

    accepted: Array
    deferrable: Array


def accept(inputs: Inputs, target: TargetScores, draft: DraftDistribution | None, noise: Noise | None) -> Acceptance:
    """Greedy by argmax, sampling by `p >= u`, or `p / q >= u` with a draft distribution.

    `noise` is None when every request is greedy.
    """
    rows = inputs.draft_rows
    proposed = inputs.draft_in_vocab & target.valid[rows]
    may_defer = deferrable(inputs, target, draft)
    greedy_accepted = inputs.draft_token_ids == target.statistics.argmax[rows]
    if inputs.sampling is None or noise is None:
        return Acceptance(proposed & greedy_accepted, may_defer)

    p = kernels.probability(target.token_log_probability(rows, inputs.draft_token_ids))
    ratio = p
    if draft is not None:
        ratio = jnp.where(draft.one_hot[:, None], p, p / draft.token_probability(inputs.draft_token_ids))
    sampling_accepted = may_defer & (p > 0) & (ratio >= noise.uniforms())
    return Acceptance(
        proposed & jnp.where(inputs.sampling.greedy[:, None], greedy_accepted, sampling_accepted), may_defer
    )


def deferrable(inputs: Inputs, target: TargetScores, draft: DraftDistribution | None) -> Array:
    """`[B, K]` bool: condition 1 of a deferral, in a valid row."""
    rows = inputs.draft_rows
    result = inputs.draft_in_vocab & target.valid[rows] & ~target.excludes(rows, inputs.draft_token_ids)
    if draft is None or inputs.sampling is None:
        return result
    # q > 0 on every backend: some flush what is below the smallest normal number. A NaN fails as well.
    drafted = draft.token_probability(inputs.draft_token_ids) >= kernels.TINY
    return result & ((inputs.sampling.greedy | draft.one_hot)[:, None] | drafted)
