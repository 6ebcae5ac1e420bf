"""Section 4 of the rule: the token after the accepted prefix, from the one row per request that produces it."""

import jax.numpy as jnp
from jax import Array, lax

from fly_jax import kernels
from fly_jax.kernels import blocks
from fly_jax.kernels.xla import mask_columns
from fly_jax.noise import Noise
from fly_jax.rule.edge import Inputs
from fly_jax.rule.scoring import DraftDistribution, TargetScores


def emit(
    inputs: Inputs, target: TargetScores, draft: DraftDistribution | None, noise: Noise | None, num_accepted: Array
) -> tuple[Array, Array]:
    """A sample or the argmax of that row; where it is not a distribution, the argmax over what is finite.

    `noise` is None when every request is greedy.

    Returns:
      The token `[B]` int32 after `num_accepted` `[B]` kept drafts, and whether its row was invalid, `[B]` bool.
    """
    rows = _at(inputs.row_index, num_accepted)
    all_kept = num_accepted == inputs.num_draft_tokens
    token = target.statistics.argmax[rows]
    invalid = ~target.valid[rows]
    if inputs.sampling is not None and noise is not None:
        greedy = inputs.sampling.greedy
        sampled = _sample(inputs, target, draft, noise, num_accepted, greedy)
        token = jnp.where(greedy, token, sampled)
    if inputs.bonus_token_ids is not None:
        invalid &= ~all_kept
    token = lax.cond(
        jnp.any(invalid),
        lambda token: jnp.where(invalid, _finite_argmax(target, rows), token),
        lambda token: token,
        token,
    )
    if inputs.bonus_token_ids is not None:
        token = jnp.where(all_kept, inputs.bonus_token_ids, token)
    return token, invalid


def inverse_cdf(weights: Array, uniforms: Array) -> tuple[Array, Array]:
    """Samples columns in proportion to their weights: one uniform picks the block of 128, the other the column in it.

    In blocks, float32 sums over a whole vocabulary keep their precision, and only one block is looked into.

    Args:
      weights: `[B, V]` float32, at least 0.
      uniforms: `[B, 2]` float32 on (0, 1].

    Returns:
      The column `[B]` int32 (unspecified where the total is 0 or not finite), and the total weight `[B]` float32.
    """
    num_columns = weights.shape[1]
    sums = lax.optimization_barrier(blocks.block_sums(weights))
    block, total = _first_reaching(sums, uniforms[:, 0])
    columns = block[:, None] * blocks.BLOCK + jnp.arange(blocks.BLOCK, dtype=jnp.int32)[None]
    inside = jnp.take_along_axis(weights, jnp.minimum(columns, num_columns - 1), axis=1)
    offset, _ = _first_reaching(jnp.where(columns < num_columns, inside, 0.0), uniforms[:, 1])
    return jnp.minimum(block * blocks.BLOCK + offset, num_columns - 1), total


def _sample(
    inputs: Inputs,
    target: TargetScores,
    draft: DraftDistribution | None,
    noise: Noise,
    num_accepted: Array,
    greedy: Array,
) -> Array:
    """`[B]` int32: a sample of the target's row, of the residual of a rejection, or what a degenerate one gives."""
    rows = _at(inputs.row_index, num_accepted)
    all_kept = num_accepted == inputs.num_draft_tokens
    p = target.probabilities(rows)
    rejected = ~all_kept & _at(inputs.draft_in_vocab, num_accepted, pad=False)
    rejected_id = _at(inputs.draft_token_ids, num_accepted, pad=0)
    columns = lax.broadcasted_iota(jnp.int32, p.shape, 1)
    without_draft = jnp.where(rejected[:, None] & (columns == rejected_id[:, None]), 0.0, p)
    argmax = target.statistics.argmax[rows]
    gumbel, final_uniform = noise.gumbel_noise(num_accepted, p.shape[1]), noise.final_uniform

    def draw(weights: Array) -> tuple[Array, Array]:
        if gumbel is not None:
            score = jnp.where(weights > 0, jnp.log(weights) + gumbel, -jnp.inf)
            token, _ = blocks.argmax_and_max(score)
            total = jnp.sum(blocks.block_sums(weights), axis=1)
        else:
            token, total = inverse_cdf(weights, jnp.asarray(final_uniform))
        return token, jnp.isfinite(total) & (total > 0)

    def draw_without_draft() -> Array:
        token, possible = draw(without_draft)
        return jnp.where(possible, token, argmax)

    if draft is None or inputs.draft_token_ids.shape[1] == 0:
        return draw_without_draft()
    q = draft.probabilities(jnp.minimum(num_accepted, inputs.draft_token_ids.shape[1] - 1), p.shape[1])
    difference = p - q
    # A NaN in q is kept, so that the total tells; what is below the smallest normal number is 0 on every backend.
    residual = jnp.where(difference < kernels.TINY, 0.0, difference)
    token, possible = draw(jnp.where((rejected & ~draft.one_hot)[:, None], residual, without_draft))
    return lax.cond(
        jnp.any(~possible & ~greedy),
        lambda token: jnp.where(possible, token, draw_without_draft()),
        lambda token: token,
        token,
    )


def _first_reaching(weights: Array, uniform: Array) -> tuple[Array, Array]:
    """First index of positive weight whose running sum reaches `uniform * total` (the last such if none), and total."""
    running = jnp.cumsum(weights, axis=1)
    total = running[:, -1]
    positive = weights > 0
    first = blocks.first_true(positive & (running >= (uniform * total)[:, None]))
    index = lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    last = jnp.max(jnp.where(positive, index, 0), axis=1)
    return jnp.where(first < weights.shape[1], first, last), total


def _finite_argmax(target: TargetScores, rows: Array) -> Array:
    logits = mask_columns(blocks.gather_rows(target.logits, rows), target.vocab_size)
    argmax, row_max = blocks.argmax_and_max(jnp.where(jnp.isfinite(logits), logits, -jnp.inf))
    return jnp.where(row_max > -jnp.inf, argmax, 0)


def _at(values: Array, position: Array, pad: int | bool | None = None) -> Array:
    """`values[b, position[b]]`, with one more column of `pad` when given."""
    if pad is not None:
        values = jnp.pad(values, ((0, 0), (0, 1)), constant_values=pad)
    return jnp.take_along_axis(values, position[:, None], axis=1)[:, 0]
