"""`fly-jax sweep`: a recorded trace replayed under many settings, as one table, one JSON document, one plot."""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from fly_jax.cli.options import spelled
from fly_jax.cli.output import check_plot, print_json, results_console
from fly_jax.decode.checks import parse_numbers
from fly_jax.errors import UserError
from fly_jax.files import write_whole
from fly_jax.traces.file import Trace, load_trace
from fly_jax.traces.record import TOP_K
from fly_jax.traces.replay import Replay, Settings, num_reproduced, replay
from fly_jax.versions import run_versions

WINDOW_SIZES = (1, 2, 3, 4, 6, 8, 10, 12)
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
TOP_KS = (2, 3, 5)

STATEMENT = (
    "What a replay can tell: what each recorded cycle would have kept (exactly, but for gates within 5e-6 nats of the"
    " threshold), since its drafts, the target's rows and the noise are recorded. What it cannot: what would have "
    "come next. Another number of kept tokens starts the next cycle elsewhere, with other drafts, and after a "
    "deferral the text itself is another. So these figures rank settings; speed and quality have to be measured with "
    "the setting that you choose (fly-jax eval). A loss of log-probability says how much less likely the target finds"
    " a kept token than its own, not that an answer is worse."
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The figures of one setting; the fields are those of `Replay`, a row of the table.

    Attributes:
      window_size: W; None, as the next two, for standard verification.
      entropy_threshold: nats.
      entropy_top_k: k.
      is_standard: standard verification, the baseline.
      is_recorded: the setting that decided while the trace was recorded.
      tokens_per_cycle: emitted tokens per cycle.
      deferral_rate: of the native rejections that mattered.
      logprob_loss: nats per deferred token.
      far_share: of the deferred tokens.
      draft_overshoot: geometric mean of q / p; None where q is not known.
      num_tokens: emitted tokens.
      num_deferred: deferred ones.
      num_stops: cycles that ended at a rejection.
    """

    window_size: int | None
    entropy_threshold: float | None
    entropy_top_k: int | None
    is_standard: bool
    is_recorded: bool
    tokens_per_cycle: float
    deferral_rate: float
    logprob_loss: float
    far_share: float
    draft_overshoot: float | None
    num_tokens: int
    num_deferred: int
    num_stops: int

    @property
    def is_marked(self) -> bool:
        """Whether it is in every table: the baseline, and what was recorded."""
        return self.is_standard or self.is_recorded

    @property
    def gain_and_risk(self) -> tuple[float, float, float]:
        """What settings are compared by, each the more the worse."""
        return (-self.tokens_per_cycle, self.deferral_rate, self.logprob_loss)


@dataclasses.dataclass(frozen=True)
class Filters:
    """What is shown.

    Attributes:
      max_deferral_rate: settings above it are left out; None keeps all, as the next.
      max_logprob_loss: nats per deferred token.
      far_below: nats below the argmax from which a deferred token counts as far.
      all_settings: also show those that another one equals or beats.

    Raises:
      UserError: a number is negative, infinite or NaN.
    """

    max_deferral_rate: float | None
    max_logprob_loss: float | None
    far_below: float
    all_settings: bool

    def __post_init__(self) -> None:
        for name in ("max_deferral_rate", "max_logprob_loss", "far_below"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise UserError(f"{spelled(name)} must be a number of at least 0, got {value}.")

    def allow(self, each: Outcome) -> bool:
        """Whether a setting is within the limits."""
        limits = ((each.deferral_rate, self.max_deferral_rate), (each.logprob_loss, self.max_logprob_loss))
        return all(most is None or value <= most for value, most in limits)


def sweep(
    trace_file: Path,
    *,
    window_sizes: str | None,
    thresholds: str | None,
    top_ks: str | None,
    filters: Filters,
    plot_file: Path | None,
    json_output: bool,
) -> None:
    """Runs the command and prints its result.

    Args:
      trace_file: what was recorded.
      window_sizes: numbers with commas between them; None for `WINDOW_SIZES` below the trace's K.
      thresholds: nats; None for `THRESHOLDS`.
      top_ks: None for `TOP_KS`.
      filters: what is shown.
      plot_file: the PNG file to draw into, if any.
      json_output: print one JSON document instead of a table.

    Raises:
      UserError: the trace or an option cannot be used as it is given.
    """
    check_plot(plot_file)
    try:
        trace = load_trace(trace_file)
    except (OSError, ValueError) as error:
        raise UserError(f"{error}.") from error
    if not len(trace.rows["flags"]):
        raise UserError(f"{trace_file} holds no draft tokens: nothing was verified while it was recorded.")
    settings = _settings(trace, window_sizes, thresholds, top_ks)
    everything = outcomes(trace, replay(trace, settings, far_below=filters.far_below))
    allowed = [each for each in everything if each.is_marked or filters.allow(each)]
    best = unbeaten(allowed)
    shown = allowed if filters.all_settings else [each for each in allowed if each.is_marked or each in best]
    shown.sort(key=lambda each: each.gain_and_risk)
    if json_output:
        print_json(_document(trace, trace_file, filters, shown, len(everything)))
    else:
        out = results_console()
        out.print(_table(trace, shown, filters.far_below))
        for line in (*_notes(trace, len(everything), len(allowed), len(shown)), STATEMENT):
            out.print(line, style="dim", highlight=False, markup=False)
    if plot_file is not None:
        try:
            plot(allowed, best, plot_file, title=_title(trace))
        except OSError as error:
            raise UserError(f"--plot {plot_file} cannot be written: {error}.") from error


def outcomes(trace: Trace, result: Replay) -> list[Outcome]:
    """The figures of every setting of a replay, in its order."""
    recorded = _recorded(trace)
    found = []
    for i, setting in enumerate(_triples(result.settings)):
        is_standard = math.isinf(setting[1])
        window_size, threshold, top_k = (None, None, None) if is_standard else setting
        overshoot = float(result.draft_overshoot[i])
        found.append(
            Outcome(
                window_size,
                # As it was written, not as float32 has it.
                None if threshold is None else float(f"{threshold:.6g}"),
                top_k,
                is_standard,
                (recorded is None and is_standard) or setting == recorded,
                float(result.tokens_per_cycle[i]),
                float(result.deferral_rate[i]),
                float(result.logprob_loss[i]),
                float(result.far_share[i]),
                overshoot if math.isfinite(overshoot) else None,
                int(result.num_tokens[i]),
                int(result.num_deferred[i]),
                int(result.num_stops[i]),
            )
        )
    return found


def unbeaten(allowed: Sequence[Outcome]) -> list[Outcome]:
    """Those that no other equals or beats in tokens per cycle, deferral rate and loss; of equal ones the most careful:
    with the longest window, then the highest threshold, then the smallest k."""

    def carefulness(each: Outcome) -> tuple[float, float, float]:
        if each.window_size is None or each.entropy_threshold is None or each.entropy_top_k is None:
            return (math.inf, math.inf, 0.0)
        return (each.window_size, each.entropy_threshold, -each.entropy_top_k)

    best: list[Outcome] = []
    # From the best on, so that nothing that comes later beats what is kept.
    for each in sorted(sorted(allowed, key=carefulness, reverse=True), key=lambda each: each.gain_and_risk):
        if not any(all(a <= b for a, b in zip(other.gain_and_risk, each.gain_and_risk, strict=True)) for other in best):
            best.append(each)
    return best


def _settings(
    trace: Trace, window_sizes_text: str | None, thresholds_text: str | None, top_ks_text: str | None
) -> Settings:
    """The grid that was asked for, standard verification, and the recorded setting."""
    k, integers = trace.num_speculative_tokens, "integers with commas between them"
    window_sizes: tuple[int, ...] = tuple(w for w in WINDOW_SIZES if w < k)
    thresholds: tuple[float, ...] = THRESHOLDS
    top_ks: tuple[int, ...] = TOP_KS
    if window_sizes_text is not None:
        window_sizes = parse_numbers("--window-sizes", window_sizes_text, int, integers)
    if thresholds_text is not None:
        thresholds = parse_numbers("--thresholds", thresholds_text, float, "numbers with commas between them")
    if top_ks_text is not None:
        top_ks = parse_numbers("--top-ks", top_ks_text, int, integers)
    for window_size in window_sizes:
        if not 1 <= window_size < k:
            raise UserError(
                f"--window-sizes must be at least 1 and below the trace's {k} draft tokens per cycle, "
                f"got {window_size}."
            )
    for threshold in thresholds:
        if not 0 <= threshold < math.inf:
            raise UserError(f"--thresholds must be numbers of nats, at least 0, got {threshold}.")
    for top_k in top_ks:
        if not 1 <= top_k <= TOP_K:
            raise UserError(f"--top-ks must be between 1 and {TOP_K}, which a trace holds, got {top_k}.")
    wanted = dict.fromkeys(_triples(Settings.grid(window_sizes, thresholds, top_ks)))
    recorded = _recorded(trace)
    wanted |= dict.fromkeys([(1, math.inf, 1), *([] if recorded is None else [recorded])])
    return Settings.from_lists(list(wanted))


def _triples(settings: Settings) -> list[tuple[int, float, int]]:
    columns = (settings.window_sizes, settings.thresholds, settings.top_ks)
    return list(zip(*(each.tolist() for each in columns), strict=True))


def _recorded(trace: Trace) -> tuple[int, float, int] | None:
    config = trace.config
    if config is None:
        return None
    # A trace holds one number for all requests.
    threshold = float(np.asarray(config.entropy_threshold))
    return _triples(Settings.from_lists([(config.window_size or 1, threshold, config.entropy_top_k)]))[0]


def _table(trace: Trace, shown: Sequence[Outcome], far_below: float) -> Table:
    caption = (
        "deferred: deferrals over native rejections that mattered (deferred, or the end of a cycle). loss: the "
        "target's log-probability of its argmax less that of the deferred draft, mean. "
        f"far: share of deferred drafts more than {far_below:.3g} nats below the argmax. "
        "q/p: the draft's probability of a deferred token over the target's, geometric mean."
    )
    table = Table(
        title=_title(trace), title_justify="left", title_style="bold", caption=caption, caption_justify="left"
    )
    for name in ("", "W", "nats", "k", "tokens\n/cycle", "deferred", "loss,\nnats", "far", "q/p"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for each in shown:
        marks = [name for name, is_so in (("standard", each.is_standard), ("recorded", each.is_recorded)) if is_so]
        setting = (each.window_size, each.entropy_threshold, each.entropy_top_k)
        table.add_row(
            "\n".join(marks),
            *("-" if value is None else f"{value:g}" for value in setting),
            f"{each.tokens_per_cycle:.3f}",
            f"{each.deferral_rate:.1%}",
            f"{each.logprob_loss:.3f}" if each.num_deferred else "-",
            f"{each.far_share:.1%}" if each.num_deferred else "-",
            "-" if each.draft_overshoot is None else f"{each.draft_overshoot:.2f}",
            style="bold" if each.is_marked else None,
        )
    return table


def _title(trace: Trace) -> str:
    model = trace.meta["model"] or "a model"
    drafter = "" if trace.meta["drafter"] is None else f", {trace.meta['drafter']}"
    return f"{trace.meta['source']}: {model}{drafter}, K={trace.num_speculative_tokens}"


def _notes(trace: Trace, num: int, num_allowed: int, num_shown: int) -> list[str]:
    cycles = trace.cycles
    num_cycles, num_drafts = len(cycles["request"]), int((cycles["num_draft_tokens"] > 0).sum())
    same = num_reproduced(trace)
    lines = [
        f"{num_cycles} cycles, {num_drafts} of them with drafts, {len(trace.rows['flags'])} draft tokens; the "
        "recorded setting, replayed, keeps what was kept in "
        f"{'all' if same == num_cycles else f'{same} of {num_cycles}'} cycles."
    ]
    if trace.meta["is_full"]:
        lines.append(f"The trace is full ({trace.meta['max_rows']} rows): what came later is not in it.")
    if num_allowed < num:
        lines.append(f"Above --max-deferral-rate or --max-logprob-loss: {num - num_allowed} of {num} settings.")
    if num_shown < num_allowed:
        lines.append(
            f"Left out: {num_allowed - num_shown} settings that another one equals or beats in tokens per cycle, "
            "deferred and loss (--all shows them)."
        )
    return lines


def _document(trace: Trace, trace_file: Path, filters: Filters, shown: Sequence[Outcome], num: int) -> dict[str, Any]:
    return {
        "versions": run_versions(),
        "trace": {
            "file": str(trace_file),
            **trace.meta,
            "num_cycles": len(trace.cycles["request"]),
            "num_drafts": int((trace.cycles["num_draft_tokens"] > 0).sum()),
            "num_draft_tokens": len(trace.rows["flags"]),
            "num_cycles_reproduced": num_reproduced(trace),
        },
        "options": dataclasses.asdict(filters),
        "num_settings": num,
        "settings": [dataclasses.asdict(each) for each in shown],
        "statement": STATEMENT,
    }


def plot(allowed: Sequence[Outcome], best: Sequence[Outcome], path: Path, *, title: str) -> None:
    """Draws every setting into a PNG file: tokens per cycle over the deferral rate, and over the loss."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(11, 4.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    colormap = importlib.import_module("matplotlib").colormaps["viridis"]
    window_sizes = sorted({each.window_size for each in allowed if each.window_size is not None})
    axes: tuple[tuple[Callable[[Outcome], float], str], ...] = (
        (lambda each: 100 * each.deferral_rate, "deferred, % of native rejections that mattered"),
        (lambda each: each.logprob_loss, "log-probability given up, nats per deferred token"),
    )
    for panel, (risk, label) in zip(panels, axes, strict=True):

        def points(
            chosen: Sequence[Outcome], risk: Callable[[Outcome], float] = risk
        ) -> tuple[list[float], list[float]]:
            return [risk(each) for each in chosen], [each.tokens_per_cycle for each in chosen]

        for i, window_size in enumerate(window_sizes):
            color = colormap(i / max(len(window_sizes) - 1, 1))
            own = [each for each in allowed if each.window_size == window_size]
            panel.plot(*points(own), "o", color=color, markersize=4, alpha=0.7, label=f"W={window_size}")
        ringed = [each for each in best if not each.is_marked]
        panel.plot(*points(ringed), "o", color="black", markersize=8, fillstyle="none", label="not beaten")
        marks: tuple[tuple[str, str, dict[str, Any]], ...] = (
            ("standard", "*", {"color": "tab:red", "markersize": 10}),
            ("recorded", "D", {"color": "tab:orange", "markersize": 12, "fillstyle": "none", "markeredgewidth": 2}),
        )
        for name, marker, style in marks:
            own = [each for each in allowed if getattr(each, f"is_{name}")]
            panel.plot(*points(own), marker, label=name, **style)
        panel.set_xlabel(label)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("tokens per cycle, replayed")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize="small")
    figure.suptitle(f"{title}; each point is one setting (W, threshold, k)", fontsize="medium")
    write_whole(path, functools.partial(figure.savefig, dpi=150, format="png"))
