"""Stage 2: native acceptance, the decision of standard lossless verification at every position."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from fly_jax import kernels
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


def accept(inputs: Inputs, target: TargetScores, draft: DraftDistribution | None, uniform: Array | None) -> Acceptance:
    """Section 1 of the rule: greedy by argmax, sampling by `p >= u`, or `p / q >= u` with a draft distribution.

    `uniform` is `[B, K]` float32, None when every request is greedy.
    """
    rows = inputs.row_index[:, :-1]
    proposed = inputs.draft_in_vocab & target.valid[rows]
    logits = target.token_logits(rows, inputs.draft_token_ids)
    deferrable = proposed & ~target.excludes(rows, logits)
    greedy_accepted = inputs.draft_token_ids == target.statistics.argmax[rows]
    if uniform is None or target.softmax is None:
        return Acceptance(proposed & greedy_accepted, deferrable)

    greedy = inputs.greedy[:, None]
    p = kernels.probability(target.softmax.log_probability(rows, logits))
    ratio = p
    if draft is not None:
        one_hot = draft.one_hot[:, None]
        q = draft.token_probability(inputs.draft_token_ids)
        ratio = jnp.where(one_hot, p, p / q)
        # q > 0 on every backend: some flush what is below the smallest normal number. A NaN fails as well.
        deferrable &= greedy | one_hot | (q >= kernels.TINY)
    sampling_accepted = deferrable & (p > 0) & (ratio >= uniform)
    return Acceptance(proposed & jnp.where(greedy, greedy_accepted, sampling_accepted), deferrable)
