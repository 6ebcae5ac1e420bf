"""Timing alternatives against each other, one sample after the other in every round."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}
"""Seconds: of CPU time of the process, all its threads together, or of the wall."""

MIN_SAMPLE_SECONDS = 0.03
"""Shortest sample: the CPU time of threads still running is accounted at the scheduler's ticks of 1 to 10 ms only."""

_SETTLE_SECONDS = 0.02  # OpenMP threads may spin for 10 ms after torch's work: not the next one's time


def compile_ahead(
    function: Callable[..., Any], argument: Any, options: Mapping[str, bool | int | str] | None = None
) -> jax.stages.Compiled:
    """Compiles `function` for one pytree of arrays, so that a call only has to dispatch."""
    return jax.jit(function, compiler_options=dict(options) if options else None).lower(argument).compile()


def caller(compiled: jax.stages.Compiled, argument: Any) -> Callable[[], Any]:
    """A call that returns when its result is there."""
    return lambda: jax.block_until_ready(compiled(argument))


def sample(call: Callable[[], Any], clock: Callable[[], float], min_seconds: float) -> float:
    """Seconds per call, over as many calls as last `min_seconds` of wall time; at least one."""
    time.sleep(_SETTLE_SECONDS)
    num_calls = 0
    begin, start = time.perf_counter(), clock()
    while num_calls == 0 or time.perf_counter() - begin < min_seconds:
        call()
        num_calls += 1
    return (clock() - start) / num_calls


def interleave(
    alternatives: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    clock: Callable[[], float],
    min_seconds: float,
    progress: Callable[[float], None],
) -> dict[str, list[float]]:
    """Seconds per call of every alternative, once per round; the order turns around from round to round.

    Args:
      alternatives: calls that return when they are done; each is called once before, unmeasured.
      rounds: how many samples of each.
      clock: seconds.
      min_seconds: wall time of a sample.
      progress: called with the fraction done.
    """
    for call in alternatives.values():
        call()
    names = list(alternatives)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for j, name in enumerate(names if i % 2 == 0 else names[::-1]):
            progress((i + j / len(names)) / rounds)
            seconds[name].append(sample(alternatives[name], clock, min_seconds))
    return seconds
