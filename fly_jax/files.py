"""Files written whole or not at all."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_whole(path: str | Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Writes a file so that a reader, or a crash, never meets half of it: beside its place, then moved there.

    Args:
      path: where it is to be; what is there is replaced.
      content: its bytes, or a function that writes them to an open file.

    Raises:
      OSError: it cannot be written; what was there before is still there.
    """
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with scratch.open("wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
