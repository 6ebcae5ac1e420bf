"""Compiles the Triton kernel for GPUs that are not there, and reads off what the compiled code takes.

jax lowers a kernel to Triton's IR without a device, and the `triton` package compiles that without one.
"""

import dataclasses
import functools
import importlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fly_jax import compat
from fly_jax.kernels import triton as kernel
from fly_jax.kernels.statistics import RowOperands

PLATFORMS = {"sm_80": "cuda", "sm_90": "cuda", "sm_100": "cuda", "gfx942": "rocm", "gfx950": "rocm"}
"""The architectures, A100, H100 and H200, B200, MI300X and MI355X, and jax's platform of each."""

WIDE_BYTES = 16
"""The widest load of one thread."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One kernel, as it is called.

    Attributes:
      dtype: of the logits.
      num_columns: V.
      k: how many largest values.
      num_rows: N.
      operands: which of `RowOperands` are given.
    """

    dtype: str
    num_columns: int
    k: int
    num_rows: int
    operands: tuple[str, ...] = ()

    def row_bytes(self, num_splits: int) -> int:
        """The most bytes of logits read of one row: whole groups, and the k largest groups of each split again."""
        itemsize = jnp.dtype(self.dtype).itemsize
        begins_anywhere = self.num_columns * itemsize % WIDE_BYTES != 0
        num_groups = -(-self.num_columns * itemsize // WIDE_BYTES) + begins_anywhere
        return (num_groups + self.k * num_splits) * WIDE_BYTES


_MASKS = ("scale", "threshold")

# N = 64 splits its rows, N = 4096 does not; 50257 is odd, so that most rows start inside a group.
VARIANTS = (
    *(
        Variant(dtype, num_columns, 3, num_rows, operands)
        for dtype in ("float32", "bfloat16")
        for num_columns in (151936, 131072, 50257)
        for num_rows, operands in ((64, _MASKS), (4096, ()))
    ),
    *(
        Variant(dtype, 151936, 8, num_rows, operands)
        for dtype in ("float32", "bfloat16")
        for num_rows, operands in ((64, ()), (4096, _MASKS))
    ),
    Variant("float16", 151936, 3, 4096),
    Variant("bfloat16", 50257, 3, 64, ("token_ids", *_MASKS, "vocab_size")),
)
"""What is compiled: every dtype, V, k, N, and operands, not all of their combinations."""


@dataclasses.dataclass(frozen=True)
class KernelIR:
    """A kernel before it is compiled.

    Attributes:
      text: Triton's IR.
      num_splits: programs of one row.
      num_warps: of a program.
    """

    text: str
    num_splits: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """What the compiled code takes.

    Attributes:
      architecture: a key of `PLATFORMS`.
      num_splits: programs of one row.
      registers: of a thread: general ones of NVIDIA, vector ones of AMD.
      spilled_bytes: of a thread, in memory: spills and everything else that is not in registers.
      shared_bytes: of a program.
      wide_loads: load instructions of 16 bytes.
      narrow_loads: all others: operands, the token's logit, and the groups read again, one logit per thread.
      loop_wide_loads: those of the main loop.
      loop_narrow_loads: those of the main loop.
      instructions: of the main loop for each logit.
    """

    architecture: str
    num_splits: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    wide_loads: int
    narrow_loads: int
    loop_wide_loads: int
    loop_narrow_loads: int
    instructions: float


@functools.cache
def lower(variant: Variant, platform: str) -> KernelIR:
    """The kernel's IR for "cuda" or "rocm"; needs neither a GPU nor the `triton` package."""
    row = {"token_ids": jnp.int32, "vocab_size": jnp.int32, "scale": jnp.float32, "threshold": jnp.float32}
    operands = RowOperands(
        **{name: jax.ShapeDtypeStruct((variant.num_rows,), row[name]) for name in variant.operands}  # type: ignore[arg-type]
    )
    logits = jax.ShapeDtypeStruct((variant.num_rows, variant.num_columns), variant.dtype)
    function = functools.partial(kernel.row_statistics, k=variant.k, platform=platform)
    with compat.lowering_without_device([platform]):
        lowered = jax.jit(function).trace(logits, operands).lower(lowering_platforms=(platform,))
    ((text, launch),) = compat.triton_calls(lowered)
    return KernelIR(text, launch["grid_y"], launch["num_warps"])


def compile_variant(variant: Variant, architecture: str) -> CompiledKernel:
    """Compiles one variant for one of `PLATFORMS`.

    Raises:
      ModuleNotFoundError: the `triton` package is missing.
    """
    platform = PLATFORMS[architecture]
    lowered = lower(variant, platform)
    triton = importlib.import_module("triton")
    target_of = importlib.import_module("triton.backends.compiler").GPUTarget
    warp_size = 32 if platform == "cuda" else 64
    if platform == "cuda":
        target = target_of("cuda", int(architecture.removeprefix("sm_")), warp_size)
    else:
        target = target_of("hip", architecture, warp_size)
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        source = Path(folder) / "kernel.ttir"
        source.write_text(lowered.text)
        compiled = triton.compile(str(source), target=target, options={"num_warps": lowered.num_warps, "num_stages": 1})
        read = _read_cuda if platform == "cuda" else _read_rocm
        code, registers, spilled, is_wide = read(compiled.asm, Path(folder))
    loads = [line for line in code if _is_load(line)]
    loop = _main_loop(code)
    loop_loads = [line for line in loop if _is_load(line)]
    block = kernel.TILES[platform, jnp.dtype(variant.dtype).itemsize].block
    return CompiledKernel(
        architecture=architecture,
        num_splits=lowered.num_splits,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=compiled.metadata.shared,
        wide_loads=sum(map(is_wide, loads)),
        narrow_loads=len(loads) - sum(map(is_wide, loads)),
        loop_wide_loads=sum(map(is_wide, loop_loads)),
        loop_narrow_loads=len(loop_loads) - sum(map(is_wide, loop_loads)),
        instructions=len(loop) * lowered.num_warps * warp_size / block,
    )


def _read_cuda(assembly: Any, folder: Path) -> tuple[list[str], int, int, Callable[[str], bool]]:
    """Labels and instructions, registers, spilled bytes, and what a wide load looks like."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(assembly["cubin"])
    tools = Path(importlib.import_module("triton").__file__ or "").parent / "backends" / "nvidia" / "bin"

    def run(tool: str, option: str) -> str:
        return subprocess.run([tools / tool, option, cubin], check=True, capture_output=True, text=True).stdout

    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", run("cuobjdump", "-res-usage")))
    pattern = re.compile(r"\s*(?:/\*[0-9a-f]+\*/\s+(.*?);|(\.L\w+:))")
    code = [found[1] or found[2] for line in run("nvdisasm", "-c").splitlines() if (found := pattern.match(line))]
    spilled = int(usage["STACK"]) + int(usage["LOCAL"])
    return code, int(usage["REG"]), spilled, lambda line: ".128" in line.split()[0] or ".128" in line.split()[1]


def _read_rocm(assembly: Any, folder: Path) -> tuple[list[str], int, int, Callable[[str], bool]]:
    """As `_read_cuda`."""
    text: str = assembly["amdgcn"]
    found = {name: int(value) for name, value in re.findall(r"; (NumVgprs|ScratchSize): (\d+)", text)}
    code = [line.split(";")[0].strip() for line in text.splitlines()]
    code = [line for line in code if re.match(r"\.L\w+:|[a-z]\w*_\w+(\s|$)", line)]
    return code, found["NumVgprs"], found["ScratchSize"], lambda line: "load_dwordx4" in line


def _is_load(line: str) -> bool:
    """From global memory, by its vector units."""
    return re.match(r"(?:@!?U?P\d+ )?LDG\b|(?:global|buffer|flat)_load_", line) is not None


def _main_loop(code: list[str]) -> list[str]:
    """The instructions of the first loop with wide loads: that over whole blocks of a row; empty if there is none."""
    labels = {line[:-1]: i for i, line in enumerate(code) if line.endswith(":")}
    loops = []
    for i, line in enumerate(code):
        target = re.search(r"\.L\w+", line)
        if target and not line.endswith(":") and labels.get(target[0], i) < i:
            body = [each for each in code[labels[target[0]] : i + 1] if not each.endswith(":")]
            if any(_is_load(each) for each in body):
                loops.append(body)
    return loops[0] if loops else []
