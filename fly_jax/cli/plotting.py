"""Whether pictures can be drawn; matplotlib is an extra."""

import importlib.util
from pathlib import Path

from fly_jax.errors import UserError


def has_matplotlib() -> bool:
    """Whether matplotlib is installed."""
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
