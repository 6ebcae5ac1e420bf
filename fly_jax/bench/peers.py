"""What `fly-jax bench verify` stands beside: other verifiers of the same logits and drafts.

Each is optional, and a benchmark says which were left out and why. None but the torch path has FLy: the others verify
by the standard rule, or do a part of the work.
"""

import dataclasses
import importlib
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fly_jax.bench.timing import caller, compile_ahead
from fly_jax.bench.verify_cases import (
    CONFIG,
    NUM_DRAFT_TOKENS,
    TEMPERATURE,
    WINDOW_SIZE,
    Case,
    CaseData,
    Draft,
    verify_arguments,
)

TORCH = "torch"
"""The name of the peer that the goals are about."""

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another way to do it.

    Attributes:
      name: what tables call it.
      definition: what it does.
      prepare: a call that returns when it is done, for a case and its data; None where it does not apply.
    """

    name: str
    definition: str
    prepare: Callable[[Case, CaseData], Call | None]


def installed_peers(clock: str) -> tuple[tuple[Peer, ...], dict[str, str]]:
    """The peers of which everything is installed, and why each of the others is left out.

    Args:
      clock: what will be counted, "cpu" or "wall".
    """
    if clock == "cpu":
        # Or torch's threads spin between operations, which counts as CPU time: on a busy machine three times as much.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    peers = [Peer("naive JAX", "jax.nn.softmax, lax.top_k and jnp.argmax of all rows: a part of the work", _naive)]
    left_out = {}
    makers: dict[str, Callable[[], list[Peer]]] = {
        TORCH: _torch_peers,
        "transformers": _transformers_peers,
        "tpu-inference": _tpu_inference_peers,
    }
    for name, make in makers.items():
        try:
            peers += make()
        except Exception as error:  # whatever another package raises while it is imported
            left_out[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return tuple(peers), left_out


def _naive(case: Case, data: CaseData) -> Call | None:
    if case.top_p is not None or case.top_k is not None:
        return None

    def gate(arguments: dict[str, jax.Array]) -> Any:
        scale = 1 / TEMPERATURE if case.sampling else 1.0
        logits = arguments["target_logits"].astype(jnp.float32) * scale
        values, _ = lax.top_k(jax.nn.softmax(logits, axis=-1), CONFIG.entropy_top_k)
        outputs = [values, jnp.argmax(logits, axis=-1)]
        if "draft_logits" in arguments:
            outputs.append(jax.nn.softmax(arguments["draft_logits"].astype(jnp.float32) * scale, axis=-1))
        return outputs

    arguments = verify_arguments(case, data)
    return caller(compile_ahead(gate, arguments), arguments)


def _torch_peers() -> list[Peer]:
    torch = importlib.import_module("torch")
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    path = (
        "what vLLM 0.33's V1 sampler does in torch operations: float32 copies, softmax, top 3 and argmax of all rows, "
        "noise and a recovered token for all rows when sampling, a sort for top-p and top-k"
    )

    def by_selection(case: Case, data: CaseData) -> Call | None:
        return _torch_path(torch, case, data, sort=False) if case.top_k and case.top_p is None else None

    return [
        Peer(TORCH, path, lambda case, data: _torch_path(torch, case, data, sort=True)),
        Peer("torch, topk", "the same with torch.topk in place of the sort: vLLM's way on a CPU", by_selection),
    ]


def _torch_path(torch: Any, case: Case, data: CaseData, *, sort: bool) -> Call:
    """vLLM V1's verification with FLy, for requests of K drafts each; the tokens are `[B, K + 1]`, then -1."""
    dtype = getattr(torch, case.dtype)
    logits = torch.from_numpy(data.target_logits).to(dtype).reshape(-1, case.vocab_size)
    rows = torch.arange(len(logits)).reshape(case.num_requests, -1)
    target_rows, bonus_rows = rows[:, :-1].flatten(), rows[:, -1]
    drafts = torch.from_numpy(data.draft_token_ids).long()
    q: Any = None
    if data.draft_logits is not None:
        q = torch.from_numpy(data.draft_logits).to(dtype).reshape(-1, case.vocab_size)
        if case.draft == Draft.PROBS:
            q = torch.softmax(q / TEMPERATURE, -1)

    def greedy() -> Any:
        target, bonus = logits[target_rows].float(), logits[bonus_rows].float()
        argmax = target.argmax(-1).view_as(drafts)
        probs = target.softmax(-1)
        token_probs = probs.gather(1, drafts.view(-1, 1)).view_as(drafts)
        return _torch_emit(torch, drafts, argmax == drafts, token_probs, probs, argmax, bonus.argmax(-1))

    def sampling() -> Any:
        bonus = _torch_process(torch, case, logits[bonus_rows].float(), sort=sort).softmax(-1)
        bonus_token = (bonus / torch.empty_like(bonus).exponential_()).argmax(-1)
        probs = _torch_process(torch, case, logits[target_rows].float(), sort=sort).softmax(-1)
        draft_probs = q.float().div_(TEMPERATURE).softmax(-1) if case.draft == Draft.LOGITS else q
        token_probs = probs.gather(1, drafts.view(-1, 1)).view_as(drafts)
        ratio, by_request = token_probs, probs.view(case.num_requests, NUM_DRAFT_TOKENS, -1)
        noise = torch.empty(case.num_requests, 1, case.vocab_size).exponential_()
        if draft_probs is None:
            race = (by_request / noise).scatter_(2, drafts[..., None], 0.0)
        else:
            ratio = token_probs / draft_probs.gather(1, drafts.view(-1, 1)).view_as(drafts)
            race = (by_request - draft_probs.view_as(by_request)).clamp_(min=0.0).div_(noise)
        accepted = ratio >= torch.rand(drafts.shape, dtype=torch.float64)
        return _torch_emit(torch, drafts, accepted, token_probs, probs, race.argmax(-1), bonus_token)

    def run() -> Any:
        with torch.inference_mode():
            return sampling() if case.sampling else greedy()

    return run


def _torch_process(torch: Any, case: Case, logits: Any, *, sort: bool) -> Any:
    """Temperature, top-k and top-p of float32 rows, in place."""
    logits.div_(TEMPERATURE)
    if case.top_p is None and case.top_k is None:
        return logits
    if not sort:
        return logits.masked_fill_(logits < logits.topk(case.top_k, -1).values[:, -1:], -torch.inf)
    values, index = logits.sort(-1)
    if case.top_k is not None:
        values.masked_fill_(values < values[:, -case.top_k, None], -torch.inf)
    if case.top_p is not None:
        outside = values.softmax(-1).cumsum_(-1) <= 1 - case.top_p
        outside[:, -1] = False
        values.masked_fill_(outside, -torch.inf)
    return logits.scatter_(-1, index, values)


def _torch_emit(
    torch: Any, drafts: Any, accepted: Any, token_probs: Any, probs: Any, recovered: Any, bonus_token: Any
) -> Any:
    """FLy's gate on all rows, the deferrals, and the tokens `[B, K + 1]`."""
    top = probs.topk(CONFIG.entropy_top_k, -1).values
    entropy = -torch.xlogy(top, top).sum(-1).view_as(drafts)
    window = torch.zeros_like(accepted)
    window[:, :-WINDOW_SIZE] = accepted[:, 1:].unfold(1, WINDOW_SIZE, 1).all(-1)
    kept = accepted | (window & (entropy >= CONFIG.entropy_threshold) & (token_probs > 0))
    num_accepted = kept.long().cumprod(1).sum(1, keepdim=True)
    last = torch.cat([recovered, bonus_token[:, None]], 1).gather(1, num_accepted)
    position = torch.arange(drafts.shape[1] + 1)[None]
    tokens = torch.where(position == num_accepted, last, -1)
    return torch.where(position < num_accepted, torch.nn.functional.pad(drafts, (0, 1)), tokens)


def _transformers_peers() -> list[Peer]:
    torch = importlib.import_module("torch")
    speculative_sampling = importlib.import_module("transformers.generation.utils")._speculative_sampling

    def prepare(case: Case, data: CaseData) -> Call | None:
        if case.num_requests > 1 or case.draft != Draft.LOGITS or case.top_p is not None or case.top_k is not None:
            return None
        target, draft = torch.from_numpy(data.target_logits), torch.from_numpy(data.draft_logits)
        ids = torch.from_numpy(data.draft_token_ids).long()

        def run() -> Any:
            with torch.inference_mode():
                return speculative_sampling(ids, draft / TEMPERATURE, ids.shape[1], target / TEMPERATURE)

        return run

    return [Peer("transformers", "_speculative_sampling, standard verification of one request, draft logits", prepare)]


def _tpu_inference_peers() -> list[Peer]:
    module = importlib.import_module("tpu_inference.layers.jax.sample.rejection_sampler")

    def prepare(case: Case, data: CaseData) -> Call | None:
        if case.top_p is not None or case.top_k is not None:
            return None
        arguments = _tpu_inference_arguments(case, data)

        def verify(arguments: dict[str, jax.Array]) -> Any:
            key, bonus_key = jax.random.split(arguments["key"])
            target = arguments["target"].reshape(case.num_requests, -1, case.vocab_size)
            bonus, rows = target[:, -1], target[:, :-1].reshape(-1, case.vocab_size)
            draft_probs = arguments.get("draft")
            if case.sampling:
                bonus_token = jax.random.categorical(bonus_key, bonus.astype(jnp.float32) / TEMPERATURE)
                rows = jax.nn.softmax(rows.astype(jnp.float32) / TEMPERATURE, axis=-1)
            else:
                bonus_token = jnp.argmax(bonus, axis=-1)
            if draft_probs is not None and case.draft == Draft.LOGITS:
                draft_probs = jax.nn.softmax(draft_probs / TEMPERATURE, axis=-1)
            return module.rejection_sample(
                arguments["drafts"], arguments["lengths"], draft_probs, rows, bonus_token, case.sampling, key=key
            )

        return caller(compile_ahead(verify, arguments), arguments)

    return [Peer("tpu-inference", "rejection_sample with its softmax, standard verification", prepare)]


def _tpu_inference_arguments(case: Case, data: CaseData) -> dict[str, jax.Array]:
    ours = verify_arguments(case, data)
    arguments = {
        "target": ours["target_logits"],
        "drafts": ours["draft_token_ids"].reshape(-1),
        "lengths": jnp.full(case.num_requests, NUM_DRAFT_TOKENS, jnp.int32),
        "key": jax.random.key(0),
    }
    for name in ("draft_probs", "draft_logits"):
        if name in ours:
            arguments["draft"] = ours[name].reshape(-1, case.vocab_size)
    return arguments
