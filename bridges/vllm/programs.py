"""The jitted functions that decide steps: one for each platform, and how many programs they have compiled."""

import functools
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import jax
import torch

from fly_jax import compat

P = ParamSpec("P")
R = TypeVar("R")

_JITTED: list[Any] = []


def program(function: Callable[P, R], device: torch.device) -> Callable[P, R]:
    """`function`, which has a static `num_positions`, jitted for a device of torch's."""
    # JAX and torch name GPUs apart; only a CPU has options.
    return _jitted(function, "cpu" if device.type == "cpu" else "gpu")


@functools.cache
def _jitted(function: Callable[P, R], platform: str) -> Callable[P, R]:
    options = compat.compiler_options(platform)
    jitted: Any = jax.jit(function, static_argnames=["num_positions"], compiler_options=options)
    _JITTED.append(jitted)
    return jitted


def num_programs() -> int:
    """How many programs these functions have compiled in this process."""
    return sum(compat.num_programs(each) for each in _JITTED)


def forget() -> None:
    """Drops all of them, compiled programs included."""
    for each in _JITTED:
        # jax.jit of the same function again finds what was compiled for it, also with other options.
        each.clear_cache()
    _jitted.cache_clear()
    _JITTED.clear()


class Watch:
    """A context: how long it took, and how many programs were compiled in it.

    Attributes:
      seconds: of wall-clock time.
      num_compiled: how many programs.
    """

    seconds = 0.0
    num_compiled = 0

    def __enter__(self) -> Self:
        self._programs, self._start = num_programs(), time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.seconds = time.perf_counter() - self._start
        self.num_compiled = num_programs() - self._programs
