"""A step that the cross-check recorded, run again in JAX and in the torch reference: what differs, as plain data."""

import dataclasses
from pathlib import Path

import torch

from fly_jax.bridges.torch_reference import RequestVerification
from fly_jax.bridges.vllm import crosscheck, v1
from fly_jax.bridges.vllm.crosscheck import Mismatch, Recording


@dataclasses.dataclass(frozen=True)
class RequestExplanation:
    """One request of a recorded step.

    Attributes:
      step: the step of this request alone.
      reference: what the torch reference makes of it.
      vllm_token_ids: what vLLM emitted when the step was recorded.
      jax_token_ids: what the replay in JAX emits.
      mismatch: why the two differ; None where they are the same.
    """

    step: v1.Step
    reference: RequestVerification
    vllm_token_ids: list[int]
    jax_token_ids: list[int]
    mismatch: Mismatch | None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why JAX and vLLM differ in a recorded step.

    Attributes:
      recording: what the file holds.
      requests: every request of the step, in order.
      is_reproduced: whether the replay in JAX gives the tokens that JAX gave when the step was recorded.
    """

    recording: Recording
    requests: list[RequestExplanation]
    is_reproduced: bool

    @property
    def has_real_mismatch(self) -> bool:
        """Whether rounding and the documented differences do not explain all of it.

        A near-tie may fall the other way where the replay runs on another device.
        """
        return any(each.mismatch is not None and each.mismatch.kind == "real" for each in self.requests)


def explain(path: Path) -> Explanation:
    """Runs a recorded step again.

    Args:
      path: a file that the cross-check wrote.

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
    requests = []
    for b in range(len(step.num_draft_tokens)):
        single = crosscheck.single(step, b)
        requests.append(
            RequestExplanation(
                single,
                crosscheck.reference(single),
                crosscheck.emitted_tokens(theirs[b]),
                crosscheck.emitted_tokens(ours[b]),
                mismatches.get(b),
            )
        )
    return Explanation(recording, requests, is_reproduced=bool(torch.equal(ours, recording.jax_token_ids)))
