"""`fly-jax crosscheck FILE`: a recorded step run again in JAX and in the torch reference, position by position."""

import math
from pathlib import Path

import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from fly_jax.bridges.vllm import crosscheck, v1
from fly_jax.bridges.vllm.crosscheck import MARGIN, Recording


def explain(path: Path, console: Console, *, all_requests: bool = False) -> bool:
    """Prints why JAX and vLLM differ in a recorded step.

    Args:
      path: a file that the cross-check wrote.
      console: to print on.
      all_requests: also those whose tokens are the same.

    Returns:
      Whether no mismatch is real. A near-tie may fall the other way where the replay runs on another device.
    """
    recording = crosscheck.load(path)
    step, theirs = recording.step, recording.vllm_token_ids
    verification, _ = v1.verify(step)
    ours = v1.emitted(verification, len(step.num_draft_tokens), theirs.shape[1] - 1)
    differing = crosscheck.differing_requests(theirs, ours)
    mismatches = {each.request: each for each in crosscheck.classify(step, theirs, ours, differing)}
    console.print(_head(recording))
    for b in range(len(step.num_draft_tokens)) if all_requests else sorted(mismatches):
        console.print(_request(recording, b, ours[b]))
        if b in mismatches:
            mismatch = mismatches[b]
            console.print(
                f"[bold]{mismatch.kind.replace('_', '-')}[/]: {mismatch.reason}; the torch reference agrees with "
                f"{mismatch.reference_agrees_with}.\n"
            )
    reproduced = bool(torch.equal(ours, recording.jax_token_ids))
    same = "gives the recorded tokens" if reproduced else "[bold]does not give the recorded tokens[/]"
    console.print(f"{len(mismatches)} of {len(step.num_draft_tokens)} requests differ. The replay in JAX {same}.")
    return not any(each.kind == "real" for each in mismatches.values())


def _head(recording: Recording) -> Text:
    step, config = recording.step, recording.step.config
    fly = (
        "FLy off"
        if config is None
        else f"FLy W={config.window_size}, threshold {config.entropy_threshold:g} nats, top {config.entropy_top_k}"
    )
    versions = ", ".join(f"{name} {version}" for name, version in recording.about["versions"].items())
    shape = (
        f"{len(step.num_draft_tokens)} requests, {len(step.draft_token_ids)} drafts, V = {step.target_logits.shape[1]}"
    )
    return Text(f"{shape}, {fly}, on {recording.about['device']}\nrecorded with {versions}\n")


def _request(recording: Recording, b: int, ours: torch.Tensor) -> Group:
    step = crosscheck.single(recording.step, b)
    reference = crosscheck.reference(step)
    sampling = crosscheck.samples(step)
    table = Table(title=f"request {b} ({'sampling' if sampling else 'greedy'})", title_justify="left")
    for column in ("i", "draft", "argmax", "p", "q", "u", "native", "H", "deferred", "margin", "vllm", "jax"):
        table.add_column(column, justify="right")
    theirs = recording.vllm_token_ids[b].tolist()
    (n,) = step.num_draft_tokens
    for i in range(n):
        margin = min(reference.acceptance_margin[i], reference.entropy_margin[i])
        uniform = f"{float(step.uniform[i]):.6f}" if sampling and step.uniform is not None else "-"
        table.add_row(
            str(i),
            str(int(step.draft_token_ids[i])),
            str(reference.target_argmax[i]),
            f"{reference.target_probability[i]:.6f}",
            f"{reference.draft_probability[i]:.6f}" if sampling else "-",
            uniform,
            "yes" if reference.natively_accepted[i] else "no",
            f"{reference.entropy[i]:.4f}",
            "yes" if reference.deferred[i] else "-",
            Text(f"{margin:.1e}", style="bold red" if margin < MARGIN else ""),
            _token(theirs, i),
            _token(ours.tolist(), i),
        )
    bonus = Text(f"bonus token {int(step.bonus_token_ids[0])}")
    if math.isfinite(reference.final_margin):
        bonus.append(f"; the last token's lead in its race {reference.final_margin:.1e}")
    table.add_row(str(n), *["-"] * 9, _token(theirs, n), _token(ours.tolist(), n))
    return Group(table, bonus)


def _token(row: list[int], i: int) -> str:
    return str(row[i]) if i < len(row) and row[i] >= 0 else ""
