"""`fly-jax bench bridge`: what a call from vLLM costs over the JAX function it ends in."""

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch

from fly_jax.bench import timing
from fly_jax.bench.ratios import Ratio
from fly_jax.bridges.vllm import v1
from fly_jax.config import FlyConfig

GOAL = 1.5
VOCAB_SIZE = 49152
_CONFIG = FlyConfig(6)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: the number of drafts of each request, and how they are verified."""

    name: str
    num_draft_tokens: tuple[int, ...]
    temperature: float = 0.0
    has_draft_probs: bool = False
    has_goal: bool = True


_FULL = (8,) * 8
SHAPE = f"{len(_FULL)} requests, {_FULL[0]} drafts each, V = {VOCAB_SIZE}, wall time"
"""Of the cases, for people."""

CASES = (
    Case("greedy", _FULL),
    Case("target-only", _FULL, temperature=0.8),
    Case("p/q", _FULL, temperature=0.8, has_draft_probs=True),
    # 61 rows become 64: one copy of the logits.
    Case("greedy, 61 rows", (5, *_FULL[1:]), has_goal=False),
    Case("target-only, 61 rows", (5, *_FULL[1:]), temperature=0.8, has_goal=False),
)

DEFINITIONS = {
    "crossing": "tensors crossed, the function, tokens back as a tensor / the function alone, its arrays ready in JAX",
    "call": "the whole rejection_sample, vLLM's noise drawn by torch too / the function alone",
}
"""What each ratio divides by what."""


def measure(
    cases: Sequence[Case],
    *,
    rounds: int,
    progress: Callable[[str, float], None],
    vocab_size: int = VOCAB_SIZE,
    min_seconds: float = timing.MIN_SAMPLE_SECONDS,
) -> list[Ratio]:
    """Two ratios for each case, of wall time, since a call waits for its tokens.

    Args:
      cases: the steps.
      rounds: interleaved rounds.
      progress: called with what is being done and the fraction done.
      vocab_size: V.
      min_seconds: wall time of a sample.
    """
    ratios = []
    for i, case in enumerate(cases):

        def report(fraction: float, case: Case = case, i: int = i) -> None:
            progress(f"measure {case.name}", (i + fraction) / len(cases))

        seconds = timing.interleave(
            _calls(case, vocab_size),
            rounds=rounds,
            clock=timing.CLOCKS["wall"],
            min_seconds=min_seconds,
            progress=report,
        )
        for name, definition in DEFINITIONS.items():
            values = tuple(a / b for a, b in zip(seconds[name], seconds["function"], strict=True))
            goal = GOAL if case.has_goal and name == "crossing" else None
            ratios.append(Ratio(f"{case.name}: {name}", definition, goal, True, values))
    return ratios


def _calls(case: Case, vocab_size: int) -> dict[str, Callable[[], Any]]:
    lengths = list(case.num_draft_tokens)
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn((sum(lengths), vocab_size), generator=generator)
    draft_token_ids = logits.argmax(dim=1).to(torch.int32)
    draft_probs = logits.softmax(dim=1) if case.has_draft_probs else None
    bonus_token_ids = torch.zeros((len(lengths), 1), dtype=torch.int32)
    temperature = torch.full((len(lengths),), case.temperature)
    metadata = types.SimpleNamespace(all_greedy=case.temperature == 0, temperature=temperature, generators={})
    step = v1.draw_step(draft_token_ids, lengths, draft_probs, logits, bonus_token_ids, metadata, config=_CONFIG)
    arguments, positions = v1.crossed(step), v1.num_positions(step)
    function = v1.program(logits.device)

    def crossing() -> Any:
        return v1.emitted(v1.verify(step)[0], len(lengths), max(lengths))

    def call() -> Any:
        return v1.rejection_sample(
            draft_token_ids,
            lengths,
            max(lengths),
            torch.tensor(lengths).cumsum(0),
            draft_probs,
            logits,
            bonus_token_ids,
            metadata,
            fly_window_size=_CONFIG.window_size,
            fly_entropy_threshold=float(np.asarray(_CONFIG.entropy_threshold)),
            fly_entropy_top_k=_CONFIG.entropy_top_k,
        )

    return {
        "function": lambda: jax.block_until_ready(function(*arguments, num_positions=positions)),
        "crossing": crossing,
        "call": call,
    }
