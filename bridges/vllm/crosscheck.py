"""vLLM's tokens beside JAX's: which requests differ, why, and a file from which a step can be run again.

Both decide on the same float32 numbers and the same noise, but sum and divide in another order: where a decision is
within rounding of its opposite, either is right. The margins come from `fly_jax.bridges.torch_reference`.
"""

import dataclasses
import json
import os
import time
import zipfile
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fly_jax.bridges import torch_reference
from fly_jax.bridges.torch_reference import RequestVerification
from fly_jax.bridges.vllm.v1 import Step
from fly_jax.config import FlyConfig
from fly_jax.files import write_whole
from fly_jax.versions import installed_versions

MARGIN = 1e-4
"""Below it a decision may fall either way: in nats of log-probability for acceptance and the final race, nats of H."""

_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A request whose tokens differ.

    Attributes:
      request: its index in the step.
      kind: "near_tie", "documented" (the rule differs from vLLM there, on purpose) or "real".
      reason: what the kind rests on, in words.
      reference_agrees_with: "jax", "vllm", or "neither".
    """

    request: int
    kind: str
    reason: str
    reference_agrees_with: str


@dataclasses.dataclass(frozen=True)
class Recording:
    """A recorded step: what was given, what both emitted (`[B, K + 1]`, -1 padded), and how it was classed."""

    step: Step
    vllm_token_ids: torch.Tensor
    jax_token_ids: torch.Tensor
    mismatches: list[Mismatch]
    about: dict[str, Any]


def differing_requests(theirs: torch.Tensor, ours: torch.Tensor) -> list[int]:
    """The indices of the requests whose rows, `[B, K + 1]` both, are not the same."""
    return torch.nonzero((theirs != ours).any(dim=1)).flatten().tolist()


def classify(step: Step, theirs: torch.Tensor, ours: torch.Tensor, differing: list[int]) -> list[Mismatch]:
    """Says of each differing request why it differs."""
    return [_classify(single(step, b), b, theirs[b], ours[b]) for b in differing]


def single(step: Step, b: int) -> Step:
    """The step that has only request `b` of a step."""
    start = sum(step.num_draft_tokens[:b])
    rows, request = slice(start, start + step.num_draft_tokens[b]), slice(b, b + 1)

    def cut(tensor: torch.Tensor | None, part: slice) -> torch.Tensor | None:
        return None if tensor is None else tensor[part]

    return Step(
        draft_token_ids=step.draft_token_ids[rows],
        num_draft_tokens=step.num_draft_tokens[request],
        target_logits=step.target_logits[rows],
        draft_probs=cut(step.draft_probs, rows),
        bonus_token_ids=step.bonus_token_ids[request],
        sampling=cut(step.sampling, request),
        uniform=cut(step.uniform, rows),
        exponential=cut(step.exponential, request),
        config=step.config,
    )


def samples(request: Step) -> bool:
    """Whether the request of a step of one request samples."""
    return request.sampling is not None and bool(request.sampling[0])


def reference(request: Step) -> RequestVerification:
    """What the torch reference makes of a step of one request."""
    (verification,) = torch_reference.verify_rows(
        request.target_logits,
        request.draft_token_ids,
        request.num_draft_tokens,
        bonus_token_ids=request.bonus_token_ids,
        config=request.config,
        temperature=None if request.sampling is None else request.sampling.to(torch.float32),
        draft_probs=None if request.sampling is None else request.draft_probs,
        uniform=request.uniform,
        gumbel=None if request.exponential is None else -torch.log(request.exponential),
    )
    return verification


def _classify(request: Step, b: int, theirs: torch.Tensor, ours: torch.Tensor) -> Mismatch:
    verification = reference(request)
    sides = {tuple(_tokens(ours)): "jax", tuple(_tokens(theirs)): "vllm"}
    agrees = sides.get(tuple(verification.token_ids), "neither")
    # What lies past the first difference and the window behind it cannot be why.
    first = int(torch.nonzero(theirs != ours)[0])
    last = first + (0 if request.config is None else request.config.window_size or 0)
    reason = documented_difference(request, verification, last) if agrees == "jax" else None
    if reason is not None:
        return Mismatch(b, "documented", reason, agrees)
    reason = near_tie(request, verification, first, last) if agrees != "neither" else None
    if reason is not None:
        return Mismatch(b, "near_tie", reason, agrees)
    return Mismatch(b, "real", "no decision is within rounding of its opposite", agrees)


def documented_difference(request: Step, verification: RequestVerification, last: int) -> str | None:
    """Where the rule differs from vLLM V1 on purpose (README: Where results differ), up to position `last`, or None."""
    drafts, logits = request.draft_token_ids[: last + 1], request.target_logits[: last + 1]
    if bool((drafts >= logits.shape[1]).any()):
        return "a draft id is outside the vocabulary: vLLM reads another row, here it is rejected"
    if bool(logits.isnan().any()) or bool((logits == -torch.inf).all(dim=1).any()):
        return "a row is not a distribution (NaN, or nothing above -inf): here it stops the request"
    if not samples(request):
        return None
    if bool((logits == torch.inf).any()):
        return "a row is not a distribution (+inf): here it stops the request"
    if request.draft_probs is not None and bool((drafts < 0).any()):
        return "a placeholder with draft probabilities: vLLM samples max(p - q, 0), here p"
    if request.uniform is not None and bool((request.uniform[: last + 1] == 0).any()):
        return "a uniform of exactly 0: vLLM accepts probability 0 there, here it is rejected"
    deferred = zip(verification.deferred[: last + 1], verification.target_probability, strict=False)
    if any(is_deferred and p == 0 for is_deferred, p in deferred):
        return "a probability that underflows to 0 is not deferrable in vLLM V1, here it is"
    return None


def near_tie(request: Step, verification: RequestVerification, first: int, last: int) -> str | None:
    """The closest decision that tokens first differing at `first` can come from, when it is within `MARGIN`, or None.

    A greedy acceptance compares indices of the same numbers, so that only an exact tie can fall either way.
    """
    least = MARGIN if samples(request) else 0.0
    acceptance = enumerate(verification.acceptance_margin[: last + 1])
    candidates = [(margin, f"acceptance at position {i}") for i, margin in acceptance if margin <= least]
    gate = zip(verification.entropy_margin[: first + 1], verification.natively_accepted, strict=False)
    candidates += [
        (margin, f"entropy gate at position {i}")
        for i, (margin, accepted) in enumerate(gate)
        if margin < MARGIN and not accepted
    ]
    if verification.final_margin < MARGIN and verification.num_accepted == first:
        candidates.append((verification.final_margin, "race for the last token"))
    if not candidates:
        return None
    margin, where = min(candidates)
    return f"{where}: {margin:.1e} from its opposite"


def summary(mismatches: list[Mismatch]) -> str:
    """How many requests of a step differ, by kind, in words."""
    kinds = Counter(each.kind for each in mismatches)
    counts = ", ".join(f"{count} {kind.replace('_', '-')}" for kind, count in sorted(kinds.items()))
    return f"JAX and vLLM emitted different tokens for {len(mismatches)} request(s) of a step ({counts})"


def save(folder: Path, step: Step, theirs: torch.Tensor, ours: torch.Tensor, mismatches: list[Mismatch]) -> Path:
    """Writes a step whole, or not at all, as an `.npz` without pickles; returns its path."""
    num_requests = len(step.num_draft_tokens)
    tensors = {
        "draft_token_ids": step.draft_token_ids,
        "target_logits": step.target_logits,
        "draft_probs": step.draft_probs,
        "bonus_token_ids": step.bonus_token_ids,
        "sampling": step.sampling,
        "uniform": step.uniform,
        "exponential": None if step.exponential is None else step.exponential[:num_requests],
        "vllm_token_ids": theirs,
        "jax_token_ids": ours,
    }
    about = {
        "format": _FORMAT,
        "config": None if step.config is None else step.config.to_dict(),
        "mismatches": [dataclasses.asdict(each) for each in mismatches],
        "device": str(step.target_logits.device),
        "versions": installed_versions(),
    }
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items() if tensor is not None}
    arrays["num_draft_tokens"] = np.asarray(step.num_draft_tokens, np.int64)
    arrays["about"] = np.asarray(json.dumps(about))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"mismatch-{os.getpid()}-{time.time_ns()}.npz"
    # Not compressed: the engine waits for it.
    write_whole(path, lambda file: np.savez(file, allow_pickle=False, **arrays))
    return path


def load(path: Path) -> Recording:
    """Reads what `save` wrote.

    Raises:
      ValueError: it is not such a file, or of another format.
      OSError: it cannot be read.
    """
    try:
        # NumPy leaves a damaged file open that it opened itself.
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(str(arrays["about"]))
        if about["format"] != _FORMAT:
            raise ValueError(f"its format is {about['format']}, this version reads {_FORMAT}")
        tensors = {name: torch.from_numpy(each) for name, each in arrays.items() if name != "about"}
        config = about["config"]
        step = Step(
            draft_token_ids=tensors["draft_token_ids"],
            num_draft_tokens=tensors["num_draft_tokens"].tolist(),
            target_logits=tensors["target_logits"],
            bonus_token_ids=tensors["bonus_token_ids"],
            config=None if config is None else FlyConfig(**config),
            **{name: tensors.get(name) for name in ("draft_probs", "sampling", "uniform", "exponential")},
        )
        _check_shapes(step, tensors["vllm_token_ids"], tensors["jax_token_ids"])
        return Recording(
            step,
            tensors["vllm_token_ids"],
            tensors["jax_token_ids"],
            [Mismatch(**each) for each in about["mismatches"]],
            {name: about[name] for name in ("device", "versions")},
        )
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a step recorded by fly_jax's cross-check: {error}") from error


def _check_shapes(step: Step, *outputs: torch.Tensor) -> None:
    num_requests, num_drafts = len(step.num_draft_tokens), sum(step.num_draft_tokens)
    if step.target_logits.ndim != 2:
        raise ValueError(f"target_logits must be [N, V], got {list(step.target_logits.shape)}")
    rows = (step.draft_token_ids, step.target_logits, step.draft_probs, step.uniform)
    requests = (step.bonus_token_ids, step.sampling, step.exponential, *outputs)
    if any(each is not None and len(each) != num_drafts for each in rows) or any(
        each is not None and len(each) != num_requests for each in requests
    ):
        raise ValueError(f"its arrays are not of {num_requests} requests with {num_drafts} drafts")
    width = max(step.num_draft_tokens, default=0) + 1
    if any(each.shape != (num_requests, width) for each in outputs):
        raise ValueError(f"its tokens are not [B, K + 1] = [{num_requests}, {width}]")


def _tokens(row: torch.Tensor) -> list[int]:
    return [token for token in row.tolist() if token >= 0]
