"""The tables of `fly-jax bench`."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from fly_jax.bench import kernels, offline, verify_cases
from fly_jax.bench.decode import DecodeBench
from fly_jax.bench.growth import SPREAD_GOAL, Growth, size_text
from fly_jax.bench.peers import TORCH
from fly_jax.bench.ratios import Ratio, verdict
from fly_jax.bench.verify import DEFAULT, WITH_OPTIONS, CaseResult, Settings, VerifyBench

_CLOCKS = {"cpu": "CPU time of the process, all threads", "wall": "wall time"}


def decode_table(result: DecodeBench) -> Table:
    """The ratios with their goals and definitions."""
    steps = ", ".join(f"{name} {value:.2f} ms" for name, value in result.milliseconds.items())
    table = Table(title="bench decode", title_justify="left", caption=f"medians: {steps}", caption_justify="left")
    for name in ("ratio", "median", "quartiles", "goal", "definition"):
        table.add_column(name, no_wrap=name in ("median", "quartiles", "goal"))
    for each in result.ratios:
        lower, median, upper = each.quartiles
        table.add_row(
            each.name, f"{median:.3f}", f"{lower:.3f}-{upper:.3f}", each.verdict(), each.definition, end_section=True
        )
    return table


def bridge_table(ratios: Sequence[Ratio], shape: str, definitions: Mapping[str, str]) -> Table:
    """One line for each ratio; `shape` and `definitions` are those of `fly_jax.bench.bridge`, which needs torch."""
    caption = "; ".join([shape, *(f"{name}: {definition}" for name, definition in definitions.items())])
    result = Table(title="bench bridge", title_justify="left", caption=caption, caption_justify="left")
    for name in ("ratio", "median", "quartiles", "goal"):
        result.add_column(name, justify="left" if name == "ratio" else "right")
    for each in ratios:
        lower, median, upper = each.quartiles
        result.add_row(each.name, f"{median:.3f}", f"{lower:.3f}-{upper:.3f}", each.verdict())
    return result


def compile_table(compiled: Sequence[tuple[offline.Variant, offline.CompiledKernel]]) -> Table:
    """One line for each variant and architecture."""
    caption = (
        "+: scale and threshold given; all: every operand. splits: programs per row; spills: bytes per thread; shared: "
        "bytes per program; loads: instructions of 16 bytes + narrower ones, all and those of the main loop; instr: "
        "instructions of the main loop per logit (-: no program of a row goes round it twice); bytes/row: of logits "
        "read, at most."
    )
    table = Table(
        title="bench kernels --compile-only",
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    names = ("logits", "k", "N", "GPU", "splits", "regs", "spills", "shared", "loads", "loop", "instr", "bytes/row")
    for name in names:
        table.add_column(name, no_wrap=True, justify="left" if name in ("logits", "GPU") else "right")
    last = None
    for variant, each in compiled:
        has_loop = each.loop_wide_loads + each.loop_narrow_loads > 0
        table.add_row(
            *(_variant_cells(variant) if variant != last else ("", "", "")),
            each.architecture,
            f"{each.num_splits}",
            f"{each.registers}",
            f"{each.spilled_bytes}",
            f"{each.shared_bytes}",
            f"{each.wide_loads}+{each.narrow_loads}",
            f"{each.loop_wide_loads}+{each.loop_narrow_loads}" if has_loop else "-",
            f"{each.instructions:.1f}" if has_loop else "-",
            f"{variant.row_bytes(each.num_splits)}",
        )
        last = variant
    return table


def _variant_cells(variant: offline.Variant) -> tuple[str, str, str]:
    dtype = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[variant.dtype]
    operands = {0: "", 2: " +"}.get(len(variant.operands), " all")
    return f"{dtype} {variant.num_columns}{operands}", f"{variant.k}", f"{variant.num_rows}"


def kernels_table(results: Sequence[kernels.CaseResult], device: str, left_out: Mapping[str, str]) -> Table:
    """One line for each case."""
    notes = [f"on {device}; medians over rounds, and quartiles"]
    definitions = dict.fromkeys(
        f"{name}: {each.definition}" for result in results for name, each in result.ratios.items()
    )
    notes += [*definitions, *(f"{name} is left out: {why}" for name, why in left_out.items())]
    table = Table(title="bench kernels", title_justify="left", caption="; ".join(notes), caption_justify="left")
    for name in ("N x V", "GB/s", "of a copy", "goal", "over XLA", "over torch"):
        table.add_column(name, no_wrap=True, justify="left" if name == "N x V" else "right")
    for result in results:
        goal = result.ratios["copy"].verdict()
        cells = [_cell(result.ratios.get(name)) for name in ("copy", "XLA", "torch")]
        table.add_row(result.case.name, f"{result.gigabytes_per_second:.0f}", cells[0], goal, *cells[1:])
    return table


def _cell(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    lower, median, upper = ratio.quartiles
    return f"{median:.2f} ({lower:.2f}-{upper:.2f})"


def verify_tables(result: VerifyBench, growth: Growth | None, settings: Settings) -> list[Table]:
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
