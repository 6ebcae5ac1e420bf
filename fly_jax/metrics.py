"""Acceptance counters: pytrees that add up over steps, with defined denominators."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fly_jax.verify import Verification


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AcceptanceCounts:
    """Counts over any number of verifications of the same K; `a + b` adds them up. All are int32.

    Every rate is 0 where its denominator is 0, so a run without drafts or rejections divides safely.

    Attributes:
      num_requests: verified requests (request-steps), with or without drafts.
      num_drafts: those with at least one draft token; what vLLM calls drafts.
      num_tokens: emitted tokens, the one after the accepted prefix included.
      drafted_per_position: `[K]` draft tokens proposed.
      accepted_per_position: `[K]` draft tokens kept, deferred ones included.
      deferred_per_position: `[K]` draft tokens kept by a deferral.
      num_stops: requests whose draft was rejected for good somewhere.
      num_invalid: requests whose last token came from a row that is not a distribution.
    """

    num_requests: Array
    num_drafts: Array
    num_tokens: Array
    drafted_per_position: Array
    accepted_per_position: Array
    deferred_per_position: Array
    num_stops: Array
    num_invalid: Array

    @classmethod
    def zeros(cls, num_positions: int) -> "AcceptanceCounts":
        """No verification yet, for `K = num_positions`."""
        zero, per_position = jnp.int32(0), jnp.zeros((num_positions,), jnp.int32)
        return cls(zero, zero, zero, per_position, per_position, per_position, zero, zero)

    @classmethod
    def from_verification(
        cls, verification: Verification, num_draft_tokens: ArrayLike | None = None
    ) -> "AcceptanceCounts":
        """Counts one verification; no host synchronisation.

        Args:
          verification: of `B` requests and `K` positions.
          num_draft_tokens: `[B]` int32 as given to `fly_verify`; None is K. A padding request is counted as one
            without drafts: slice the verification to the real ones first.
        """
        num_requests, num_positions = verification.deferred.shape
        if num_draft_tokens is None:
            num_draft_tokens = jnp.full((num_requests,), num_positions, jnp.int32)
        lengths = jnp.clip(jnp.asarray(num_draft_tokens), 0, num_positions).astype(jnp.int32)
        position = jnp.arange(num_positions, dtype=jnp.int32)[None]
        count = functools.partial(jnp.sum, axis=0, dtype=jnp.int32)
        return cls(
            num_requests=jnp.int32(num_requests),
            num_drafts=count(lengths > 0),
            num_tokens=count(verification.num_tokens),
            drafted_per_position=count(position < lengths[:, None]),
            accepted_per_position=count(position < verification.num_accepted[:, None]),
            deferred_per_position=count(verification.deferred),
            num_stops=count(verification.num_accepted < lengths),
            num_invalid=count(verification.invalid),
        )

    def __add__(self, other: "AcceptanceCounts") -> "AcceptanceCounts":
        """The counts of both.

        Raises:
          ValueError: they are not of the same K.
        """
        if self.drafted_per_position.shape != other.drafted_per_position.shape:
            ours, theirs = len(self.drafted_per_position), len(other.drafted_per_position)
            raise ValueError(f"counts must be of the same K to add up, got {ours} and {theirs}")
        return jax.tree.map(jnp.add, self, other)

    @property
    def num_draft_tokens(self) -> Array:
        """Draft tokens proposed."""
        return jnp.sum(self.drafted_per_position, dtype=jnp.int32)

    @property
    def num_accepted(self) -> Array:
        """Draft tokens kept, deferred ones included."""
        return jnp.sum(self.accepted_per_position, dtype=jnp.int32)

    @property
    def num_deferred(self) -> Array:
        """Draft tokens kept by a deferral."""
        return jnp.sum(self.deferred_per_position, dtype=jnp.int32)

    def mean_acceptance_length(self) -> Array:
        """`1 + accepted / drafts`, as vLLM counts: kept draft tokens per draft, and the token after them; 1 without."""
        return 1.0 + _ratio(self.num_accepted, self.num_drafts)

    def tokens_per_request(self) -> Array:
        """Emitted tokens per verified request-step, those without drafts included."""
        return _ratio(self.num_tokens, self.num_requests)

    def acceptance_rate(self) -> Array:
        """Kept draft tokens over proposed ones."""
        return _ratio(self.num_accepted, self.num_draft_tokens)

    def acceptance_rate_per_position(self) -> Array:
        """`[K]`: the share of drafts in which the token at a position was kept, as vLLM counts."""
        return _ratio(self.accepted_per_position, self.num_drafts)

    def deferral_rate(self) -> Array:
        """Deferrals over native rejections that mattered: the deferred ones and those that stopped a request."""
        return _ratio(self.num_deferred, self.num_deferred + self.num_stops)

    def deferral_rate_per_position(self) -> Array:
        """`[K]`: the share of drafts in which the token at a position was deferred."""
        return _ratio(self.deferred_per_position, self.num_drafts)

    def deferrals_per_draft(self) -> Array:
        """Deferrals per request-step with drafts."""
        return _ratio(self.num_deferred, self.num_drafts)


def _ratio(numerator: Array, denominator: Array) -> Array:
    return numerator.astype(jnp.float32) / jnp.maximum(denominator, 1).astype(jnp.float32)
