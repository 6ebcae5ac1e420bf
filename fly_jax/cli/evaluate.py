"""`fly-jax eval`: its options read, the run, what it writes and prints."""

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.markdown import Markdown

from fly_jax.cli.generate import print_vocabularies, write_trace
from fly_jax.cli.output import (
    INTERRUPTED,
    has_matplotlib,
    notes_console,
    print_note,
    progress_bars,
    results_console,
)
from fly_jax.config import FlyConfig
from fly_jax.decode.checkpoints.load import load_model
from fly_jax.decode.checks import parse_numbers
from fly_jax.decode.options import DecodeOptions, fly_config
from fly_jax.decode.prepare import STANDARD, Mode, make_drafter
from fly_jax.decode.recording import check_trace_path, record, trace_writer
from fly_jax.errors import UserError
from fly_jax.evaluation.options import ALL, EvaluationOptions
from fly_jax.evaluation.plots import pictures
from fly_jax.evaluation.report import document, findings, markdown
from fly_jax.evaluation.results import ResultFile, check_folder, open_results
from fly_jax.evaluation.run import Evaluation, Unit, plan, prepare, task_seed
from fly_jax.evaluation.tasks import Task, load_tasks
from fly_jax.files import write_whole
from fly_jax.traces.file import TraceWriter
from fly_jax.versions import run_versions

logger = logging.getLogger("fly_jax")

_Number = TypeVar("_Number", int, float)


def evaluation_options(
    decode: DecodeOptions,
    *,
    fly: Sequence[str] | None,
    tasks: Path | None,
    split: str,
    batch_sizes: str,
    min_batches: int,
    seeds: str,
) -> EvaluationOptions:
    """The options as the command line has them, checked.

    Raises:
      UserError: one is not understood, out of range or excluded by another.
    """
    like = "whole numbers like 1,4,8"
    return EvaluationOptions(
        decode,
        fly=tuple(parse_fly(text) for text in fly or [""]),
        tasks=tasks,
        split=split,
        batch_sizes=parse_numbers("--batch-sizes", batch_sizes, int, like),
        seeds=parse_numbers("--seeds", seeds, int, like),
        min_batches=min_batches,
    )


def parse_fly(text: str) -> FlyConfig:
    """FLy's settings as `--fly` has them: names and values, with the defaults for what is left out.

    Raises:
      UserError: one of them is not understood, or out of range.
    """
    default = FlyConfig().to_dict()
    given: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        name, _, value = (each.strip() for each in part.partition("="))
        if name not in default or name in given:
            raise UserError(f"--fly {text!r}: {name!r} must be one of {', '.join(default)}, each once, as NAME=VALUE.")
        given[name] = value

    def number(name: str, kind: Callable[[str], _Number], otherwise: Any) -> Any:
        try:
            return kind(given[name]) if name in given else otherwise
        except ValueError:
            raise UserError(f"--fly {text!r}: {name} must be a number, got {given[name]!r}.") from None

    window_size = number("window_size", int, default["window_size"])
    threshold = number("entropy_threshold", float, default["entropy_threshold"])
    top_k = number("entropy_top_k", int, default["entropy_top_k"])
    try:
        return fly_config(window_size=window_size, entropy_threshold=threshold, entropy_top_k=top_k)
    except UserError as error:
        raise UserError(f"--fly {text!r}: {error}") from error


def evaluate(
    options: EvaluationOptions, *, output: Path, resume: bool, trace: Path | None, trace_mode: str, json_output: bool
) -> None:
    """Runs the command; a stopped run reports what it finished and exits with status 130.

    Args:
      options: what to evaluate.
      output: the folder for results, report and pictures.
      resume: go on with what is there.
      trace: where to record a trace, if anywhere.
      trace_mode: "standard", or "fly" for the first of FLy's: what decides while it is recorded.
      json_output: print the report as JSON.

    Raises:
      UserError: an option, a task or a model cannot be used.
    """
    console, decode = notes_console(), options.decode
    check_trace_path(trace)
    check_folder(output, resume=resume)
    tasks = _tasks(options)
    logger.warning("FLy is lossy: its text may differ from what the target alone would write.")
    with progress_bars(console) as report:
        loaded = load_model(decode.model, progress=report)
        drafter = make_drafter(decode, loaded, report)
        print_vocabularies(drafter, console)
    evaluation = prepare(loaded, drafter, tasks, decode, options.modes)
    traced = _traced_mode(evaluation, trace_mode)
    writer = None
    if trace is not None:
        writer = trace_writer(decode, loaded.name, traced.config, source="fly-jax eval")
    results = open_results(
        output, config=options.batch_config(loaded.name), tasks=tasks, versions=run_versions(), resume=resume
    )
    units = plan(len(tasks), options.batch_sizes, options.seeds, options.min_batches)
    interrupted = False
    try:
        with progress_bars(console) as report:
            _run(evaluation, units, results, report)
    except KeyboardInterrupt:
        interrupted = True
    planned = {tuple(unit.key) for unit in units}
    records = [record for record in results.records if tuple(record["unit"]) in planned]
    if records:
        _report(evaluation, options, records, len(units), output, json_output=json_output)
        print_note(console, f"report.md, report.json and pictures are in {output}")
    try:
        if writer is not None and trace is not None and not interrupted:
            with progress_bars(console) as report:
                _record(writer, traced, evaluation, options, report)
            write_trace(writer, trace, console)
    except KeyboardInterrupt:
        interrupted = True
    if interrupted:
        console.print(f"{len(records)} of {len(units)} batches are done; the same command with --resume goes on.")
        raise SystemExit(INTERRUPTED)


def _tasks(options: EvaluationOptions) -> list[Task]:
    chosen = [task for task in load_tasks(options.tasks) if options.split in (ALL, task.split)]
    if not chosen:
        raise UserError(
            f"--tasks {options.tasks} has no task of --split {options.split}; --split all takes every task."
        )
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
    return next(each for each in evaluation.modes[1:] if (each.name == STANDARD) == (name == STANDARD))


def _record(
    writer: TraceWriter,
    mode: Mode,
    evaluation: Evaluation,
    options: EvaluationOptions,
    report: Callable[[str, float], None],
) -> None:
    """Decodes all tasks once more into the trace."""
    record(
        writer,
        mode,
        evaluation.prompts,
        sampling=evaluation.sampling,
        max_tokens=evaluation.max_tokens,
        eos_token_ids=evaluation.loaded.tokenizer.eos_token_ids,
        seeds=[task_seed(options.seeds[0], i) for i in range(len(evaluation.tasks))],
        batch_size=options.batch_sizes[0],
        report=functools.partial(report, f"trace: {mode.name}"),
    )


def _report(
    evaluation: Evaluation,
    options: EvaluationOptions,
    records: Sequence[Mapping[str, Any]],
    num_planned: int,
    folder: Path,
    *,
    json_output: bool,
) -> None:
    """Writes the report and the pictures, and prints the report."""
    greedy = evaluation.sampling.temperature is None
    names = [mode.name for mode in evaluation.modes]
    found = findings(records, names, evaluation.tasks, num_planned, greedy=greedy)
    model, versions = evaluation.loaded.name, run_versions()
    text = json.dumps(document(found, options, model, versions), indent=2, allow_nan=False)
    report = markdown(found, options, model, versions)
    _write(folder / "report.json", text.encode())
    _write(folder / "report.md", report.encode())
    if has_matplotlib():
        decode = options.decode
        drafter = "none" if decode.drafter is None else decode.drafter.name
        for name, data in pictures(found, f"{model}, drafts by {drafter}, K={decode.num_speculative_tokens}").items():
            _write(folder / name, data)
    else:
        logger.warning(
            "matplotlib is not installed, so nothing was drawn: pip install 'fly-jax[bench]', then --resume."
        )
    if json_output:
        print(text)
    else:
        results_console().print(Markdown(report))


def _write(path: Path, data: bytes) -> None:
    try:
        write_whole(path, data)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}.") from error
