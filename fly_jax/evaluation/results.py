"""What an evaluation has finished so far: a file that a stopped run goes on with.

`results.jsonl` is JSON lines. The first is the header: `format`, `config` (the options that decide results), `tasks` (a
digest of them) and `versions`. Each other line is one unit (`fly_jax.evaluation.run.Unit`), decoded in every mode:

- `unit`: batch size, seed, how many tasks came before.
- `modes`: by name; each has `prefill_seconds`, `decode_seconds`, `num_tokens` and `num_cycles` (of all requests of the
  batch), `drafted_per_position`, `accepted_per_position`, `deferred_per_position` (of the scored requests), and
  `texts`, one for each scored request: `task`, `score`, `text`, `token_ids`, `num_deferred`, `num_cycles`,
  `finish_reason`.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fly_jax.errors import UserError
from fly_jax.evaluation.tasks import Task
from fly_jax.files import write_whole

FORMAT = "fly-jax eval 1"
FILE = "results.jsonl"


@dataclasses.dataclass(frozen=True)
class ResultFile:
    """An open results file.

    Attributes:
      path: of the file.
      records: units finished before, and since.
    """

    path: Path
    records: list[dict[str, Any]]

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a finished unit; it is on the disk when this returns."""
        try:
            with self.path.open("ab") as file:
                file.write(_line(record))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"{self.path} cannot be written to: {error}. --resume goes on from there.") from error
        self.records.append(dict(record))

    def has(self, key: Sequence[int]) -> bool:
        """Whether the unit is finished."""
        return any(record["unit"] == list(key) for record in self.records)


def open_results(
    folder: Path, *, config: dict[str, Any], tasks: Sequence[Task], versions: Mapping[str, str], resume: bool
) -> ResultFile:
    """Starts a results file in `folder`, or opens the one that is there.

    Args:
      folder: made if it is missing.
      config: the options that decide results, as JSON has them.
      tasks: what is evaluated.
      versions: of what results depend on.
      resume: whether to go on with a file that is there.

    Raises:
      UserError: there is a file and `resume` is False, or the file is of another run.
    """
    path = folder / FILE
    check_folder(folder, resume=resume)
    header = {"format": FORMAT, "config": config, "tasks": digest(tasks), "versions": dict(versions)}
    if not path.is_file():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, _line(header), replace=False, sync=True)
        except OSError as error:
            raise UserError(f"--output {folder} cannot be written to: {error}.") from error
        return ResultFile(path, [])
    whole, (found, *records) = _read(path)
    # As JSON gives it back: tuples are lists there.
    _check_same(path, found, json.loads(json.dumps(header)))
    try:
        # A line without its end was being written when the machine stopped.
        os.truncate(path, whole)
    except OSError as error:
        raise UserError(f"{path} cannot be written to: {error}.") from error
    return ResultFile(path, records)


def check_folder(folder: Path, *, resume: bool) -> None:
    """Refuses a folder that holds results already, unless the run goes on with them.

    Raises:
      UserError: it does.
    """
    if (folder / FILE).is_file() and not resume:
        raise UserError(f"{folder / FILE} is there already: pass --resume to go on with it, or name another --output.")


def digest(tasks: Sequence[Task]) -> str:
    """Tells one list of tasks from another."""
    text = json.dumps([dataclasses.asdict(task) for task in tasks], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """How many bytes are whole lines, and these."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    whole = data[: data.rfind(b"\n") + 1]
    try:
        lines = [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}. Name another --output.") from error
    if not lines or not isinstance(lines[0], dict) or lines[0].get("format") != FORMAT:
        raise UserError(f"{path} is no results file of this version of fly-jax eval. Name another --output.")
    if not all(isinstance(line, dict) and {"unit", "modes"} <= line.keys() for line in lines[1:]):
        raise UserError(f"{path} is damaged: a line is no unit. Name another --output.")
    return len(whole), lines


def _check_same(path: Path, found: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    for part in ("config", "versions"):
        for name in sorted({*found[part], *header[part]}):
            before, now = found[part].get(name), header[part].get(name)
            if before != now:
                raise UserError(
                    f"--resume: {path} was made with {name} {before!r}, now it is {now!r}. "
                    "Use the same, or start anew with another --output."
                )
    if found["tasks"] != header["tasks"]:
        raise UserError(f"--resume: {path} is of other tasks. Start anew with another --output.")


def _line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, allow_nan=False) + "\n").encode()
