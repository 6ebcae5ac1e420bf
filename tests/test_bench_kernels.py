"""`fly-jax bench kernels`: its plumbing on the CPU and, where triton is installed, the kernels compiled for GPUs."""

import importlib.util
import json
import re

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fly_jax.bench import kernels as bench
from fly_jax.bench import offline
from fly_jax.cli import app as cli
from fly_jax.cli import bench_tables
from fly_jax.errors import UserError
from fly_jax.kernels import triton as kernel

LIMITS = {  # of registers; NVIDIA's files have 65536 for up to 2048 threads, AMD's 512 for up to 8 wavefronts
    "sm": {3: 80, 8: 96},  # at least 5 programs of 128 threads a multiprocessor
    "gfx": {3: 128, 8: 128},  # at least 4 programs of 256 threads a compute unit
}
MAX_SHARED_BYTES = 1024


def printed(table, width=100):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - as long as the console
    with console.file:
        console.print(table)
    return console.export_text()


@pytest.mark.slow
def test_measuring():
    cases = [bench.Case(3, 300, "float32"), bench.Case(2, 257, "bfloat16", has_goal=False)]
    seen = []
    results, left_out = bench.measure(
        cases,
        rounds=3,
        implementation="xla",
        progress=lambda what, fraction: seen.append((what, fraction)),
        cold_bytes=10_000,
        min_seconds=0.0,
    )
    assert [each.case for each in results] == cases
    assert list(left_out) == ["torch"]
    for result in results:
        assert list(result.ratios) == ["copy", "XLA"]
        assert all(len(each.values) == 3 and min(each.values) > 0 for each in result.ratios.values())
        assert result.gigabytes_per_second > 0
    assert [each.ratios["copy"].goal for each in results] == [bench.GOAL, None]
    assert seen[0] == ("measure 3 x 300 float32", 0.0)
    assert all(0 <= fraction <= 1 for _, fraction in seen)
    assert json.loads(json.dumps([each.fields() for each in results]))[0]["num_rows"] == 3
    text = printed(bench_tables.kernels_table(results, "a device", left_out))
    assert "3 x 300 float32" in text
    assert max(map(len, text.splitlines())) <= 100


def test_bandwidth_is_of_the_logits_and_a_copy_moves_them_twice():
    case = bench.Case(64, 131072, "float32")
    seconds = {"kernel": np.full(3, 2.0), "copy": np.full(3, 3.6), "XLA": np.full(3, 6.0), "torch": np.full(3, 8.0)}
    result = bench._result(case, 5, seconds)
    assert result.gigabytes_per_second == pytest.approx(64 * 131072 * 4 * 5 / 2e9)
    assert {name: each.quartiles[1] for name, each in result.ratios.items()} == pytest.approx(
        {"copy": 0.9, "XLA": 3.0, "torch": 4.0}
    )
    assert result.ratios["copy"].is_met


def test_only_large_cases_have_a_goal():
    assert {(case.num_rows, case.num_columns) for case in bench.CASES if case.has_goal} == {
        (64, 131072),
        (64, 151936),
        (1024, 151936),
    }


def refused(*options):
    with pytest.raises(UserError) as error:
        CliRunner().invoke(cli.app, ["bench", "kernels", *options], catch_exceptions=False)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_without_a_gpu():
    assert "--compile-only compiles the kernels without one" in refused()


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is installed")
def test_without_triton():
    assert "pip install 'fly-jax[triton]'" in refused("--compile-only")


def constant(text, name):
    """The value of an int32 of the IR: a constant, or a sum of two."""
    kind, first, second = re.search(rf"{name} = arith\.(constant|addi) (%?\w+)(?:, (%\w+))? ?:", text).groups()
    return int(first) if kind == "constant" else constant(text, first) + constant(text, second)


@pytest.mark.parametrize("variant", offline.VARIANTS, ids=str)
@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_every_logit_is_loaded_once(variant, platform):
    """Of the IR: blocks cover the row, the main loop stays inside it, and what is read again are k groups."""
    lowered = offline.lower(variant, platform)
    itemsize = np.dtype(np.float32).itemsize if variant.dtype == "float32" else 2
    tile, group = kernel.TILES[platform, itemsize], offline.WIDE_BYTES // itemsize
    stride = tile.block * lowered.num_splits
    blocks = re.findall(r"tt\.load (%\w+).*tensor<(\d+)x(\d+)x!tt\.ptr<", lowered.text)
    assert {(int(lanes) * int(columns), int(columns)) for _, lanes, columns in blocks} == {
        (tile.block // tile.num_loads, group)
    }
    groups = re.findall(rf"tt\.load %\w+.* : tensor<{group}x!tt\.ptr<", lowered.text)
    assert len(groups) == variant.k
    shift = 0 if variant.num_columns % group == 0 else group - 1
    loops = lowered.text.count("scf.for")
    if "vocab_size" in variant.operands:
        assert loops == 2  # how many steps is known only when the kernel runs
        assert len(blocks) == 3 * tile.num_loads
        return
    first, full, steps = min(shift, 1), variant.num_columns // stride, -(-(variant.num_columns + shift) // stride)
    in_loop = max(0, full - first)
    bodies = steps - in_loop + min(in_loop, 1)
    assert len(blocks) == bodies * tile.num_loads
    assert loops == (in_loop > 1)
    if loops:
        begin, end = re.search(r"scf\.for %\w+ = (%\w+) to (%\w+)", lowered.text).groups()
        assert [constant(lowered.text, begin), constant(lowered.text, end)] == [first, full]
    # Less than a step and a half more than there is.
    assert variant.num_columns <= steps * stride < variant.num_columns + shift + stride


@pytest.mark.triton
class TestCompiled:
    @pytest.mark.parametrize("variant", offline.VARIANTS, ids=str)
    @pytest.mark.parametrize("architecture", offline.PLATFORMS)
    def test_registers_and_loads(self, variant, architecture):
        compiled = offline.compile_variant(variant, architecture)
        assert compiled.spilled_bytes == 0
        assert compiled.registers <= LIMITS["sm" if architecture.startswith("sm") else "gfx"][variant.k]
        assert compiled.shared_bytes <= MAX_SHARED_BYTES
        assert compiled.loop_narrow_loads == 0
        assert compiled.wide_loads >= compiled.loop_wide_loads
        platform = offline.PLATFORMS[architecture]
        num_loads = kernel.TILES[platform, 4 if variant.dtype == "float32" else 2].num_loads
        assert compiled.loop_wide_loads in (0, num_loads)
        assert compiled.wide_loads >= num_loads
        # One for each operand, for the token's logit and for each group that is read again.
        assert compiled.narrow_loads <= len(variant.operands) + ("token_ids" in variant.operands) + variant.k

    def test_the_table(self):
        compiled = bench.compile_all(offline.VARIANTS[1:2], ["sm_90", "gfx942"], lambda what, fraction: None)
        text = printed(bench_tables.compile_table(compiled))
        assert re.search(r"f32 151936 +3 +4096 +sm_90 +1 +\d+ +0 +\d+ +\d\+\d +4\+0 +\d+\.\d +607792", text)
        assert max(map(len, text.splitlines())) <= 100
