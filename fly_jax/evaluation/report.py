"""What an evaluation found, as a JSON document and as Markdown."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fly_jax.decode.options import DraftModelOptions
from fly_jax.decode.prepare import STANDARD, TARGET_ONLY
from fly_jax.evaluation.options import EvaluationOptions
from fly_jax.evaluation.statistics import Interval, Quality, Speed, quality, speed
from fly_jax.evaluation.tasks import Task

LOSSY = (
    "FLy is lossy: read its speed together with retention and its interval. In parentheses: 95% bootstrap intervals "
    "over tasks (accuracy, retention) or batches (speed); three tasks either way where all agree; none where all texts "
    "are target-only's, or of fewer than 6."
)


@dataclasses.dataclass(frozen=True)
class Findings:
    """The figures of an evaluation.

    Attributes:
      modes: their names, target-only first.
      quality: by batch size and mode.
      speed: by batch size and mode.
      num_done: units finished.
      num_planned: units in all.
    """

    modes: Sequence[str]
    quality: Mapping[int, Mapping[str, Quality]]
    speed: Mapping[int, Mapping[str, Speed]]
    num_done: int
    num_planned: int

    @property
    def first(self) -> Mapping[str, Quality]:
        """The quality at the smallest batch size."""
        return next(iter(self.quality.values()))


def findings(
    records: Sequence[Mapping[str, Any]], modes: Sequence[str], tasks: Sequence[Task], num_planned: int, *, greedy: bool
) -> Findings:
    """The figures of the finished units, at least one."""
    families = {task.name: task.family for task in tasks}
    by_size: dict[int, list[Mapping[str, Any]]] = {}
    for record in sorted(records, key=lambda record: record["unit"]):
        by_size.setdefault(record["unit"][0], []).append(record)
    return Findings(
        modes,
        {
            size: {mode: quality(each, mode, families, greedy=greedy) for mode in modes}
            for size, each in by_size.items()
        },
        {size: {mode: speed(each, mode, STANDARD) for mode in modes} for size, each in by_size.items()},
        len(records),
        num_planned,
    )


def document(found: Findings, options: EvaluationOptions, model: str, versions: Mapping[str, str]) -> dict[str, Any]:
    """Everything measured, ready for `json.dumps`.

    Args:
      found: what was measured.
      options: of the evaluation.
      model: the target's name.
      versions: of what the figures depend on.
    """

    def fields(
        by_size: Mapping[int, Mapping[str, Quality]] | Mapping[int, Mapping[str, Speed]],
    ) -> list[dict[str, Any]]:
        return [
            {"batch_size": size, "mode": mode, **dataclasses.asdict(each)}
            for size, by_mode in by_size.items()
            for mode, each in by_mode.items()
        ]

    return {
        "versions": dict(versions),
        "config": options.to_dict(model),
        "complete": found.num_done == found.num_planned,
        "num_batches_done": found.num_done,
        "num_batches_planned": found.num_planned,
        "lossy_modes": [mode for mode in found.modes if mode not in (TARGET_ONLY, STANDARD)],
        "quality": fields(found.quality),
        "speed": fields(found.speed),
    }


def markdown(found: Findings, options: EvaluationOptions, model: str, versions: Mapping[str, str]) -> str:
    """The report to read; the arguments are those of `document`."""
    done = ""
    if found.num_done < found.num_planned:
        done = f" **Unfinished: {found.num_done} of {found.num_planned} batches.**"
    size, by_mode = next(iter(found.quality.items()))
    sections = [
        f"# FLy on {model}",
        f"Drafts by {_drafting(options)}, K={options.decode.num_speculative_tokens}; "
        f"{by_mode[TARGET_ONLY].num_tasks} tasks ({options.workload}), at most "
        f"{options.decode.max_tokens} tokens each; {_sampling(options)}; {versions['platform']}, "
        f"Python {versions['python']}, jax {versions['jax']}.{done}",
        LOSSY,
        f"## What it writes (batch size {size})",
        _table(["", *found.modes], _quality_rows(found)),
        "lost, won: tasks that target-only solves and the mode does not, and the reverse. changed texts: not "
        "target-only's, token for token. repetition: share of repeated 4-grams in a text.",
        "## How fast it is",
        *_speed_tables(found),
        "tokens/s: of decoding, all requests of a batch together until the last of them is done, without prefill and "
        "compilation; a mode that writes longer texts has more tokens to count. Total time: prefill included.",
        "## In the columns of FLy's authors",
        _table(_AUTHORS_COLUMNS, _authors_rows(found, options, model, versions)),
    ]
    return "\n\n".join(sections) + "\n"


_AUTHORS_COLUMNS = (
    "accelerator",
    "target / draft",
    "method",
    "K",
    "workload",
    "batch",
    "speed over standard",
    "lowest retention",
)


def _quality_rows(found: Findings) -> list[list[str]]:
    shown: dict[str, Callable[[Quality], str]] = {
        "accuracy": lambda each: _percent(each.accuracy),
        "retention": _retention,
        "lost, won": lambda each: f"{each.num_lost}, {each.num_won}",
        "changed texts": lambda each: "-" if each.changed is None else f"{each.changed:.0%}",
        "repetition": lambda each: f"{each.repetition:.1%}",
        "tokens per cycle": lambda each: f"{each.tokens_per_cycle:.2f}",
        "drafts kept": lambda each: "-" if each.acceptance_rate is None else f"{each.acceptance_rate:.0%}",
        "deferrals per 100 tokens": lambda each: f"{each.deferrals:.1f}",
    }
    rows = [[label, *(show(found.first[mode]) for mode in found.modes)] for label, show in shown.items()]
    for family, count in found.first[TARGET_ONLY].num_by_family.items():
        accuracy = [f"{found.first[mode].accuracy_by_family[family]:.0%}" for mode in found.modes]
        rows.append([f"accuracy: {family} ({count})", *accuracy])
    return rows


def _speed_tables(found: Findings) -> list[str]:
    speculative = [mode for mode in found.modes if mode != TARGET_ONLY]
    retention = [
        [str(size), *(_retention(by_mode[mode]) for mode in speculative)] for size, by_mode in found.quality.items()
    ]
    lossy = [mode for mode in speculative if mode != STANDARD]

    def table(title: str, modes: Sequence[str], show: Callable[[Speed], str]) -> str:
        rows = [[str(size), *(show(by_mode[mode]) for mode in modes)] for size, by_mode in found.speed.items()]
        return f"{title}:\n\n{_table(['batch size', *modes], rows)}"

    return [
        table("tokens/s", found.modes, lambda each: f"{each.tokens_per_second:.1f}"),
        table("tokens/s over target-only", speculative, lambda each: _times(each.over_target_only)),
        table("tokens/s over standard", lossy, lambda each: _times(each.over_standard)),
        table("total time over standard (below 1 is faster)", found.modes, _total_time),
        f"retention:\n\n{_table(['batch size', *speculative], retention)}",
    ]


def _total_time(each: Speed) -> str:
    return f"{each.total_over_standard:.2f} ({each.decode_seconds + each.prefill_seconds:.0f} s)"


def _authors_rows(
    found: Findings, options: EvaluationOptions, model: str, versions: Mapping[str, str]
) -> list[list[str]]:
    sizes = list(found.speed)
    drafter = options.decode.drafter
    draft = drafter.draft_model if isinstance(drafter, DraftModelOptions) else _drafting(options)
    rows = []
    for mode in found.modes:
        if mode in (TARGET_ONLY, STANDARD):
            continue
        ratios = [found.speed[size][mode].over_standard.value for size in sizes]
        # The worst of all batch sizes stands beside the speeds of all.
        worst = min((found.quality[size][mode] for size in sizes), key=lambda each: _value(each.retention))
        rows.append(
            [
                versions["platform"],
                f"{model} / {draft}",
                mode,
                str(options.decode.num_speculative_tokens),
                f"{options.workload}, {found.first[mode].num_tasks} tasks",
                ", ".join(map(str, sizes)),
                f"{min(ratios):.3f}-{max(ratios):.3f}",
                _retention(worst),
            ]
        )
    return rows


def _drafting(options: EvaluationOptions) -> str:
    drafter = options.decode.drafter
    if isinstance(drafter, DraftModelOptions):
        return f"{drafter.name} ({drafter.draft_model})"
    return "none" if drafter is None else drafter.name


def _sampling(options: EvaluationOptions) -> str:
    temperature = options.decode.sampling.temperature
    return "greedy" if temperature is None else f"temperature {temperature}, seeds {', '.join(map(str, options.seeds))}"


def _retention(each: Quality) -> str:
    return "-" if each.retention is None else _percent(each.retention)


def _value(each: Interval | None) -> float:
    return 0.0 if each is None else each.value


def _percent(each: Interval) -> str:
    if each.low is None or each.high is None:
        return f"{each.value:.1%}"
    return f"{each.value:.1%} ({each.low:.1%} to {each.high:.1%})"


def _times(each: Interval) -> str:
    if each.low is None or each.high is None or each.low == each.high:
        return f"{each.value:.2f}x"
    return f"{each.value:.2f}x ({each.low:.2f} to {each.high:.2f})"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
