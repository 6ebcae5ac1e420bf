"""`fly-jax bench kernels`: the row statistics kernel on a GPU against a copy of what it reads, or compiled for GPUs.

On a device every alternative passes over several arrays, together larger than any cache, within one call: a row that
comes from a cache is no measure of memory, and the time to start a call is none of a kernel.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fly_jax import kernels
from fly_jax.bench import offline, timing
from fly_jax.bench.ratios import Ratio

GOAL = 0.85
"""Of a copy's bytes per second, for the cases that have a goal."""

TOP_K = 3
"""k."""

COLD_BYTES = 2**30
"""How large the arrays of a case are together, at least; the largest last-level cache, MI300X's, has a quarter."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Logits of one shape.

    Attributes:
      num_rows: N.
      num_columns: V.
      dtype: of the logits.
      has_goal: whether `GOAL` holds for it.
    """

    num_rows: int
    num_columns: int
    dtype: str
    has_goal: bool = True

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.num_rows} x {self.num_columns} {self.dtype}"

    @property
    def num_bytes(self) -> int:
        """Of one array."""
        return self.num_rows * self.num_columns * jnp.dtype(self.dtype).itemsize


CASES = tuple(
    Case(num_rows, num_columns, dtype, num_rows >= 64 and num_columns >= 131072)
    for dtype in ("float32", "bfloat16")
    for num_rows, num_columns in ((8, 151936), (64, 131072), (64, 151936), (1024, 151936), (1024, 50257))
)
"""From one request to many, with vocabularies of Llama 3's size, Qwen3's and GPT-2's odd one."""


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """What was measured of a case.

    Attributes:
      case: of what.
      gigabytes_per_second: at which the logits were read, the median over rounds.
      ratios: against each alternative, by its name.
    """

    case: Case
    gigabytes_per_second: float
    ratios: Mapping[str, Ratio]

    def fields(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`."""
        ratios = {name: each.fields() for name, each in self.ratios.items()}
        return {**dataclasses.asdict(self.case), "gigabytes_per_second": self.gigabytes_per_second, "ratios": ratios}


def compile_all(
    variants: Sequence[offline.Variant], architectures: Sequence[str], progress: Callable[[str, float], None]
) -> list[tuple[offline.Variant, offline.CompiledKernel]]:
    """Every variant for every architecture.

    Raises:
      ModuleNotFoundError: the `triton` package is missing.
    """
    pairs = [(variant, architecture) for variant in variants for architecture in architectures]
    compiled = []
    for i, (variant, architecture) in enumerate(pairs):
        progress("compile", i / len(pairs))
        compiled.append((variant, offline.compile_variant(variant, architecture)))
    return compiled


def measure(
    cases: Sequence[Case],
    *,
    rounds: int,
    implementation: str,
    progress: Callable[[str, float], None],
    cold_bytes: int = COLD_BYTES,
    min_seconds: float = timing.MIN_SAMPLE_SECONDS,
) -> tuple[list[CaseResult], dict[str, str]]:
    """Measures one implementation against the others.

    Args:
      cases: of what.
      rounds: interleaved rounds.
      implementation: "triton", or another of `kernels.IMPLEMENTATIONS`.
      progress: called with what is being done and the fraction done.
      cold_bytes: how large the arrays of a case are together, at least.
      min_seconds: wall time of a sample.

    Returns:
      The results, and why an alternative was left out.
    """
    torch, left_out = _torch()
    results = []
    for i, case in enumerate(cases):
        arrays = _arrays(case, max(2, -(-cold_bytes // case.num_bytes)))
        calls = _calls(arrays, implementation)
        if torch is not None:
            calls["torch"] = _torch_call(torch, arrays)

        def report(fraction: float, case: Case = case, i: int = i) -> None:
            progress(f"measure {case.name}", (i + fraction) / len(cases))

        seconds = timing.interleave(
            calls, rounds=rounds, clock=timing.CLOCKS["wall"], min_seconds=min_seconds, progress=report
        )
        results.append(_result(case, len(arrays), {name: np.asarray(each) for name, each in seconds.items()}))
    return results, left_out


def _arrays(case: Case, number: int) -> list[jax.Array]:
    make = jax.jit(lambda key: jax.random.normal(key, (case.num_rows, case.num_columns), jnp.dtype(case.dtype)) * 3)
    return [make(key) for key in jax.random.split(jax.random.key(0), number)]


def _calls(arrays: list[jax.Array], implementation: str) -> dict[str, Callable[[], Any]]:
    def each_of(function: Callable[[jax.Array], Any]) -> Callable[[], Any]:
        return timing.caller(timing.compile_ahead(lambda arrays: [function(each) for each in arrays], arrays), arrays)

    calls = {"kernel": each_of(functools.partial(kernels.row_statistics, k=TOP_K, implementation=implementation))}
    calls["copy"] = each_of(jnp.copy)
    calls["XLA"] = each_of(functools.partial(kernels.row_statistics, k=TOP_K, implementation="xla"))
    return calls


def _torch() -> tuple[Any, dict[str, str]]:
    try:
        torch: Any = importlib.import_module("torch")
    except Exception as error:  # whatever another package raises while it is imported
        return None, {"torch": f"{type(error).__name__}: {error}".splitlines()[0]}
    if not torch.cuda.is_available():
        return None, {"torch": "torch has no GPU"}
    return torch, {}


def _torch_call(torch: Any, arrays: list[jax.Array]) -> Callable[[], Any]:
    tensors = [torch.from_dlpack(each) for each in arrays]

    def call() -> None:
        for tensor in tensors:
            probabilities = torch.softmax(tensor, dim=-1, dtype=torch.float32)
            torch.topk(probabilities, TOP_K, dim=-1)
            torch.argmax(tensor, dim=-1)
        torch.cuda.synchronize()

    return call


def _result(case: Case, num_arrays: int, seconds: dict[str, np.ndarray]) -> CaseResult:
    kernel = seconds["kernel"]
    definitions = {
        "copy": "bytes read per second over those of a copy of the same arrays, which are read and written",
        "XLA": "time of implementation 'xla' over that of the kernel",
        "torch": "time of torch's softmax in float32, topk and argmax over that of the kernel",
    }
    values = {name: seconds[name] / kernel for name in definitions if name in seconds}
    values["copy"] = values["copy"] / 2
    ratios = {
        name: Ratio(
            f"{case.name}: {name}",
            definitions[name],
            GOAL if name == "copy" and case.has_goal else None,
            False,
            tuple(each.tolist()),
        )
        for name, each in values.items()
    }
    return CaseResult(case, case.num_bytes * num_arrays / float(np.median(kernel)) / 1e9, ratios)
