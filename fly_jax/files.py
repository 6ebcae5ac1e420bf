"""Files written whole or not at all."""

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_whole(
    path: str | Path,
    content: bytes | Callable[[BinaryIO], object],
    *,
    replace: bool = True,
    sync: bool = False,
) -> None:
    """Writes a file so that a reader, or a crash, never meets half of it: beside its place, then moved there.

    Args:
      path: where it is to be; a link is followed, and a file that is replaced hands its permissions on.
      content: its bytes, or a function that writes them to an open file.
      replace: whether a file that is there may be replaced.
      sync: whether it must survive a power cut as well, which takes a wait for the disk.

    Raises:
      FileExistsError: there is one and `replace` is False.
      OSError: it cannot be written; what was there before is still there.
    """
    path = Path(path).resolve()
    scratch = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with scratch.open("xb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        if not replace:
            os.link(scratch, path)
            scratch.unlink()
            return
        if path.exists():
            shutil.copymode(path, scratch)
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
