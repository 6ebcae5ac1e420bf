"""The command `fly-jax bench verify`: options are checked, things are measured, and what was measured is shown."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fly_jax.bench import growth as growth_bench
from fly_jax.bench import verify, verify_report
from fly_jax.bench.peers import installed_peers
from fly_jax.cli.plotting import check_plot
from fly_jax.cli.tables import progress_bars, versions
from fly_jax.errors import UserError


def bench_verify(cases: str, *, rounds: int, clock: str, growth: bool, plot: Path | None, json_output: bool) -> bool:
    """Runs the command and prints its result; False when an interrupt cut it short.

    Args:
      cases: names with commas between them, "all", or "none" with `growth`.
      rounds: interleaved rounds.
      clock: "cpu" or "wall".
      growth: whether to measure along the batch and the vocabulary as well.
      plot: the PNG file to draw the growth into, if any.
      json_output: print one JSON document instead of tables.

    Raises:
      UserError: an option cannot be used as it is given.
    """
    names = _case_names(cases, verify.case_names(), growth)
    check_plot(plot)
    peers, left_out = installed_peers(clock)
    settings = verify.Settings(rounds, clock, peers)
    result, curves = verify.VerifyBench(), None
    with progress_bars(Console(stderr=True)) as report:
        verify.measure(result, names, settings, report)
        if growth and result.interrupted is None:
            curves = growth_bench.measure_growth(settings, report)
    if json_output:
        document = verify_report.document(result, curves, settings, left_out)
        print(json.dumps({"versions": versions(), **document}, indent=2))
    else:
        out = Console()
        for table in verify_report.tables(result, curves, settings):
            out.print(table)
        for line in verify_report.notes(result, curves, settings, left_out):
            out.print(line, highlight=False, markup=False)
    if plot is not None and curves is not None and curves.curves:
        growth_bench.plot(curves.curves, str(plot), title=verify_report.title(), clock=clock)
    return result.interrupted is None and (curves is None or curves.interrupted is None)


def _case_names(text: str, known: Sequence[str], growth: bool) -> Sequence[str]:
    if text == "all":
        return known
    if text == "none" and growth:
        return []
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--cases has no {unknown[0]!r}; it takes all, none (with --growth), or {', '.join(known)}.")
    return names
