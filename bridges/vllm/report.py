"""What `fly-jax crosscheck FILE` shows: a recorded step run again in JAX and in the torch reference, as data."""

import dataclasses
from pathlib import Path

import torch

from fly_jax.bridges.vllm import crosscheck, v1
from fly_jax.bridges.vllm.crosscheck import Mismatch, Recording


@dataclasses.dataclass(frozen=True)
class Position:
    """What decided on one draft token, by the torch reference.

    Attributes:
      draft_token_id: the draft.
      argmax: the target's best token.
      target_probability: of the draft, by the target.
      draft_probability: by the drafter; None where the request is greedy, as the next.
      uniform: what the draw was.
      is_native: whether the token was accepted natively.
      entropy: nats.
      is_deferred: whether FLy kept it.
      margin: how far the nearest decision is from its opposite, in nats.
    """

    draft_token_id: int
    argmax: int
    target_probability: float
    draft_probability: float | None
    uniform: float | None
    is_native: bool
    entropy: float
    is_deferred: bool
    margin: float


@dataclasses.dataclass(frozen=True)
class RequestReport:
    """One request of the step.

    Attributes:
      request: its index.
      samples: whether it samples.
      positions: one for each draft token.
      vllm_token_ids: what vLLM emitted, -1 padded.
      jax_token_ids: what JAX emitted when run again, -1 padded.
      bonus_token_id: vLLM's.
      final_margin: the last token's lead in its race, nats; infinite where there was none.
      mismatch: why the tokens differ, None where they are the same.
    """

    request: int
    samples: bool
    positions: tuple[Position, ...]
    vllm_token_ids: tuple[int, ...]
    jax_token_ids: tuple[int, ...]
    bonus_token_id: int
    final_margin: float
    mismatch: Mismatch | None


@dataclasses.dataclass(frozen=True)
class Report:
    """A step.

    Attributes:
      recording: what was read.
      requests: those that differ, or all.
      num_differing: how many differ.
      is_reproduced: whether JAX, run again, gave the recorded tokens.
    """

    recording: Recording
    requests: tuple[RequestReport, ...]
    num_differing: int
    is_reproduced: bool

    @property
    def has_real_difference(self) -> bool:
        """Whether a mismatch is real. A near-tie may fall the other way where the replay runs on another device."""
        return any(each.mismatch is not None and each.mismatch.kind == "real" for each in self.requests)


def explain(path: Path, *, all_requests: bool = False) -> Report:
    """Why JAX and vLLM differ in a recorded step.

    Args:
      path: a file that the cross-check wrote.
      all_requests: also those whose tokens are the same.

    Raises:
      ValueError: it is not such a file.
      OSError: it cannot be read.
    """
    recording = crosscheck.load(path)
    step, theirs = recording.step, recording.vllm_token_ids
    verification, _ = v1.verify(step)
    ours = v1.emitted(verification, len(step.num_draft_tokens), theirs.shape[1] - 1)
    differing = crosscheck.differing_requests(theirs, ours)
    mismatches = {each.request: each for each in crosscheck.classify(step, theirs, ours, differing)}
    shown = range(len(step.num_draft_tokens)) if all_requests else sorted(mismatches)
    return Report(
        recording,
        tuple(_request(recording, b, ours[b], mismatches.get(b)) for b in shown),
        len(mismatches),
        bool(torch.equal(ours, recording.jax_token_ids)),
    )


def _request(recording: Recording, b: int, ours: torch.Tensor, mismatch: Mismatch | None) -> RequestReport:
    step = crosscheck.single(recording.step, b)
    reference, samples = crosscheck.reference(step), crosscheck.samples(step)
    (num_drafts,) = step.num_draft_tokens
    positions = tuple(
        Position(
            draft_token_id=int(step.draft_token_ids[i]),
            argmax=reference.target_argmax[i],
            target_probability=reference.target_probability[i],
            draft_probability=reference.draft_probability[i] if samples else None,
            uniform=float(step.uniform[i]) if samples and step.uniform is not None else None,
            is_native=reference.natively_accepted[i],
            entropy=reference.entropy[i],
            is_deferred=reference.deferred[i],
            margin=min(reference.acceptance_margin[i], reference.entropy_margin[i]),
        )
        for i in range(num_drafts)
    )
    return RequestReport(
        request=b,
        samples=samples,
        positions=positions,
        vllm_token_ids=tuple(recording.vllm_token_ids[b].tolist()),
        jax_token_ids=tuple(ours.tolist()),
        bonus_token_id=int(step.bonus_token_ids[0]),
        final_margin=reference.final_margin,
        mismatch=mismatch,
    )
