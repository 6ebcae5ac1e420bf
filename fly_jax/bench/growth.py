"""How `fly_verify` grows with the batch and the vocabulary, as ratios to the floor, and the plot of it."""

import dataclasses
import functools
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fly_jax.bench.ratios import Ratio
from fly_jax.bench.timing import caller, compile_ahead
from fly_jax.bench.verify import Progress, Settings, floor_calls, floor_seconds, ratio, run, verify_function
from fly_jax.bench.verify_cases import (
    CONFIG,
    NUM_DRAFT_TOKENS,
    VOCAB_SIZE,
    Case,
    check,
    floor_arrays,
    make_data,
    verify_arguments,
)
from fly_jax.files import write_whole

NUM_REQUESTS = (1, 2, 4, 8, 16, 32, 64)
VOCAB_SIZES = (32768, 65536, 98304, 131072, 196608, 262144)
SMALL_VOCAB_SIZE = 32768
SPREAD_GOAL = 1.3

# In every request, so that the share is the same for every batch.
CASES = (Case("greedy", share=1.0), Case("target-only", sampling=True, share=1.0))


@dataclasses.dataclass(frozen=True)
class Curve:
    """The ratio to the floor along one size.

    Attributes:
      case: the case's name.
      axis: "requests" or "vocabulary".
      fixed: the size that stays: V, or B.
      sizes: along the axis.
      ratios: one for each size.
    """

    case: str
    axis: str
    fixed: int
    sizes: tuple[int, ...]
    ratios: tuple[Ratio, ...]

    @property
    def spread(self) -> float:
        """The largest median over the smallest."""
        medians = [each.quartiles[1] for each in self.ratios]
        return max(medians) / min(medians)

    @property
    def is_met(self) -> bool:
        """Whether the spread is within its goal."""
        return self.spread <= SPREAD_GOAL

    @property
    def label(self) -> str:
        """What a legend calls it."""
        return f"{self.case}, {'V' if self.axis == 'requests' else 'B'}={self.fixed}"

    def fields(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`."""
        ratios = [each.fields() for each in self.ratios]
        more = {"spread": self.spread, "goal": SPREAD_GOAL, "is_met": self.is_met}
        return {**dataclasses.asdict(self), "ratios": ratios, **more}


@dataclasses.dataclass
class Growth:
    """The curves so far, the sizes that did not fit in memory, and what an interrupt cut off, if anything."""

    curves: list[Curve] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)
    interrupted: str | None = None

    def fields(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`."""
        curves = [each.fields() for each in self.curves]
        return {"curves": curves, "left_out": self.left_out, "interrupted": self.interrupted}


def measure_growth(settings: Settings, progress: Progress) -> Growth:
    """Measures both cases along the batch, at two vocabularies, and along the vocabulary.

    Peers are not measured, and everything is compiled without `compiler_options()`. After an interrupt it returns what
    it has: a curve may then be short.
    """
    growth = Growth()
    for case in CASES:
        for axis, fixed, sizes in (
            ("requests", SMALL_VOCAB_SIZE, NUM_REQUESTS),
            ("requests", VOCAB_SIZE, NUM_REQUESTS),
            ("vocabulary", case.num_requests, VOCAB_SIZES),
        ):
            done: list[int] = []
            ratios: list[Ratio] = []
            label = f"growth: {case.name} by {axis}, {fixed}"
            try:
                for i in range(len(sizes)):
                    progress(label, i / len(sizes))
                    shape = (sizes[i], fixed) if axis == "requests" else (fixed, sizes[i])
                    sized = dataclasses.replace(case, num_requests=shape[0], vocab_size=shape[1])
                    if not _fits(sized):
                        growth.left_out.append(f"{case.name}: B={shape[0]}, V={shape[1]} does not fit in memory")
                        continue
                    ratios.append(_measure(sized, settings))
                    done.append(sizes[i])
            except KeyboardInterrupt:
                growth.interrupted = label
            if ratios:
                growth.curves.append(Curve(case.name, axis, fixed, tuple(done), tuple(ratios)))
            if growth.interrupted:
                return growth
    return growth


def _measure(case: Case, settings: Settings) -> Ratio:
    data = make_data(case)
    arguments = verify_arguments(case, data)
    compiled = compile_ahead(verify_function(CONFIG), arguments)
    check(case, data, compiled(arguments))
    calls = {"fly_verify": caller(compiled, arguments), **floor_calls(floor_arrays(arguments))}
    seconds = run(calls, settings, lambda fraction: None)
    name = f"{case.name} / floor, B={case.num_requests}, V={case.vocab_size}"
    return ratio(name, "as in the cases", None, seconds["fly_verify"], floor_seconds(seconds))


def _fits(case: Case) -> bool:
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return True
    # The logits on the host and on the device, a copy while they are drawn, and temporaries of the same order.
    needed = 4 * case.num_requests * (NUM_DRAFT_TOKENS + 1) * case.vocab_size * 4
    return needed < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def size_text(size: int) -> str:
    """Large sizes in units of 1024."""
    return f"{size // 1024}k" if size % 1024 == 0 else str(size)


def plot(curves: Sequence[Curve], path: Path, *, title: str, clock: str) -> None:
    """Draws the curves, with quartiles, into a PNG file: along the batch on the left, the vocabulary on the right."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(11, 4.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    axes = (
        ("requests", f"B, requests ({NUM_DRAFT_TOKENS} drafts each)"),
        ("vocabulary", "V, tokens of the vocabulary (k = 1024)"),
    )
    for panel, (axis, label) in zip(panels, axes, strict=True):
        shown = [each for each in curves if each.axis == axis]
        for curve in shown:
            lower, median, upper = zip(*(each.quartiles for each in curve.ratios), strict=True)
            color = "tab:blue" if curve.case == CASES[0].name else "tab:orange"
            style = "o-" if curve.fixed != VOCAB_SIZE else "s--"
            text = f"{curve.label} (max / min {curve.spread:.2f})"
            panel.plot(curve.sizes, median, style, color=color, label=text)
            panel.fill_between(curve.sizes, lower, upper, color=color, alpha=0.2, linewidth=0)
        ticks = sorted({size for curve in shown for size in curve.sizes})
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [size_text(size) for size in ticks])
        panel.minorticks_off()
        panel.set_xlabel(label)
        panel.grid(alpha=0.3)
        panel.set_ylim(bottom=0)
        if shown:
            panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize="small")
    panels[0].set_ylabel(f"{'CPU' if clock == 'cpu' else 'wall'} time / reading the logits once (ratio)")
    figure.suptitle(title, fontsize="medium")
    write_whole(path, functools.partial(figure.savefig, dpi=150, format="png"))
