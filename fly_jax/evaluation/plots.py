"""An evaluation as pictures: drafts kept by position, speed against batch size, retention against speed."""

import importlib
import io
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from fly_jax.decode.prepare import STANDARD, TARGET_ONLY
from fly_jax.evaluation.report import Findings

COLORS = ("tab:gray", "tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink")
MARKERS = "os^Dv<>P"


def pictures(found: Findings, title: str) -> dict[str, bytes]:
    """The PNG files, by name."""
    drawings: Mapping[str, Callable[[Any, Findings], None]] = {
        "acceptance.png": _acceptance,
        "speed.png": _speed,
        "retention.png": _retention,
    }
    return {name: _png(draw, found, title) for name, draw in drawings.items()}


def _png(draw: Callable[[Any, Findings], None], found: Findings, title: str) -> bytes:
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7.5, 4.8), layout="constrained")
    panel = figure.subplots()
    draw(panel, found)
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    data = io.BytesIO()
    figure.savefig(data, dpi=150, format="png")
    return data.getvalue()


def _style(found: Findings, mode: str) -> dict[str, Any]:
    i = list(found.modes).index(mode)
    return {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)], "label": mode}


def _acceptance(panel: Any, found: Findings) -> None:
    for mode, each in found.first.items():
        shown = [(i + 1, rate) for i, rate in enumerate(each.acceptance_by_position) if rate is not None]
        if shown:
            panel.plot(*zip(*shown, strict=True), **_style(found, mode))
    panel.set_xlabel("position in the draft (tokens)")
    panel.set_ylabel("drafts kept / drafts proposed there")
    panel.set_ylim(0, 1)
    panel.xaxis.get_major_locator().set_params(integer=True)


def _speed(panel: Any, found: Findings) -> None:
    sizes = list(found.speed)
    for mode in found.modes:
        panel.plot(sizes, [found.speed[size][mode].tokens_per_second for size in sizes], **_style(found, mode))
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [str(size) for size in sizes])
    panel.minorticks_off()
    panel.set_xlabel("batch size (requests)")
    panel.set_ylabel("decoding (tokens/s, all requests together)")
    panel.set_ylim(bottom=0)


def _retention(panel: Any, found: Findings) -> None:
    """One point for each mode and batch size; retention's interval at the first batch size only, to stay readable."""
    for mode in found.modes:
        if mode == TARGET_ONLY:
            continue
        retained = {size: by_mode[mode].retention for size, by_mode in found.quality.items()}
        points = {
            size: (found.speed[size][mode].over_target_only.value, 100 * each.value)
            for size, each in retained.items()
            if each is not None
        }
        if not points:
            continue
        style = _style(found, mode)
        panel.plot(*zip(*points.values(), strict=True), **style, linestyle="none")
        each = next(iter(retained.values()))
        if each is not None and each.low is not None and each.high is not None:
            ends = [[100 * (each.value - each.low)], [100 * (each.high - each.value)]]
            panel.errorbar(*next(iter(points.values())), yerr=ends, color=style["color"], capsize=4)
        # Neighbours at one height each have a line of their own.
        by_speed = sorted(points.items(), key=lambda item: item[1]) if mode != STANDARD else []
        for (size, point), height in zip(by_speed, itertools.cycle((6, 17, -14)), strict=False):
            panel.annotate(f"B={size}", point, xytext=(5, height), textcoords="offset points", fontsize="x-small")
    panel.axhline(100, color=COLORS[0], linewidth=1, linestyle="--", label="target-only")
    panel.axvline(1, color=COLORS[0], linewidth=1, linestyle=":")
    panel.set_xlabel("decoding speed / target-only's (ratio of tokens/s)")
    panel.set_ylabel("accuracy / target-only's (%)")
