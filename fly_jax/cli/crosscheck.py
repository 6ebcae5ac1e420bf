"""`fly-jax crosscheck FILE`: prints a recorded step position by position."""

import math
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from fly_jax.bridges.vllm import crosscheck
from fly_jax.bridges.vllm.report import RequestExplanation, explain
from fly_jax.errors import UserError


def print_explanation(path: Path, console: Console, *, all_requests: bool = False) -> bool:
    """Prints why JAX and vLLM differ in a recorded step.

    Args:
      path: a file that the cross-check wrote.
      console: to print on.
      all_requests: also those whose tokens are the same.

    Returns:
      Whether no mismatch is real.

    Raises:
      UserError: the file cannot be read, or is another one.
    """
    try:
        explanation = explain(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{error}.") from error
    console.print(_head(explanation.recording))
    for b, request in enumerate(explanation.requests):
        if all_requests or request.mismatch is not None:
            console.print(_table(b, request))
        if request.mismatch is not None:
            console.print(
                f"[bold]{request.mismatch.kind.replace('_', '-')}[/]: {request.mismatch.reason}; the torch reference "
                f"agrees with {request.mismatch.reference_agrees_with}.\n"
            )
    differing = sum(each.mismatch is not None for each in explanation.requests)
    same = "gives the recorded tokens" if explanation.is_reproduced else "[bold]does not give the recorded tokens[/]"
    console.print(f"{differing} of {len(explanation.requests)} requests differ. The replay in JAX {same}.")
    return not explanation.has_real_mismatch


def _head(recording: crosscheck.Recording) -> Text:
    step = recording.step
    fly = "FLy off" if step.config is None else step.config.label
    versions = ", ".join(f"{name} {version}" for name, version in recording.about["versions"].items())
    shape = (
        f"{len(step.num_draft_tokens)} requests, {len(step.draft_token_ids)} drafts, V = {step.target_logits.shape[1]}"
    )
    return Text(f"{shape}, {fly}, on {recording.about['device']}\nrecorded with {versions}\n")


def _table(b: int, request: RequestExplanation) -> Group:
    step, reference = request.step, request.reference
    sampling = crosscheck.samples(step)
    table = Table(title=f"request {b} ({'sampling' if sampling else 'greedy'})", title_justify="left")
    for column in ("i", "draft", "argmax", "p", "q", "u", "native", "H", "deferred", "margin", "vllm", "jax"):
        table.add_column(column, justify="right")
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
            Text(f"{margin:.1e}", style="bold red" if margin < crosscheck.MARGIN else ""),
            _token(request.vllm_token_ids, i),
            _token(request.jax_token_ids, i),
        )
    bonus = Text(f"bonus token {int(step.bonus_token_ids[0])}")
    if math.isfinite(reference.final_margin):
        bonus.append(f"; the last token's lead in its race {reference.final_margin:.1e}")
    table.add_row(str(n), *["-"] * 9, _token(request.vllm_token_ids, n), _token(request.jax_token_ids, n))
    return Group(table, bonus)


def _token(token_ids: list[int], i: int) -> str:
    return str(token_ids[i]) if i < len(token_ids) else ""
