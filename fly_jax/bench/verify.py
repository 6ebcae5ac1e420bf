"""`fly-jax bench verify`: `fly_verify` against its floor and beside other verifiers, in one interleaved run.

The floor is reading the logits once: per round the faster of a jitted `jnp.max(rows, 1)` and `jnp.sum(rows, 1)`. A
machine's speed drifts by more than the differences of interest, so every ratio is taken within a round in which all
sides ran one after the other, and medians and quartiles are over rounds. Everything is compiled ahead of time, so that
dispatching costs the same everywhere.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fly_jax.bench import verify_cases
from fly_jax.bench.peers import TORCH, Peer
from fly_jax.bench.ratios import Ratio
from fly_jax.bench.timing import CLOCKS, MIN_SAMPLE_SECONDS, caller, compile_ahead, interleave
from fly_jax.bench.verify_cases import (
    CONFIG,
    NUM_DRAFT_TOKENS,
    Case,
    Draft,
    check,
    floor_arrays,
    make_data,
    verify_arguments,
)
from fly_jax.compat import compiler_options
from fly_jax.config import FlyConfig
from fly_jax.kernels.blocks import BLOCK
from fly_jax.verify import fly_verify

DEFAULT = "default"
WITH_OPTIONS = "with options"
STANDARD = "standard"

Progress = Callable[[str, float], None]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
      rounds: samples of everything.
      clock: a name in `CLOCKS`.
      peers: what to stand beside.
      min_seconds: wall time of a sample.
    """

    rounds: int
    clock: str
    peers: tuple[Peer, ...] = ()
    min_seconds: float = MIN_SAMPLE_SECONDS


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """What was measured of one case; in every dictionary the keys `default` and `with options` say how it was compiled.

    Attributes:
      case: what was measured.
      num_candidates: requests with a rejection that could be deferred, counted in the result.
      over_floor: time over that of reading the logits once.
      over_standard: FLy's time over that of `config=None`; greedy cases of float32 and several requests only.
      against: by peer: its time over ours.
      temporaries: `temp_size_in_bytes` of the compiled function, in `[B, V]` float32 arrays; None where unknown.
      milliseconds: medians of everything that ran.
    """

    case: Case
    num_candidates: int
    over_floor: dict[str, Ratio]
    over_standard: dict[str, Ratio]
    against: dict[str, dict[str, Ratio]]
    temporaries: dict[str, float | None]
    milliseconds: dict[str, float]

    @property
    def temporaries_met(self) -> bool | None:
        """Whether every known amount is within the goal; None without a goal, or where nothing is known.

        The maxima of blocks of 128 columns, of all rows, are allowed beside it, twice.
        """
        known = [each for each in self.temporaries.values() if each is not None]
        goal = self.case.goals.temporaries
        return None if goal is None or not known else max(known) <= goal + 2 * (NUM_DRAFT_TOKENS + 1) / BLOCK

    def fields(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`."""

        def ratios(by_compilation: Mapping[str, Ratio]) -> dict[str, Any]:
            return {name: each.fields() for name, each in by_compilation.items()}

        return {
            **dataclasses.asdict(self.case),
            "num_candidates": self.num_candidates,
            "over_floor": ratios(self.over_floor),
            "over_standard": ratios(self.over_standard),
            "against": {peer: ratios(each) for peer, each in self.against.items()},
            "temporaries": {**self.temporaries, "goal": self.case.goals.temporaries, "is_met": self.temporaries_met},
            "milliseconds": self.milliseconds,
        }


@dataclasses.dataclass
class VerifyBench:
    """Everything measured so far; `interrupted` names what was lost, None when nothing was."""

    cases: list[CaseResult] = dataclasses.field(default_factory=list)
    odd_vocabulary: list[Ratio] = dataclasses.field(default_factory=list)
    interrupted: str | None = None

    def fields(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`."""
        return {
            "cases": [each.fields() for each in self.cases],
            "odd_vocabulary": [each.fields() for each in self.odd_vocabulary],
            "interrupted": self.interrupted,
        }


def case_names() -> list[str]:
    """What can be measured, in order."""
    return [*(case.name for case in verify_cases.CASES), verify_cases.ODD_VOCABULARY]


def measure(result: VerifyBench, names: Sequence[str], settings: Settings, progress: Progress) -> None:
    """Measures the named cases one after the other and adds each to `result` when it is finished.

    After an interrupt it returns, and `result.interrupted` names the case whose rounds are lost.

    Args:
      result: what to add to.
      names: of `case_names()`.
      settings: how to measure.
      progress: called with what is being done and the fraction done.
    """
    cases = {case.name: case for case in verify_cases.CASES}
    for name in names:
        try:
            if name == verify_cases.ODD_VOCABULARY:
                result.odd_vocabulary += measure_odd_vocabulary(settings, progress)
            else:
                result.cases.append(measure_case(cases[name], settings, progress))
        except KeyboardInterrupt:
            result.interrupted = name
            return


def measure_case(case: Case, settings: Settings, progress: Progress) -> CaseResult:
    """Measures one case.

    Raises:
      RuntimeError: the logits do not have the rejections the case is meant to have.
    """
    label = f"measure {case.name}"
    progress(label, 0.0)
    data = make_data(case)
    arguments = verify_arguments(case, data)
    compiled = dict(_compilations(CONFIG, arguments))
    counts = [check(case, data, each(arguments)) for each in compiled.values()]
    calls = {name: caller(each, arguments) for name, each in compiled.items()}
    against_standard = not case.sampling and case.dtype == "float32" and case.num_requests > 1
    if against_standard:
        calls |= {f"{STANDARD}, {name}": caller(each, arguments) for name, each in _compilations(None, arguments)}
    calls |= floor_calls(floor_arrays(arguments))
    for peer in settings.peers:
        call = peer.prepare(case, data)
        if call is not None:
            calls[peer.name] = call
    seconds = run(calls, settings, lambda fraction: progress(label, fraction))
    return CaseResult(
        case,
        counts[0],
        {name: _over_floor(case, name, seconds) for name in compiled},
        {name: _over_standard(name, seconds) for name in compiled if against_standard},
        {
            peer.name: {name: _against(case, peer, name, seconds) for name in compiled}
            for peer in settings.peers
            if peer.name in seconds
        },
        {name: _temporaries(case, each) for name, each in compiled.items()},
        {name: float(np.median(each)) * 1e3 for name, each in seconds.items()},
    )


def measure_odd_vocabulary(settings: Settings, progress: Progress) -> list[Ratio]:
    """The time for a vocabulary that no block size divides, over that for one which a block size does."""
    odd, even = verify_cases.ODD_SIZES
    label = f"measure {verify_cases.ODD_VOCABULARY}"
    calls: dict[str, Callable[[], Any]] = {}
    names = []
    for case in verify_cases.ODD_CASES:
        for size in (odd, even):
            progress(label, 0.0)
            sized = dataclasses.replace(case, vocab_size=size)
            data = make_data(sized)
            arguments = verify_arguments(sized, data)
            for name, compiled in _compilations(CONFIG, arguments):
                check(sized, data, compiled(arguments))
                calls[f"{case.name}, {name}, {size}"] = caller(compiled, arguments)
                if size == odd:
                    names.append(f"{case.name}, {name}")
    seconds = run(calls, settings, lambda fraction: progress(label, fraction))
    return [
        ratio(
            f"V={odd} / V={even}, {name}",
            "the same case with both vocabularies",
            verify_cases.ODD_GOAL,
            seconds[f"{name}, {odd}"],
            seconds[f"{name}, {even}"],
        )
        for name in names
    ]


def floor_calls(arrays: list[jax.Array]) -> dict[str, Callable[[], Any]]:
    """The two ways to read the rows of `[B, T, V]` arrays once."""

    def read_max(arrays: list[jax.Array]) -> list[jax.Array]:
        return [jnp.max(each.reshape(-1, each.shape[-1]), 1) for each in arrays]

    def read_sum(arrays: list[jax.Array]) -> list[jax.Array]:
        return [jnp.sum(each.reshape(-1, each.shape[-1]), 1) for each in arrays]

    reads = {"floor, max": read_max, "floor, sum": read_sum}
    return {name: caller(compile_ahead(read, arrays), arrays) for name, read in reads.items()}


def floor_seconds(seconds: Mapping[str, list[float]]) -> np.ndarray:
    """The floor of every round."""
    return np.minimum(seconds["floor, max"], seconds["floor, sum"])


def run(
    calls: Mapping[str, Callable[[], Any]], settings: Settings, progress: Callable[[float], None]
) -> dict[str, list[float]]:
    """Seconds per call of everything, once per round."""
    return interleave(
        calls,
        rounds=settings.rounds,
        clock=CLOCKS[settings.clock],
        min_seconds=settings.min_seconds,
        progress=progress,
    )


def ratio(
    name: str,
    definition: str,
    goal: float | None,
    numerator: Sequence[float] | np.ndarray,
    denominator: Sequence[float] | np.ndarray,
    *,
    at_most: bool = True,
) -> Ratio:
    """One value per round."""
    values = np.asarray(numerator) / np.asarray(denominator)
    return Ratio(name, definition, goal, at_most, tuple(values.tolist()))


def verify_function(config: FlyConfig | None) -> Callable[[dict[str, Any]], Any]:
    """`fly_verify` of one dictionary of arrays."""
    return lambda arguments: fly_verify(**arguments, config=config)


def _compilations(
    config: FlyConfig | None, arguments: dict[str, jax.Array]
) -> Iterator[tuple[str, jax.stages.Compiled]]:
    """By name: compiled as it is, and with `compiler_options()` where there are any for this backend."""
    yield DEFAULT, compile_ahead(verify_function(config), arguments)
    if options := compiler_options():
        yield WITH_OPTIONS, compile_ahead(verify_function(config), arguments, options)


def _over_floor(case: Case, name: str, seconds: Mapping[str, list[float]]) -> Ratio:
    goals = case.goals
    goal = goals.over_floor if name == DEFAULT else goals.over_floor_with_options
    rows = "target and draft rows" if case.draft == Draft.LOGITS else "target rows"
    definition = f"fly_verify, {name}; the floor is the faster of jitted jnp.max and jnp.sum over the {rows}"
    return ratio(f"{case.name} / floor, {name}", definition, goal, seconds[name], floor_seconds(seconds))


def _over_standard(name: str, seconds: Mapping[str, list[float]]) -> Ratio:
    definition = "fly_verify with a config and with config=None, on the same logits"
    standard = seconds[f"{STANDARD}, {name}"]
    return ratio(f"FLy / standard, {name}", definition, verify_cases.OVER_STANDARD_GOAL, seconds[name], standard)


def _against(case: Case, peer: Peer, name: str, seconds: Mapping[str, list[float]]) -> Ratio:
    goal = None
    if peer.name == TORCH:
        goal = case.goals.over_torch if name == DEFAULT else case.goals.over_torch_with_options
    title = f"{peer.name} / {case.name}, {name}"
    return ratio(title, peer.definition, goal, seconds[peer.name], seconds[name], at_most=False)


def _temporaries(case: Case, compiled: jax.stages.Compiled) -> float | None:
    analysis = compiled.memory_analysis()
    if analysis is None:  # not every backend has one
        return None
    array_bytes = case.num_requests * case.vocab_size * jnp.dtype(jnp.float32).itemsize
    return float(analysis.temp_size_in_bytes / array_bytes)
