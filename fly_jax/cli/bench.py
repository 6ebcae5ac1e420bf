"""`fly-jax bench`: options are checked, things are measured, and what was measured is shown."""

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from fly_jax.bench import decode, kernels, offline, verify, verify_report
from fly_jax.bench import growth as growth_bench
from fly_jax.bench.peers import installed_peers
from fly_jax.cli.bench_tables import bridge_table, compile_table, decode_table, kernels_table, verify_tables
from fly_jax.cli.output import INTERRUPTED, check_plot, notes_console, print_json, progress_bars, results_console
from fly_jax.decode.checkpoints.load import load_model
from fly_jax.errors import UserError
from fly_jax.versions import run_versions


def bench_decode(model: str | None, *, rounds: int, json_output: bool) -> None:
    """Runs the command and prints its result; `model` is a path, None for the default model.

    Raises:
      UserError: the model cannot be read or measured.
    """
    with progress_bars(notes_console()) as report:
        loaded = load_model(model, progress=report)
        result = decode.measure(loaded, rounds=rounds, progress=report)
    if json_output:
        print_json({"versions": run_versions(), "model": loaded.name, **result.fields()}, allow_nan=True)
    else:
        results_console().print(decode_table(result))


def bench_verify(cases: str, *, rounds: int, clock: str, growth: bool, plot: Path | None, json_output: bool) -> None:
    """Runs the command and prints its result; after an interrupt what there is of it, with exit status 130.

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
    with progress_bars(notes_console()) as report:
        verify.measure(result, names, settings, report)
        if growth and result.interrupted is None:
            curves = growth_bench.measure_growth(settings, report)
    if json_output:
        document = verify_report.document(result, curves, settings, left_out)
        print_json({"versions": run_versions(), **document}, allow_nan=True)
    else:
        out = results_console()
        for table in verify_tables(result, curves, settings):
            out.print(table)
        for line in verify_report.notes(result, curves, settings, left_out):
            out.print(line, highlight=False, markup=False)
    if plot is not None and curves is not None and curves.curves:
        try:
            growth_bench.plot(curves.curves, plot, title=verify_report.title(), clock=clock)
        except OSError as error:
            raise UserError(f"--plot {plot} cannot be written: {error}.") from error
    if result.interrupted is not None or (curves is not None and curves.interrupted is not None):
        raise SystemExit(INTERRUPTED)


def bench_kernels(*, compile_only: bool, rounds: int, json_output: bool) -> None:
    """Runs the command and prints its result.

    Args:
      compile_only: compile for every architecture instead of measuring.
      rounds: interleaved rounds.
      json_output: print one JSON document instead of a table.

    Raises:
      UserError: there is no GPU, or, with `compile_only`, no triton package.
    """
    document: dict[str, Any] = {"versions": run_versions()}
    if compile_only:
        _require_triton()
        with progress_bars(notes_console()) as report:
            compiled = kernels.compile_all(offline.VARIANTS, list(offline.PLATFORMS), report)
        document["compiled"] = [
            {**dataclasses.asdict(variant), **dataclasses.asdict(each)} for variant, each in compiled
        ]
        table = compile_table(compiled)
    else:
        _require_gpu()
        with progress_bars(notes_console()) as report:
            results, left_out = kernels.measure(kernels.CASES, rounds=rounds, implementation="triton", progress=report)
        device = jax.devices()[0].device_kind
        document |= {"device": device, "cases": [each.fields() for each in results], "left_out": left_out}
        table = kernels_table(results, device, left_out)
    if json_output:
        print_json(document, allow_nan=True)
    else:
        results_console().print(table)


def bench_bridge(*, rounds: int, json_output: bool) -> None:
    """Runs the command and prints its result.

    Raises:
      ModuleNotFoundError: torch is missing.
    """
    # Here, because it needs torch, which the other benchmarks do without.
    from fly_jax.bench import bridge

    with progress_bars(notes_console()) as report:
        ratios = bridge.measure(bridge.CASES, rounds=rounds, progress=report)
    if json_output:
        print_json({"versions": run_versions(), "ratios": [each.fields() for each in ratios]}, allow_nan=True)
    else:
        results_console().print(bridge_table(ratios, bridge.SHAPE, bridge.DEFINITIONS))


def _case_names(text: str, known: Sequence[str], growth: bool) -> Sequence[str]:
    if text == "all":
        return known
    if text == "none" and growth:
        return []
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--cases has no {unknown[0]!r}; it takes all, none (with --growth), or {', '.join(known)}.")
    return names


def _require_triton() -> None:
    try:
        importlib.import_module("triton")
    except ModuleNotFoundError:
        raise UserError(
            "--compile-only needs the triton package; install the triton extra: pip install 'fly-jax[triton]', or "
            "-e '.[triton]' in the repository."
        ) from None


def _require_gpu() -> None:
    if jax.default_backend() != "gpu":
        raise UserError(
            f"bench kernels measures GPUs and jax has only {jax.default_backend()} devices here; --compile-only "
            "compiles the kernels without one."
        )
