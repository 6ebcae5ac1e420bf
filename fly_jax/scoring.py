"""Stage 1: one read of the logit rows gives what acceptance needs. No probability tensor is ever built."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from fly_jax import kernels, processing
from fly_jax.inputs import Inputs


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["logits", "vocab_size", "statistics", "valid", "divisor", "cutoff", "logsumexp"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class TargetScores:
    """The target's rows, scored.

    Attributes:
      logits: `[N, V]`, unscaled.
      vocab_size: int32 scalar or None.
      statistics: of the unscaled rows.
      valid: `[N]` bool: the row is a distribution, or one a greedy request can take its argmax from (section 6).
      divisor: `[N]` float32; None when every request is greedy, and so the next two.
      cutoff: `[N]` float32 on the scaled logits; None when nothing is masked.
      logsumexp: `[N]` float32 of the processed rows.
    """

    logits: Array
    vocab_size: Array | None
    statistics: kernels.RowStatistics
    valid: Array
    divisor: Array | None = None
    cutoff: Array | None = None
    logsumexp: Array | None = None

    def scaled(self, rows: Array, token_ids: Array) -> Array:
        """Scaled logits of `token_ids` in `rows`, both of one shape and in range; float32."""
        divisor = None if self.divisor is None else self.divisor[rows]
        return kernels.scale(kernels.gather_elements(self.logits, rows, token_ids), divisor)

    def excludes(self, rows: Array, scaled: Array) -> Array:
        """Whether the target excludes a token with this scaled logit: its processed logit is -inf, or NaN."""
        excluded = ~(scaled > -jnp.inf)
        return excluded if self.cutoff is None else excluded | ~(scaled >= self.cutoff[rows])

    def probabilities(self, rows: Array) -> Array:
        """`[R, V]` float32 processed probabilities of `rows` `[R]`; only where something samples."""
        assert self.divisor is not None
        assert self.logsumexp is not None
        logits = kernels.mask_columns(kernels.gather_rows(self.logits, rows), self.vocab_size)
        scaled = kernels.scale(logits, self.divisor[rows])
        p = processing.probability(scaled - self.logsumexp[rows][:, None])
        return p if self.cutoff is None else jnp.where(scaled >= self.cutoff[rows][:, None], p, 0.0)


@dataclasses.dataclass(frozen=True)
class DraftDistribution:
    """q, the distribution each draft token was sampled from, after the draft's own processing.

    Attributes:
      values: `[M, Vd]` probabilities, or logits.
      row_index: `[B, K]` int32.
      one_hot: `[B]` bool: the request's drafts were greedy, so that q is one-hot whatever the array says.
      divisor: `[M]` float32, and `logsumexp` `[M]` float32: only for logits.
    """

    values: Array
    row_index: Array
    one_hot: Array
    vocab_size: Array | None
    divisor: Array | None = None
    logsumexp: Array | None = None

    def token_probability(self, token_ids: Array) -> Array:
        """`[B, K]` float32 q of `token_ids` `[B, K]`, in range; may be NaN."""
        values = kernels.gather_elements(self.values, self.row_index, token_ids)
        if self.divisor is None or self.logsumexp is None:
            return values
        scaled = kernels.scale(values, self.divisor[self.row_index])
        return processing.probability(scaled - self.logsumexp[self.row_index])

    def probabilities(self, position: Array, num_columns: int) -> Array:
        """`[B, num_columns]` float32 q at `position` `[B]` of each request."""
        rows = jnp.take_along_axis(self.row_index, position[:, None], axis=1)[:, 0]
        q = kernels.gather_rows(self.values, rows)
        if self.divisor is not None and self.logsumexp is not None:
            q = processing.probability(kernels.scale(q, self.divisor[rows]) - self.logsumexp[rows][:, None])
        missing = num_columns - q.shape[1]
        q = jnp.pad(q, ((0, 0), (0, missing))) if missing > 0 else q[:, :num_columns]
        if self.vocab_size is None:
            return q
        return jnp.where(jnp.arange(num_columns, dtype=jnp.int32)[None] < self.vocab_size, q, 0.0)


def score_target(inputs: Inputs) -> TargetScores:
    """Scores every row of the target once; rows that take no part are scored as greedy ones."""
    params = inputs.params
    if params.temperature is not None:
        num_requests = inputs.row_index.shape[0]
        request = jnp.arange(num_requests, dtype=jnp.int32)[:, None]
        owner = _per_row(request, inputs.row_index, inputs.live, num_requests, inputs.logits.shape[0])
        params = jax.tree.map(lambda values: values[jnp.minimum(owner, num_requests - 1)], params)
        params = dataclasses.replace(params, temperature=jnp.where(owner < num_requests, params.temperature, 0.0))
    return score_rows(inputs.logits, params, vocab_size=inputs.vocab_size)


@jax.jit
def score_rows(logits: Array, params: processing.SamplingParams, *, vocab_size: Array | None = None) -> TargetScores:
    """Scores `[N, V]` logits under parameters of `[N]` rows; the logsumexp only when something may sample."""
    statistics = kernels.row_statistics(logits, vocab_size=vocab_size)
    valid = ~statistics.has_nan & (statistics.max > -jnp.inf)
    if params.temperature is None:
        return TargetScores(logits, vocab_size, statistics, valid)
    divisor = processing.divisor(params.temperature)
    usable = valid & jnp.isfinite(kernels.scale(statistics.max, divisor))
    row_max = jnp.where(usable, statistics.max, 0.0)
    cutoff = processing.cutoffs(logits, kernels.scale(row_max, divisor), divisor, params, vocab_size=vocab_size)
    logsumexp = kernels.row_logsumexp(logits, row_max, divisor=divisor, cutoff=cutoff, vocab_size=vocab_size)
    valid = jnp.where(processing.is_greedy(params.temperature), valid, usable)
    return TargetScores(logits, vocab_size, statistics, valid, divisor, cutoff, logsumexp)


def score_draft(inputs: Inputs) -> DraftDistribution | None:
    """Scores the rows of the draft distribution; None when the drafts are one-hot for every request."""
    if inputs.draft is None:
        return None
    draft = inputs.draft
    if not draft.is_logits:
        one_hot = jnp.zeros_like(inputs.greedy)
        return DraftDistribution(draft.values, draft.row_index, one_hot, inputs.vocab_size)
    assert inputs.draft_temperature is not None
    temperature = processing.divisor(inputs.draft_temperature)[:, None]
    position = jnp.arange(draft.row_index.shape[1], dtype=jnp.int32)[None]
    drafted = position < inputs.num_draft_tokens[:, None]
    divisor = _per_row(temperature, draft.row_index, drafted, 1.0, draft.values.shape[0])
    row_max = kernels.row_statistics(draft.values, vocab_size=inputs.vocab_size).max
    row_max = jnp.where(jnp.isfinite(kernels.scale(row_max, divisor)), row_max, 0.0)
    logsumexp = kernels.row_logsumexp(draft.values, row_max, divisor=divisor, vocab_size=inputs.vocab_size)
    one_hot = processing.is_greedy(inputs.draft_temperature)
    return DraftDistribution(draft.values, draft.row_index, one_hot, inputs.vocab_size, divisor, logsumexp)


def _per_row(values: Array, rows: Array, live: Array, fill: float, num_rows: int) -> Array:
    """`[N]`: `values` `[B, 1]` at the live `rows` `[B, T]`, `fill` elsewhere."""
    return (
        jnp.full((num_rows,), fill, values.dtype)
        .at[jnp.where(live, rows, num_rows)]
        .set(jnp.broadcast_to(values, rows.shape), mode="drop")
    )
