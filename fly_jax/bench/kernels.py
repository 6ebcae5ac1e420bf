"""`fly-jax bench kernels`: the row statistics kernel on a GPU against a copy of what it reads, or compiled for GPUs.

On a device every alternative passes over several arrays, together larger than any cache, within one call: a row that
comes from a cache is no measure of memory, and the time to start a call is none of a kernel.
"""

import dataclasses
import functools
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from fly_jax import kernels
from fly_jax.bench import offline, timing
from fly_jax.bench.ratios import Ratio
from fly_jax.cli.tables import progress_bars, versions
from fly_jax.errors import UserError

GOAL = 0.85
"""Of a copy's bytes a second, for the cases that have a goal."""

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


def bench_kernels(*, compile_only: bool, rounds: int, json_output: bool) -> None:
    """Runs the command and prints its result.

    Args:
      compile_only: compile for every architecture instead of measuring.
      rounds: interleaved rounds.
      json_output: print one JSON document instead of a table.

    Raises:
      UserError: there is no GPU, or, with `compile_only`, no triton package.
    """
    if compile_only:
        _require_triton()
        with progress_bars(Console(stderr=True)) as report:
            compiled = compile_all(offline.VARIANTS, list(offline.PLATFORMS), report)
        document: dict[str, Any] = {
            "compiled": [{**dataclasses.asdict(variant), **dataclasses.asdict(each)} for variant, each in compiled]
        }
        table = compile_table(compiled)
    else:
        _require_gpu()
        with progress_bars(Console(stderr=True)) as report:
            results, left_out = measure(CASES, rounds=rounds, implementation="triton", progress=report)
        device = jax.devices()[0].device_kind
        document = {"device": device, "cases": [each.fields() for each in results], "left_out": left_out}
        table = measure_table(results, device, left_out)
    if json_output:
        print(json.dumps({"versions": versions(), **document}, indent=2))
    else:
        Console().print(table)


def _require_triton() -> None:
    try:
        importlib.import_module("triton")
    except ModuleNotFoundError:
        raise UserError(
            "--compile-only needs the triton package; install the triton extra: pip install 'fly-jax[triton]', or "
            "-e '.[triton]' in the repository."
        ) from None


def _require_gpu() -> None:
    if jax.default_backend() != "gpu":
        raise UserError(
            f"bench kernels measures GPUs and jax has only {jax.default_backend()} devices here; --compile-only "
            "compiles the kernels without one."
        )


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


def compile_table(compiled: Sequence[tuple[offline.Variant, offline.CompiledKernel]]) -> Table:
    """One line for each variant and architecture."""
    caption = (
        "+: scale and threshold given; all: every operand. splits: programs a row; spills: bytes a thread; shared: "
        "bytes a program; loads: instructions of 16 bytes + narrower ones, all and those of the main loop; instr: "
        "instructions of the main loop a logit (-: no program of a row goes round it twice); bytes/row: of logits "
        "read, at most."
    )
    table = Table(
        title="bench kernels --compile-only",
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    names = ("logits", "k", "N", "GPU", "splits", "regs", "spills", "shared", "loads", "loop", "instr", "bytes/row")
    for name in names:
        table.add_column(name, no_wrap=True, justify="left" if name in ("logits", "GPU") else "right")
    last = None
    for variant, each in compiled:
        has_loop = each.loop_wide_loads + each.loop_narrow_loads > 0
        table.add_row(
            *(_variant_cells(variant) if variant != last else ("", "", "")),
            each.architecture,
            f"{each.num_splits}",
            f"{each.registers}",
            f"{each.spilled_bytes}",
            f"{each.shared_bytes}",
            f"{each.wide_loads}+{each.narrow_loads}",
            f"{each.loop_wide_loads}+{each.loop_narrow_loads}" if has_loop else "-",
            f"{each.instructions:.1f}" if has_loop else "-",
            f"{variant.row_bytes(each.num_splits)}",
        )
        last = variant
    return table


def _variant_cells(variant: offline.Variant) -> tuple[str, str, str]:
    dtype = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[variant.dtype]
    operands = {0: "", 2: " +"}.get(len(variant.operands), " all")
    return f"{dtype} {variant.num_columns}{operands}", f"{variant.k}", f"{variant.num_rows}"


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
        "copy": "bytes read a second over those of a copy of the same arrays, which are read and written",
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


def measure_table(results: Sequence[CaseResult], device: str, left_out: Mapping[str, str]) -> Table:
    """One line a case."""
    notes = [f"on {device}; medians over rounds, and quartiles"]
    definitions = dict.fromkeys(
        f"{name}: {each.definition}" for result in results for name, each in result.ratios.items()
    )
    notes += [*definitions, *(f"{name} is left out: {why}" for name, why in left_out.items())]
    table = Table(title="bench kernels", title_justify="left", caption="; ".join(notes), caption_justify="left")
    for name in ("N x V", "GB/s", "of a copy", "goal", "over XLA", "over torch"):
        table.add_column(name, no_wrap=True, justify="left" if name == "N x V" else "right")
    for result in results:
        goal = result.ratios["copy"].verdict()
        cells = [_cell(result.ratios.get(name)) for name in ("copy", "XLA", "torch")]
        table.add_row(result.case.name, f"{result.gigabytes_per_second:.0f}", cells[0], goal, *cells[1:])
    return table


def _cell(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    lower, median, upper = ratio.quartiles
    return f"{median:.2f} ({lower:.2f}-{upper:.2f})"
