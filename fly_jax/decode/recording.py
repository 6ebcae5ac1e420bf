"""Recording a trace: prompts decoded once more, untimed, every verification kept for `fly-jax sweep`."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np

from fly_jax.config import FlyConfig, SamplingParams
from fly_jax.decode.options import DecodeOptions, sampling_fields
from fly_jax.decode.prepare import Mode
from fly_jax.errors import UserError
from fly_jax.traces.file import TraceWriter
from fly_jax.traces.record import TraceRows


def trace_writer(options: DecodeOptions, model: str, config: FlyConfig | None, *, source: str) -> TraceWriter:
    """What `--trace` collects into.

    Args:
      options: how the texts are decoded.
      model: its name.
      config: of FLy, None for standard verification: what decides while the trace is recorded.
      source: which command.

    Raises:
      UserError: the setting cannot be replayed.
    """
    try:
        return TraceWriter(
            config,
            num_speculative_tokens=options.num_speculative_tokens,
            source=source,
            model=model,
            drafter=None if options.drafter is None else options.drafter.name,
            sampling=sampling_fields(options.sampling),
        )
    except ValueError as error:
        raise UserError(f"--trace: {error}.") from error


def check_trace_path(path: Path | None) -> None:
    """Refuses a place where no file can be, before anything is decoded.

    Raises:
      UserError: it is a folder, or its folder does not exist.
    """
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"--trace {path} is a folder: name a file, like trace.npz.")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--trace {path}: there is no such folder; make it first.")


def save_trace(writer: TraceWriter, path: Path) -> None:
    """Writes what was collected.

    Raises:
      UserError: it cannot be written.
    """
    try:
        writer.save(path)
    except OSError as error:
        raise UserError(f"--trace {path} cannot be written: {error}.") from error


def record(
    writer: TraceWriter,
    mode: Mode,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: SamplingParams,
    max_tokens: Sequence[int],
    eos_token_ids: Collection[int],
    seeds: Sequence[int],
    batch_size: int,
    report: Callable[[float], None],
) -> None:
    """Decodes prompts until all are done or the writer is full; the request's number is the prompt's index.

    Args:
      writer: what the verifications go to.
      mode: what decodes, with the setting that the writer was made with.
      prompts: token ids of each.
      sampling: as in `Generator.generate_batch`.
      max_tokens: for each prompt.
      eos_token_ids: tokens that end a text.
      seeds: for each prompt.
      batch_size: prompts decoded together.
      report: called with the fraction done.
    """
    for first in range(0, len(prompts), batch_size):
        report(first / len(prompts))
        add = _Batch(writer, first)
        mode.generator.generate_batch(
            prompts[first : first + batch_size],
            config=mode.config,
            sampling=sampling,
            max_tokens=max_tokens[first : first + batch_size],
            eos_token_ids=eos_token_ids,
            seed=seeds[first : first + batch_size],
            batch_size=batch_size,
            on_trace=add,
        )
        if writer.is_full:
            break
    report(1.0)


class _Batch:
    """Adds the cycles of one batch."""

    def __init__(self, writer: TraceWriter, first: int) -> None:
        self._writer, self._first, self._cycle = writer, first, 0

    def __call__(self, rows: TraceRows, active: np.ndarray) -> None:
        request = np.where(active, self._first + np.arange(len(active)), -1)
        self._writer.add(rows, request=request, cycle=self._cycle)
        self._cycle += 1
