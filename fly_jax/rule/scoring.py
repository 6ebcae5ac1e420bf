"""What the sections of the rule need of a row, from one read of it. No probability tensor is ever built."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from fly_jax import kernels
from fly_jax.kernels.blocks import gather_elements, gather_rows
from fly_jax.kernels.xla import mask_columns
from fly_jax.rule import thresholds
from fly_jax.rule.edge import Inputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Softmax:
    """What turns logits of `N` rows into probabilities.

    Attributes:
      row_max: `[N]` float32; 0 where a row has no finite maximum.
      scale: `[N]` float32, one over the temperature; None is 1.
      log_mass: `[N]` float32, the log of the mass relative to the maximum; NaN or infinite in a row that is no
        distribution.
    """

    row_max: Array
    scale: Array | None
    log_mass: Array

    def log_probability(self, rows: Array, logits: Array) -> Array:
        """Log-probabilities of float32 `logits` of `rows`: of the same shape, or with one more axis."""

        def of_rows(values: Array) -> Array:
            return values[rows].reshape(rows.shape + (1,) * (logits.ndim - rows.ndim))

        difference = logits - of_rows(self.row_max)
        scaled = difference if self.scale is None else difference * of_rows(self.scale)
        return scaled - of_rows(self.log_mass)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetScores:
    """The target's rows, scored.

    Attributes:
      logits: `[N, V]`, as given.
      vocab_size: int32 scalar or None.
      statistics: of the processed rows.
      valid: `[N]` bool: the row is a distribution, or one a greedy request can take its argmax from.
      softmax: of the processed rows.
      entropy_top_k: what the entropy is taken over.
      threshold: `[N]` float32, the smallest logit the masks keep; None when nothing is masked.
    """

    logits: Array
    vocab_size: Array | None
    statistics: kernels.RowStatistics
    valid: Array
    softmax: Softmax
    entropy_top_k: int = dataclasses.field(metadata={"static": True})
    threshold: Array | None = None

    def entropies(self, rows: Array, wanted: Array) -> Array:
        """The entropy of `rows`, in range, where `wanted` (one shape), NaN elsewhere."""
        entropy = kernels.entropies_at(
            self.statistics,
            self.logits,
            rows.reshape(-1),
            wanted.reshape(-1),
            scale=self.softmax.scale,
            threshold=self.threshold,
            vocab_size=self.vocab_size,
            k=self.entropy_top_k,
        )
        return entropy.reshape(rows.shape)

    def token_logits(self, rows: Array, token_ids: Array) -> Array:
        """Float32 logits of `token_ids` in `rows`, both of one shape and in range."""
        return gather_elements(self.logits, rows, token_ids)

    def excludes(self, rows: Array, token_ids: Array) -> Array:
        """Whether the processed logit of a token is -inf: given so, masked, or by overflow."""
        logits = self.token_logits(rows, token_ids)
        processed = logits if self.softmax.scale is None else logits * self.softmax.scale[rows]
        excluded = ~(processed > -jnp.inf)
        return excluded if self.threshold is None else excluded | (logits < self.threshold[rows])

    def token_log_probability(self, rows: Array, token_ids: Array) -> Array:
        """Processed log-probability of `token_ids` in `rows`, in nats; -inf where the target excludes the token."""
        log_probability = self.softmax.log_probability(rows, self.token_logits(rows, token_ids))
        return jnp.where(self.excludes(rows, token_ids), -jnp.inf, log_probability)

    def probabilities(self, rows: Array) -> Array:
        """`[R, V]` float32 processed probabilities of `rows` `[R]`."""
        logits = mask_columns(gather_rows(self.logits, rows), self.vocab_size)
        log_probability = self.softmax.log_probability(rows, logits)
        if self.threshold is not None:
            log_probability = jnp.where(logits < self.threshold[rows][:, None], -jnp.inf, log_probability)
        return kernels.probability(log_probability)


@dataclasses.dataclass(frozen=True)
class DraftDistribution:
    """q, the distribution each draft token was sampled from, after the draft's own processing.

    Attributes:
      values: `[M, Vd]` probabilities, or logits.
      row_index: `[B, K]` int32.
      one_hot: `[B]` bool: the request's drafts were greedy, so that q is one-hot whatever the array says.
      vocab_size: int32 scalar or None.
      softmax: of the draft's rows, for logits; None for probabilities.
    """

    values: Array
    row_index: Array
    one_hot: Array
    vocab_size: Array | None
    softmax: Softmax | None = None

    def token_probability(self, token_ids: Array) -> Array:
        """`[B, K]` float32 q of `token_ids` `[B, K]`, in range; may be NaN."""
        values = gather_elements(self.values, self.row_index, token_ids)
        return self._processed(self.row_index, values)

    def probabilities(self, position: Array, num_columns: int) -> Array:
        """`[B, num_columns]` float32 q at `position` `[B]` of each request."""
        rows = jnp.take_along_axis(self.row_index, position[:, None], axis=1)[:, 0]
        q = self._processed(rows, gather_rows(self.values, rows))
        missing = num_columns - q.shape[1]
        q = jnp.pad(q, ((0, 0), (0, missing))) if missing > 0 else q[:, :num_columns]
        if self.vocab_size is None:
            return q
        return jnp.where(jnp.arange(num_columns, dtype=jnp.int32)[None] < self.vocab_size, q, 0.0)

    def _processed(self, rows: Array, values: Array) -> Array:
        if self.softmax is None:
            return values
        return kernels.probability(self.softmax.log_probability(rows, values))


def score_target(inputs: Inputs, entropy_top_k: int) -> TargetScores:
    """Scores every row of the target once; rows that take no part are scored as greedy ones."""
    params = None
    if inputs.sampling is not None:
        num_requests = inputs.row_index.shape[0]
        request = jnp.arange(num_requests, dtype=jnp.int32)[:, None]
        owner = _per_row(request, inputs.row_index, inputs.live, num_requests, inputs.logits.shape[0])
        params = jax.tree.map(lambda values: values[jnp.minimum(owner, num_requests - 1)], inputs.sampling.params)
        params = dataclasses.replace(params, temperature=jnp.where(owner < num_requests, params.temperature, 0.0))
    return score_rows(inputs.logits, params, vocab_size=inputs.vocab_size, entropy_top_k=entropy_top_k)


def score_rows(
    logits: Array,
    params: thresholds.RowParams | None,
    *,
    vocab_size: Array | None = None,
    entropy_top_k: int = 1,
    implementation: str | None = None,
) -> TargetScores:
    """Scores `[N, V]` logits under parameters of `[N]` rows; None: all are greedy, scored as they are."""
    read = functools.partial(
        kernels.row_statistics, logits, vocab_size=vocab_size, k=entropy_top_k, implementation=implementation
    )
    if params is None:
        statistics = read()
        valid = ~statistics.has_nan & (statistics.max > -jnp.inf)
        softmax = Softmax(statistics.shift, None, statistics.log_mass)
        return TargetScores(logits, vocab_size, statistics, valid, softmax, entropy_top_k)
    divisor = thresholds.divisor(params.temperature)
    scale = thresholds.scale(divisor)
    statistics = read(scale=scale)
    threshold = thresholds.thresholds(logits, statistics.shift, divisor, params, vocab_size=vocab_size)
    if threshold is not None:
        statistics = read(scale=scale, threshold=threshold)
    # The mass is NaN just where the row holds one; looking for NaN apart would be one more pass on CPU.
    valid = ~jnp.isnan(statistics.log_mass) & (statistics.max > -jnp.inf)
    usable = jnp.isfinite(thresholds.divide(statistics.max, divisor))
    valid &= thresholds.is_greedy(params.temperature) | usable
    softmax = Softmax(statistics.shift, scale, statistics.log_mass)
    return TargetScores(logits, vocab_size, statistics, valid, softmax, entropy_top_k, threshold)


def score_draft(inputs: Inputs) -> DraftDistribution | None:
    """Scores the rows of the draft distribution; None when the drafts are one-hot for every request."""
    if inputs.sampling is None or inputs.sampling.draft is None:
        return None
    draft = inputs.sampling.draft
    if draft.temperature is None:
        one_hot = jnp.zeros(draft.row_index.shape[:1], bool)
        return DraftDistribution(draft.values, draft.row_index, one_hot, inputs.vocab_size)
    temperature = thresholds.divisor(draft.temperature)[:, None]
    position = jnp.arange(draft.row_index.shape[1], dtype=jnp.int32)[None]
    drafted = position < inputs.num_draft_tokens[:, None]
    divisor = _per_row(temperature, draft.row_index, drafted, 1.0, draft.values.shape[0])
    scale = thresholds.scale(divisor)
    statistics = kernels.row_statistics(draft.values, scale=scale, vocab_size=inputs.vocab_size, k=1)
    softmax = Softmax(statistics.shift, scale, statistics.log_mass)
    one_hot = thresholds.is_greedy(draft.temperature)
    return DraftDistribution(draft.values, draft.row_index, one_hot, inputs.vocab_size, softmax)


def _per_row(values: Array, rows: Array, live: Array, fill: float, num_rows: int) -> Array:
    """`[N]`: `values` `[B, 1]` at the live `rows` `[B, T]`, `fill` elsewhere."""
    return (
        jnp.full((num_rows,), fill, values.dtype)
        .at[jnp.where(live, rows, num_rows)]
        .set(jnp.broadcast_to(values, rows.shape), mode="drop")
    )
