"""Files written whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_whole(path: str | Path, content: bytes | Callable[[BinaryIO], object], *, replace: bool = True) -> None:
    """Writes a file so that a reader, or a crash, never meets half of it: beside its place, then moved there.

    Args:
      path: where it is to be; a link is followed, and a file that is replaced hands its permissions on.
      content: its bytes, or a function that writes them to an open file.
      replace: whether a file that is there may be replaced.

    Raises:
      FileExistsError: there is one and `replace` is False.
      OSError: it cannot be written; what was there before is still there.
    """
    path = Path(path).resolve()
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    os.close(descriptor)
    scratch = Path(name)
    try:
        with scratch.open("wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            file.flush()
            os.fsync(file.fileno())
        if not replace:
            scratch.chmod(_new_file_mode())
            os.link(scratch, path)
            scratch.unlink()
            return
        if path.exists():
            shutil.copymode(path, scratch)
        else:
            scratch.chmod(_new_file_mode())
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def _new_file_mode() -> int:
    """What `open` would give: a scratch file is made for its owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
