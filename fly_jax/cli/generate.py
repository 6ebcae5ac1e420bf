"""`fly-jax generate`: the run and what it prints."""

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from fly_jax.cli.output import (
    INTERRUPTED,
    notes_console,
    print_json,
    print_note,
    progress_bars,
    results_console,
)
from fly_jax.cli.tables import LEGEND, document, prompt_table, totals_table
from fly_jax.decode.checkpoints.load import load_model
from fly_jax.decode.comparison import Comparison, PromptRun, prepare
from fly_jax.decode.drafters import Drafter, DraftModel
from fly_jax.decode.options import DecodeOptions
from fly_jax.decode.prepare import make_drafter
from fly_jax.decode.prompts import BUILTIN_PROMPTS, Prompt
from fly_jax.decode.recording import check_trace_path, record, save_trace, trace_writer
from fly_jax.errors import UserError
from fly_jax.traces.file import TraceWriter

logger = logging.getLogger("fly_jax")


def generate(
    options: DecodeOptions,
    *,
    prompt: Sequence[str] | None,
    prompt_file: Path | None,
    trace: Path | None,
    trace_mode: str,
    json_output: bool,
) -> None:
    """Runs the command; a stopped run prints what it finished and exits with status 130.

    Args:
      options: how to decode.
      prompt: texts; None for the built-in ones, unless there is a file.
      prompt_file: one more.
      trace: where to record a trace, if anywhere.
      trace_mode: the name of the mode that decides while it is recorded.
      json_output: print one JSON document instead of tables.

    Raises:
      UserError: an option, a prompt or a model cannot be used.
    """
    console, out = notes_console(), results_console()
    prompts = prompts_of(prompt, prompt_file)
    check_trace_path(trace)
    logger.warning("FLy is lossy: its text may differ from what the target alone would write.")
    with progress_bars(console) as report:
        loaded = load_model(options.model, progress=report)
        drafter = make_drafter(options, loaded, report)
        print_vocabularies(drafter, console)
        comparison = prepare(loaded, drafter, prompts, options, report)
    writer = None
    if trace is not None:
        traced = comparison.modes[trace_mode].config
        writer = trace_writer(options, loaded.name, traced, source="fly-jax generate")
    runs, interrupted = _run(comparison, console, None if json_output else out)
    if json_output:
        config = {
            **options.to_dict(),
            "model": loaded.name,
            "max_model_len": comparison.max_model_len,
            "prompt": None if prompt is None else list(prompt),
            "prompt_file": None if prompt_file is None else str(prompt_file),
            "trace": None if trace is None else str(trace),
            "trace_mode": trace_mode,
        }
        print_json(document(runs, config=config, interrupted=interrupted))
    elif (table := totals_table(runs)) is not None:
        out.print(table)
        out.print(LEGEND, style="dim")
    if writer is not None and trace is not None and not interrupted:
        with progress_bars(console) as report:
            interrupted = not _record(writer, trace_mode, comparison, report)
        if not interrupted:
            write_trace(writer, trace, console)
    if interrupted:
        raise SystemExit(INTERRUPTED)


def prompts_of(texts: Sequence[str] | None, path: Path | None) -> list[Prompt]:
    """The prompts given as text and as a file, or the built-in ones.

    Raises:
      UserError: the file cannot be read, or a prompt is empty.
    """
    given = list(texts or [])
    if path is not None:
        try:
            given.append(path.read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--prompt-file {path} cannot be read: {error}.") from error
    if any(not text.strip() for text in given):
        raise UserError("The prompt is empty.")
    return [Prompt(f"prompt {i + 1}", text) for i, text in enumerate(given)] or list(BUILTIN_PROMPTS)


def print_vocabularies(drafter: Drafter | None, console: Console) -> None:
    """Says how large the intersection is where the draft model has another vocabulary."""
    if isinstance(drafter, DraftModel) and drafter.vocab_mapping is not None:
        mapping = drafter.vocab_mapping
        print_note(
            console,
            f"vocabularies: target {mapping.target_vocab_size}, draft {mapping.draft_vocab_size}, "
            f"{mapping.num_common_tokens} tokens in common",
        )


def write_trace(writer: TraceWriter, path: Path, console: Console) -> None:
    """Writes what was collected, and says so.

    Raises:
      UserError: it cannot be written.
    """
    save_trace(writer, path)
    num_drafts = len(writer.trace().rows["flags"])
    print_note(console, f"{path}: {num_drafts} draft tokens; `fly-jax sweep {path}` replays them")


def _run(comparison: Comparison, console: Console, out: Console | None) -> tuple[list[PromptRun], bool]:
    """Decodes prompt by prompt and prints each to `out`; also says whether the user interrupted it."""
    runs: list[PromptRun] = []
    for i in range(len(comparison.prompts)):
        with progress_bars(console) as report:
            run, interrupted = comparison.run(i, report)
        if run.generations:
            runs.append(run)
        if run.generations and out is not None:
            out.print(prompt_table(run))
        if interrupted:
            return runs, True
    return runs, False


def _record(writer: TraceWriter, name: str, comparison: Comparison, report: Callable[[str, float], None]) -> bool:
    """Decodes the prompts once more into the trace; False if the user interrupted it."""
    options, count = comparison.options, len(comparison.prompts)
    try:
        record(
            writer,
            comparison.modes[name],
            comparison.prompt_token_ids,
            sampling=options.sampling,
            max_tokens=[options.max_tokens] * count,
            eos_token_ids=comparison.loaded.tokenizer.eos_token_ids,
            seeds=[options.seed] * count,
            batch_size=1,
            report=functools.partial(report, f"trace: {name}"),
        )
    except KeyboardInterrupt:
        return False
    return True
