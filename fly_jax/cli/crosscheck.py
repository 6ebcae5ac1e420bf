"""`fly-jax crosscheck`: a step recorded inside vLLM, explained position by position."""

import math
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fly_jax.bridges.vllm.crosscheck import MARGIN, Recording
from fly_jax.bridges.vllm.report import RequestReport, explain
from fly_jax.cli.output import results_console
from fly_jax.errors import UserError


def crosscheck(path: Path, *, all_requests: bool) -> None:
    """Runs the command and prints its result; exits with status 1 if a difference is real.

    Args:
      path: a file that the cross-check wrote.
      all_requests: also show the requests whose tokens are the same.

    Raises:
      UserError: the file cannot be read.
    """
    try:
        report = explain(path, all_requests=all_requests)
    except (OSError, ValueError) as error:
        raise UserError(f"{error}.") from error
    out = results_console()
    out.print(_head(report.recording))
    for each in report.requests:
        out.print(_request(each))
        if (mismatch := each.mismatch) is not None:
            out.print(
                f"[bold]{mismatch.kind.replace('_', '-')}[/]: {mismatch.reason}; the torch reference agrees with "
                f"{mismatch.reference_agrees_with}.\n"
            )
    same = "gives the recorded tokens" if report.is_reproduced else "[bold]does not give the recorded tokens[/]"
    num_requests = len(report.recording.step.num_draft_tokens)
    out.print(f"{report.num_differing} of {num_requests} requests differ. The replay in JAX {same}.")
    if report.has_real_difference:
        raise SystemExit(1)


def _head(recording: Recording) -> Text:
    step, config = recording.step, recording.step.config
    fly = "FLy off" if config is None else config.label
    versions = ", ".join(f"{name} {version}" for name, version in recording.about["versions"].items())
    shape = (
        f"{len(step.num_draft_tokens)} requests, {len(step.draft_token_ids)} drafts, V = {step.target_logits.shape[1]}"
    )
    return Text(f"{shape}, {fly}, on {recording.about['device']}\nrecorded with {versions}\n")


def _request(each: RequestReport) -> Group:
    table = Table(title=f"request {each.request} ({'sampling' if each.samples else 'greedy'})", title_justify="left")
    for column in ("i", "draft", "argmax", "p", "q", "u", "native", "H", "deferred", "margin", "vllm", "jax"):
        table.add_column(column, justify="right")
    for i, position in enumerate(each.positions):
        table.add_row(
            str(i),
            str(position.draft_token_id),
            str(position.argmax),
            f"{position.target_probability:.6f}",
            _probability(position.draft_probability),
            _probability(position.uniform),
            "yes" if position.is_native else "no",
            f"{position.entropy:.4f}",
            "yes" if position.is_deferred else "-",
            Text(f"{position.margin:.1e}", style="bold red" if position.margin < MARGIN else ""),
            _token(each.vllm_token_ids, i),
            _token(each.jax_token_ids, i),
        )
    bonus = Text(f"bonus token {each.bonus_token_id}")
    if math.isfinite(each.final_margin):
        bonus.append(f"; the last token's lead in its race {each.final_margin:.1e}")
    last = len(each.positions)
    table.add_row(str(last), *["-"] * 9, _token(each.vllm_token_ids, last), _token(each.jax_token_ids, last))
    return Group(table, bonus)


def _probability(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"


def _token(row: tuple[int, ...], i: int) -> str:
    return str(row[i]) if i < len(row) and row[i] >= 0 else ""
