"""What `fly-jax bench verify` prints: narrow tables, and one JSON document."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from fly_jax.bench import verify_cases
from fly_jax.bench.growth import SPREAD_GOAL, Growth, size_text
from fly_jax.bench.peers import TORCH
from fly_jax.bench.ratios import Ratio, verdict
from fly_jax.bench.verify import DEFAULT, WITH_OPTIONS, CaseResult, Settings, VerifyBench
from fly_jax.compat import compiler_options

_CLOCKS = {"cpu": "CPU time of the process, all threads", "wall": "wall time"}


def tables(result: VerifyBench, growth: Growth | None, settings: Settings) -> list[Table]:
    """Everything measured, at most 80 columns wide; what was not measured has no table."""
    shown = []
    if result.cases:
        shown += [_floor_table(result, settings), _memory_table(result)]
    if any(case.against for case in result.cases):
        shown.append(_peers_table(result))
    others = [each for case in result.cases for each in _named_over_standard(case)] + [
        (each.name, each) for each in result.odd_vocabulary
    ]
    if others:
        table = _table("other ratios", "ratio", "median (quartiles)", "goal")
        for name, each in others:
            table.add_row(name, _median(each), each.verdict())
        shown.append(table)
    if growth is not None and growth.curves:
        shown.append(_growth_table(growth))
    return shown


def notes(result: VerifyBench, growth: Growth | None, settings: Settings, left_out: Mapping[str, str]) -> list[str]:
    """The machine, what was left out, and what an interrupt cut off, a line each."""
    lines = [f"machine: {_machine_line()}"]
    lines += [f"left out: {name} ({reason})" for name, reason in left_out.items()]
    if not compiler_options():
        lines.append(f"left out: {WITH_OPTIONS} (compiler_options() has none for this backend)")
    lines += [f"left out: {each}" for each in (growth.left_out if growth is not None else [])]
    lines += [f"{peer.name}: {peer.definition}" for peer in settings.peers if result.cases]
    for each in (result, growth):
        if each is not None and each.interrupted is not None:
            lines.append(
                f"interrupted: the rounds of {each.interrupted} are lost, and what came after was not measured"
            )
    return lines


def document(
    result: VerifyBench, growth: Growth | None, settings: Settings, left_out: Mapping[str, str]
) -> dict[str, Any]:
    """Everything measured, with the machine and the settings, ready for `json.dumps`."""
    return {
        "machine": machine(),
        "clock": settings.clock,
        "rounds": settings.rounds,
        "min_sample_seconds": settings.min_seconds,
        "compiler_options": dict(compiler_options()),
        "num_draft_tokens": verify_cases.NUM_DRAFT_TOKENS,
        "window_size": verify_cases.WINDOW_SIZE,
        "temperature": verify_cases.TEMPERATURE,
        "peers": {peer.name: peer.definition for peer in settings.peers},
        "left_out": dict(left_out),
        **result.fields(),
        "growth": None if growth is None else growth.fields(),
    }


def machine() -> dict[str, Any]:
    """The processor, how many cores this process may use, the device and jax's version."""
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": _processor(),
        "cores": cores,
        "device": f"{device.platform} ({device.device_kind})",
        "jax": jax.__version__,
    }


def title() -> str:
    """One line for a plot."""
    return f"fly_verify over its floor: K={verify_cases.NUM_DRAFT_TOKENS}, float32; {_machine_line()}"


def _floor_table(result: VerifyBench, settings: Settings) -> Table:
    """The times over the floor, with goals below."""
    caption = (
        f"{_CLOCKS[settings.clock]}, over that of reading the logits once; medians (quartiles) of {settings.rounds} "
        f"rounds. FLy with K={verify_cases.NUM_DRAFT_TOKENS}, W={verify_cases.WINDOW_SIZE}, "
        f"V={result.cases[0].case.vocab_size}, B=8 (b1: 1), float32 (bf16: bfloat16); all but greedy at temperature "
        f"{verify_cases.TEMPERATURE}. deferrable, "
        "as in 2 of 8: requests with a rejection that can be deferred."
    )
    table = _table("bench verify: time over the floor", "case", "deferrable", DEFAULT, WITH_OPTIONS, caption=caption)
    for each in result.cases:
        ratios = [_ratio_cell(each.over_floor.get(name)) for name in (DEFAULT, WITH_OPTIONS)]
        table.add_row(each.case.name, _deferrable(each), *ratios, end_section=True)
    return table


def _memory_table(result: VerifyBench) -> Table:
    caption = (
        "memory_analysis().temp_size_in_bytes of the compiled function, in float32 arrays of [B, V]. "
        "Block maxima of all rows (0.14) are allowed beside the goal."
    )
    table = _table("temporaries", "case", DEFAULT, WITH_OPTIONS, "goal", caption=caption)
    for each in result.cases:
        values = [each.temporaries.get(name) for name in (DEFAULT, WITH_OPTIONS)]
        goal = verdict("<=", each.case.goals.temporaries, each.temporaries_met)
        table.add_row(each.case.name, *("-" if value is None else f"{value:.3f}" for value in values), goal)
    return table


def _peers_table(result: VerifyBench) -> Table:
    table = _table("times as fast as others", "case", "other", DEFAULT, WITH_OPTIONS)
    for each in result.cases:
        names = sorted(each.against, key=lambda name: name != TORCH)
        for i in range(len(names)):
            ratios = each.against[names[i]]
            cells = [_ratio_cell(ratios.get(name), unit="x") for name in (DEFAULT, WITH_OPTIONS)]
            table.add_row(each.case.name if i == 0 else "", names[i], *cells, end_section=i == len(names) - 1)
    return table


def _growth_table(growth: Growth) -> Table:
    caption = (
        "Medians of the time over the floor along B (at this V) and along V (at this B), compiled by default, every "
        f"request with a rejection that can be deferred; max / min <= {SPREAD_GOAL} is the goal. k = 1024."
    )
    table = _table("growth", "case", "along", "ratios by size", "max / min", caption=caption)
    for curve in growth.curves:
        pairs = zip(curve.sizes, curve.ratios, strict=True)
        # A no-break space, so that a size stays beside its ratio.
        medians = "  ".join(f"{size_text(size)}:\N{NO-BREAK SPACE}{each.quartiles[1]:.2f}" for size, each in pairs)
        along = f"B, V={curve.fixed}" if curve.axis == "requests" else f"V, B={curve.fixed}"
        table.add_row(
            curve.case, along, medians, f"{curve.spread:.2f} {'met' if curve.is_met else 'MISSED'}", end_section=True
        )
    return table


def _named_over_standard(case: CaseResult) -> list[tuple[str, Ratio]]:
    return [(f"FLy / standard, {_deferrable(case)}, {name}", each) for name, each in case.over_standard.items()]


def _deferrable(case: CaseResult) -> str:
    return f"{case.num_candidates} of {case.case.num_requests}"


def _table(heading: str, *columns: str, caption: str | None = None) -> Table:
    table = Table(title=heading, title_justify="left", caption=caption, caption_justify="left")
    for name in columns:
        # Only long texts may be broken: names and numbers never.
        table.add_column(name, no_wrap=name not in ("ratio", "ratios by size"))
    return table


def _ratio_cell(each: Ratio | None, unit: str = "") -> str:
    if each is None:
        return "-"
    return _median(each, unit) if each.goal is None else f"{_median(each, unit)}\n{each.verdict(unit)}"


def _median(each: Ratio, unit: str = "") -> str:
    lower, median, upper = map(_three_digits, each.quartiles)
    return f"{median}{unit} ({lower}-{upper})"


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _machine_line() -> str:
    each = machine()
    device = "" if each["device"].startswith("cpu") else f", {each['device']}"
    return f"{each['processor']}, {each['cores']} cores{device}, jax {each['jax']}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # only Linux has it
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
