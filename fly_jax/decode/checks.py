"""Settings as people write them: what is refused, in the same words everywhere."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from fly_jax.errors import UserError

_Number = TypeVar("_Number", int, float)


def parse_numbers(option: str, text: str, kind: Callable[[str], _Number], wanted: str) -> tuple[_Number, ...]:
    """Numbers with commas between them.

    Args:
      option: what to call them in an error.
      text: as it is given.
      kind: `int` or `float`.
      wanted: what they should be, in words.

    Raises:
      UserError: they are something else.
    """
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{option} must be {wanted}, got {text!r}.") from None


def check_int(name: str, value: Any, *, least: int) -> None:
    """Refuses what is no integer in `[least, 2**32)`.

    Raises:
      UserError: it is none.
    """
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not least <= value < 2**32:
        raise UserError(f"{name} must be an integer from {least} to 2**32 - 1, got {value!r}.")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Refuses what is not one of a few words.

    Raises:
      UserError: it is not.
    """
    if value not in allowed:
        raise UserError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")
