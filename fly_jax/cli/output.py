"""What commands share in printing: the two consoles, progress, JSON, pictures, Ctrl-C. Imports nothing of JAX."""

import contextlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fly_jax.errors import UserError

INTERRUPTED = 130
"""Exit status after Ctrl-C."""


def results_console() -> Console:
    """Where results go: standard output."""
    return Console()


def notes_console() -> Console:
    """Where everything else goes: standard error."""
    return Console(stderr=True)


def print_note(console: Console, text: str) -> None:
    """A line that is no result."""
    console.print(text, style="dim", highlight=False, soft_wrap=True)


def print_json(document: dict[str, Any], *, allow_nan: bool = False) -> None:
    """One JSON document on standard output."""
    print(json.dumps(document, indent=2, allow_nan=allow_nan))


@contextlib.contextmanager
def progress_bars(console: Console) -> Iterator[Callable[[str, float], None]]:
    """A function of a label and the fraction done, which draws a bar for each label; without a terminal, a line."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def report(label: str, fraction: float) -> None:
            if label not in tasks:
                tasks[label] = progress.add_task(label, total=1.0)
                if not console.is_terminal:
                    console.print(label, style="dim", highlight=False)
            progress.update(tasks[label], completed=fraction)

        yield report


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turns Ctrl-C into its exit status."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def has_matplotlib() -> bool:
    """Whether pictures can be drawn; matplotlib is an extra."""
    return importlib.util.find_spec("matplotlib") is not None


def check_plot(path: Path | None) -> None:
    """Refuses what `--plot` cannot draw to, before minutes of measuring.

    Raises:
      UserError: it is not a PNG file in a folder that exists, or matplotlib is not installed.
    """
    if path is None:
        return
    if path.suffix != ".png" or not path.absolute().parent.is_dir():
        raise UserError(f"--plot must be a .png file in a folder that exists, got {path}.")
    if not has_matplotlib():
        raise UserError(
            "--plot needs matplotlib; install the bench extra: pip install 'fly-jax[bench]', or -e '.[bench]' in the "
            "repository."
        )
