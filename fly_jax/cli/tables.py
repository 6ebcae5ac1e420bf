"""What a comparison of decoding modes looks like: side by side on a terminal, and as one JSON document."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from fly_jax.decode.comparison import FLY, Figures, PromptRun, figures, totals
from fly_jax.decode.prepare import TARGET_ONLY
from fly_jax.versions import run_versions

DEFERRED_STYLE = "bold black on yellow"
LEGEND = (
    "«token» was kept by a deferral: standard verification would have rejected it. "
    "differ: tokens to change to get target-only's text (greedy only). "
    "tokens/s: of decoding, without prefill and compilation."
)


def marked_text(pieces: Sequence[str], deferred: Sequence[bool]) -> Text:
    """The text with deferred tokens marked, in colour and with a sign."""
    text = Text()
    for piece, is_deferred in zip(pieces, deferred, strict=True):
        if is_deferred:
            space = piece[: len(piece) - len(piece.lstrip())]
            text.append(space).append(f"«{piece.lstrip()}»", DEFERRED_STYLE)
        else:
            text.append(piece)
    return text


def prompt_table(run: PromptRun) -> Table:
    """One prompt's texts side by side, their figures below."""
    table = _table(f"{run.name} ({run.num_prompt_tokens} prompt tokens)", list(run.generations))
    texts = [marked_text(run.pieces[mode], each.deferred) for mode, each in run.generations.items()]
    table.add_row("", *texts, end_section=True)
    _add_figures(table, [figures(run, mode) for mode in run.generations])
    return table


def totals_table(runs: Sequence[PromptRun]) -> Table | None:
    """The figures over all prompts; None when none was finished in every mode."""
    by_mode = totals(runs)
    if not by_mode:
        return None
    table = _table("all prompts", list(by_mode))
    _add_figures(table, list(by_mode.values()))
    base = by_mode[TARGET_ONLY]
    rows = list(by_mode.values())
    table.add_row("tokens/s ratio", *(_ratio(each.tokens_per_second, base.tokens_per_second) for each in rows))
    table.add_row("total time ratio", *(_ratio(each.total_seconds, base.total_seconds) for each in rows))
    return table


def document(runs: Sequence[PromptRun], *, config: dict[str, Any], interrupted: bool) -> dict[str, Any]:
    """Everything measured, with versions and settings, ready for `json.dumps`."""
    return {
        "versions": run_versions(),
        "config": config,
        "interrupted": interrupted,
        "lossy_modes": [FLY],
        "prompts": [
            {
                "name": run.name,
                "prompt": run.prompt,
                "num_prompt_tokens": run.num_prompt_tokens,
                "results": {mode: _result(run, mode) for mode in run.generations},
            }
            for run in runs
        ],
        "totals": {mode: each.to_dict() for mode, each in totals(runs).items()},
    }


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", expand=True)
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, ratio=1, overflow="fold")
    return table


def _add_figures(table: Table, rows: Sequence[Figures]) -> None:
    def add(name: str, value: Callable[[Figures], str]) -> None:
        table.add_row(name, *(value(each) for each in rows))

    add("tokens", lambda each: str(each.num_tokens))
    add("tokens/s", lambda each: f"{each.tokens_per_second:.1f}")
    add("total time", lambda each: f"{each.total_seconds:.2f} s ({each.decode_seconds:.2f} s decoding)")
    add("tokens/cycle", lambda each: f"{each.tokens_per_cycle:.2f}")
    add("deferred", lambda each: str(each.num_deferred))
    add("differ", lambda each: "-" if each.num_differing is None else str(each.num_differing))


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}x" if base else "-"


def _result(run: PromptRun, mode: str) -> dict[str, Any]:
    generation = run.generations[mode]
    return {
        "text": "".join(run.pieces[mode]),
        "token_ids": list(generation.token_ids),
        "deferred": list(generation.deferred),
        "finish_reason": generation.finish_reason,
        **figures(run, mode).to_dict(),
    }
