"""`fly-jax eval`: its options read and checked, the run, what it writes and prints."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markdown import Markdown

from fly_jax.cli.app import INTERRUPTED

if TYPE_CHECKING:
    from fly_jax.config import FlyConfig
    from fly_jax.evaluation.report import Findings
    from fly_jax.evaluation.results import ResultFile
    from fly_jax.evaluation.run import Evaluation, Mode, Unit
    from fly_jax.evaluation.tasks import Task
    from fly_jax.traces.file import TraceWriter

logger = logging.getLogger("fly_jax")

_NOT_IN_CONFIG = (
    "resume",
    "output",
    "json_output",
    "trace",
    "trace_mode",
    "batch_sizes",
    "min_batches",
    "seeds",
    "split",
)
"""Options that do not decide the results of a batch, or are part of others."""


def evaluate(options: Mapping[str, Any]) -> None:
    """Runs the command with the options as given; a stopped run reports what it finished and exits with status 130."""
    from fly_jax.cli.generate import (
        check_drafter_options,
        load,
        make_drafter,
        print_vocabularies,
        sampling_params,
    )
    from fly_jax.cli.tables import progress_bars, versions
    from fly_jax.decode.recording import check_trace_path, save_trace, trace_writer
    from fly_jax.evaluation.results import check_folder, open_results
    from fly_jax.evaluation.run import plan, prepare

    console = Console(stderr=True)
    sampling, configs = sampling_params(options), fly_configs(options["fly"], options["num_speculative_tokens"])
    batch_sizes = _numbers("--batch-sizes", options["batch_sizes"], least=1)
    seeds = _numbers("--seeds", options["seeds"], least=0)
    if sampling.temperature is None and len(seeds) > 1:
        raise _error(f"--seeds {options['seeds']}: at temperature 0 nothing is drawn; set --temperature, or one seed.")
    check_drafter_options(options)
    check_trace_path(options["trace"])
    folder = Path(options["output"])
    check_folder(folder, resume=options["resume"])
    tasks = _tasks(options)
    logger.warning("FLy is lossy: its text may differ from what the target alone would write.")
    with progress_bars(console) as report:
        loaded = load(options["model"], report)
        drafter = make_drafter(options, loaded, report)
        print_vocabularies(drafter, console)
    evaluation = prepare(
        loaded,
        drafter,
        tasks,
        configs=configs,
        sampling=sampling,
        max_tokens=options["max_tokens"],
        raw=options["raw"],
    )
    traced = _traced_mode(evaluation, options["trace_mode"])
    writer = trace_writer(options, loaded.name, traced.config, source="fly-jax eval")
    config = _config(options, evaluation, configs)
    results = open_results(folder, config=config, tasks=tasks, versions=versions(), resume=options["resume"])
    config |= {"batch_sizes": batch_sizes, "seeds": seeds}
    units = plan(len(tasks), batch_sizes, seeds, options["min_batches"])
    interrupted = False
    try:
        with progress_bars(console) as report:
            _run(evaluation, units, results, report)
    except KeyboardInterrupt:
        interrupted = True
    done = {tuple(unit.key) for unit in units}
    records = [record for record in results.records if tuple(record["unit"]) in done]
    if records:
        _report(evaluation, records, len(units), config, folder, options)
        console.print(f"report.md, report.json and pictures are in {folder}", style="dim", soft_wrap=True)
    try:
        if writer is not None and not interrupted:
            with progress_bars(console) as report:
                _record(writer, traced, evaluation, batch_sizes[0], seeds[0], report)
            save_trace(writer, options["trace"], console)
    except KeyboardInterrupt:
        interrupted = True
    if interrupted:
        console.print(f"{len(records)} of {len(units)} batches are done; the same command with --resume goes on.")
        raise SystemExit(INTERRUPTED)


def fly_configs(given: Sequence[str] | None, num_speculative_tokens: int) -> dict[str, FlyConfig]:
    """FLy's settings as `--fly` has them, by the name of the mode.

    Raises:
      UserError: one of them is not understood, out of range, or there twice.
    """
    from fly_jax.config import FlyConfig

    kinds: Mapping[str, Callable[[str], Any]] = {"window_size": int, "entropy_threshold": float, "entropy_top_k": int}
    configs: dict[str, FlyConfig] = {}
    for text in given or [""]:
        fields: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            name, _, value = (each.strip() for each in part.partition("="))
            if name not in kinds or name in fields:
                raise _error(f"--fly {text!r}: {name!r} must be one of {', '.join(kinds)}, each once, as NAME=VALUE.")
            try:
                fields[name] = kinds[name](value)
            except ValueError:
                raise _error(f"--fly {text!r}: {name} must be a number, got {value!r}.") from None
        try:
            config = FlyConfig.from_vllm(
                {
                    "rejection_sample_method": "fly",
                    "num_speculative_tokens": num_speculative_tokens,
                    **{f"fly_{name}": value for name, value in fields.items()},
                }
            )
        except (TypeError, ValueError) as error:
            raise _error(f"--fly {text!r}: {error}.") from error
        assert config is not None
        name = f"fly W={config.window_size} θ={config.entropy_threshold} k={config.entropy_top_k}"
        if name in configs:
            raise _error(f"--fly {text!r} is there twice.")
        configs[name] = config
    return configs


def _tasks(options: Mapping[str, Any]) -> list[Task]:
    from fly_jax.evaluation.tasks import load_tasks

    path = options["tasks"]
    tasks = load_tasks(None if path is None else Path(path))
    chosen = [task for task in tasks if options["split"] in ("all", task.split)]
    if not chosen:
        raise _error(f"--tasks {path} has no task of --split {options['split']}; --split all takes every task.")
    return chosen


def _run(
    evaluation: Evaluation, units: Sequence[Unit], results: ResultFile, report: Callable[[str, float], None]
) -> None:
    """Decodes what is not finished yet, batch size by batch size, so that each is compiled for once."""
    for batch_size in dict.fromkeys(unit.batch_size for unit in units):
        label = f"batch size {batch_size}"
        own = [unit for unit in units if unit.batch_size == batch_size]
        todo = [unit for unit in own if not results.has(unit.key)]
        if todo:
            for i, mode in enumerate(evaluation.modes):
                report(f"{label}: compile", i / len(evaluation.modes))
                mode.generator.warm_up(config=mode.config, sampling=evaluation.sampling, batch_size=batch_size)
            report(f"{label}: compile", 1.0)
        for unit in todo:
            done = own.index(unit)
            inside = functools.partial(_report_inside, report, label, done, len(own))
            results.append(evaluation.run(unit, done, inside))
        report(label, 1.0)


def _report_inside(report: Callable[[str, float], None], label: str, done: int, count: int, fraction: float) -> None:
    report(label, (done + fraction) / count)


def _traced_mode(evaluation: Evaluation, name: str) -> Mode:
    """Standard verification, or the first of FLy's."""
    from fly_jax.evaluation.run import STANDARD

    return next(each for each in evaluation.modes[1:] if (each.name == STANDARD) == (name == STANDARD))


def _record(
    writer: TraceWriter,
    mode: Mode,
    evaluation: Evaluation,
    batch_size: int,
    seed: int,
    report: Callable[[str, float], None],
) -> None:
    """Decodes all tasks once more into the trace."""
    from fly_jax.decode.recording import record
    from fly_jax.evaluation.run import task_seed

    record(
        writer,
        mode.generator,
        evaluation.prompts,
        config=mode.config,
        sampling=evaluation.sampling,
        max_tokens=evaluation.max_tokens,
        eos_token_ids=evaluation.loaded.tokenizer.eos_token_ids,
        seeds=[task_seed(seed, i) for i in range(len(evaluation.tasks))],
        batch_size=batch_size,
        report=functools.partial(report, f"trace: {mode.name}"),
    )


def _report(
    evaluation: Evaluation,
    records: Sequence[Mapping[str, Any]],
    num_planned: int,
    config: Mapping[str, Any],
    folder: Path,
    options: Mapping[str, Any],
) -> None:
    """Writes the report and the pictures, and prints the report."""
    from fly_jax.cli.tables import versions
    from fly_jax.evaluation.report import document, findings, markdown, write_whole

    greedy = evaluation.sampling.temperature is None
    names = [mode.name for mode in evaluation.modes]
    found = findings(records, names, evaluation.tasks, num_planned, greedy=greedy)
    text = json.dumps(document(found, config, versions()), indent=2, allow_nan=False)
    report = markdown(found, config, versions())
    write_whole(folder / "report.json", text.encode())
    write_whole(folder / "report.md", report.encode())
    _draw(found, config, folder)
    if options["json_output"]:
        print(text)
    else:
        Console().print(Markdown(report))


def _draw(found: Findings, config: Mapping[str, Any], folder: Path) -> None:
    from fly_jax.cli.plotting import has_matplotlib
    from fly_jax.evaluation.plots import pictures
    from fly_jax.evaluation.report import write_whole

    if not has_matplotlib():
        logger.warning(
            "matplotlib is not installed, so nothing was drawn: pip install 'fly-jax[bench]', then --resume."
        )
        return
    title = f"{config['model']}, drafts by {config['drafter']}, K={config['num_speculative_tokens']}"
    for name, data in pictures(found, title).items():
        write_whole(folder / name, data)


def _config(options: Mapping[str, Any], evaluation: Evaluation, configs: Mapping[str, FlyConfig]) -> dict[str, Any]:
    """What decides the results of a batch, as JSON has it."""
    return {
        **{name: value for name, value in options.items() if name not in _NOT_IN_CONFIG},
        "tasks": f"{options['tasks'] or 'built-in'}, {options['split']}",
        "model": evaluation.loaded.name,
        "fly": list(configs),
        "model_files": _identity(options["model"]),
        "draft_model_files": _identity(options["draft_model"]),
    }


def _identity(path: str | None) -> str | None:
    """Tells one model from another that has the same name: paths, sizes and times of its files; None is the default."""
    if path is None:
        return None
    files = sorted(Path(path).iterdir()) if Path(path).is_dir() else [Path(path)]
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


def _numbers(option: str, text: str, *, least: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise _error(f"{option} must be whole numbers like 1,4,8, got {text!r}.") from None
    if min(numbers) < least or len(set(numbers)) < len(numbers) or max(numbers) >= 2**32:
        raise _error(f"{option} must be different numbers from {least} to 2**32 - 1, got {text!r}.")
    return numbers


def _error(message: str) -> Exception:
    from fly_jax.errors import UserError

    return UserError(message)
