"""Row statistics: one set of tests for every implementation, the Triton kernel run by the interpreter."""

import functools
import os
import subprocess
import sys
import warnings

import chex
import golden
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import on_gpu
import pytest
import test_golden
from conftest import QUICK_COMPILATION
from jax.sharding import PartitionSpec as P
from row_statistics_reference import check, row_statistics, special_operands, special_rows

import fly_jax
from fly_jax import compat, kernels
from fly_jax.kernels import api, triton
from fly_jax.kernels.statistics import RowOperands

F32, BF16, F16 = np.float32, ml_dtypes.bfloat16, np.float16
SMALL = triton.Tile(block=256, num_loads=2, num_warps=1, num_programs=1)
TINY = triton.Tile(block=16, num_loads=1, num_warps=1, num_programs=1)
ALL = ("token_ids", "scale", "threshold", "vocab_size")


def xla(values, operands, k, tile, splits):
    return kernels.row_statistics(values, k=k, implementation="xla", **operands)


def interpreted(values, operands, k, tile, splits):
    function = functools.partial(triton.row_statistics, k=k, platform="cuda", interpret=True, tile=tile, splits=splits)
    return jax.jit(function, compiler_options=QUICK_COMPILATION)(values, RowOperands(**operands))


def compiled(values, operands, k, tile, splits):
    """The kernel on the GPU; a rehearsal interprets it."""
    platform, interpret = ("cuda", True) if on_gpu.IS_REHEARSAL else (on_gpu.gpu_platform(), False)
    function = functools.partial(
        triton.row_statistics, k=k, platform=platform, interpret=interpret, tile=tile, splits=splits
    )
    result = jax.jit(function)(values, RowOperands(**operands))
    assert {device.platform for device in result.argmax.devices()} == {"cpu" if interpret else "gpu"}
    return result


# Every pair of two settings, though not all of their combinations. The block of 2047 ends inside the first group of the
# next row where a row begins late in its own.
CASES = [
    # dtype, V, k, splits, tile, operands
    (F32, 1, 1, 1, TINY, ()),
    (BF16, 1, 3, 2, SMALL, ALL),
    (F16, 1, 8, 4, SMALL, ("scale",)),
    (F32, 7, 3, 4, SMALL, ("token_ids", "threshold")),
    (BF16, 7, 5, 1, TINY, ("vocab_size",)),
    (F16, 7, 1, 2, SMALL, ALL),
    (F32, 128, 5, 2, TINY, ALL),
    (BF16, 128, 8, 4, SMALL, ()),
    (F16, 128, 3, 1, SMALL, ("threshold",)),
    (F32, 1000, 8, 1, SMALL, ("scale", "threshold")),
    (BF16, 1000, 1, 4, SMALL, ("token_ids", "vocab_size")),
    (F16, 1000, 5, 2, SMALL, ()),
    (F32, 1024, 3, 2, SMALL, ("vocab_size",)),
    (BF16, 1024, 5, 1, SMALL, ("scale", "threshold")),
    (F16, 1024, 8, 4, SMALL, ALL),
    (F32, 2047, 3, 1, SMALL, ("token_ids",)),
    (BF16, 2047, 8, 2, SMALL, ALL),
    (F16, 2047, 1, 4, SMALL, ("scale", "vocab_size")),
    (F32, 2500, 8, 4, SMALL, ALL),
    (BF16, 2500, 3, 1, None, ("scale", "threshold")),
    (F16, 2501, 3, None, None, ALL),
    (F32, 2501, 1, None, SMALL, ()),
]
SLOW_CASES = {1, 4, 8, 10, 11, 13, 14, 17, 21}  # every value of a setting is among the others


@pytest.mark.parametrize("implementation", [xla, interpreted, pytest.param(compiled, marks=pytest.mark.gpu)])
class TestEveryImplementation:
    @pytest.mark.parametrize(
        ("dtype", "size", "k", "splits", "tile", "names"),
        [pytest.param(*case, marks=pytest.mark.slow if i in SLOW_CASES else ()) for i, case in enumerate(CASES)],
    )
    def test_against_the_definition(self, implementation, dtype, size, k, splits, tile, names):
        values = special_rows(size, dtype)
        operands = special_operands(values, names)
        result = implementation(values, operands, k, tile, splits)
        check(result, row_statistics(values, k=k, **operands))

    @pytest.mark.parametrize("dtype", [F32, BF16])
    def test_the_maximum_anywhere(self, implementation, dtype):
        """A row for each of 40 columns, which start at every place inside 16 bytes."""
        values = np.full((40, 40), -1.0, dtype)
        values[np.arange(39, -1, -1), np.arange(40)] = 2.0
        values = values[:, :-1]
        check(implementation(values, {}, 3, TINY, 2), row_statistics(values))

    def test_every_nan_is_found(self, implementation):
        values = np.zeros((75, 75), F32)
        values[np.arange(75), np.arange(75)] = np.copysign(np.nan, np.where(np.arange(75) % 2, 1, -1))
        result = implementation(values, {}, 3, TINY, 2)
        assert result.has_nan.all()
        assert np.isnan(result.log_mass).all()
        assert np.isnan(result.entropy).all()

    def test_the_row_before_does_not_count(self, implementation):
        values = np.stack([np.full(31, 9.0), np.zeros(31), np.full(31, np.nan), np.zeros(31)]).astype(F32)
        check(implementation(values, {}, 3, TINY, 1), row_statistics(values))

    def test_infinity_above_the_threshold_of_large_values(self, implementation):
        values = np.full((1, 200), 300.0, F32)
        values[0, 150] = np.inf
        operands = {"threshold": np.array([400.0], F32)}
        check(implementation(values, operands, 3, TINY, 2), row_statistics(values, **operands))

    @pytest.mark.parametrize("scale", [1.2e-38, 1e38])
    def test_extreme_scales(self, implementation, scale):
        values = special_rows(100, F32)[:10]
        operands = {"scale": np.full(len(values), scale, F32)}
        check(implementation(values, operands, 3, TINY, 2), row_statistics(values, **operands))

    @pytest.mark.parametrize("vocab_size", [1, 8, 99, 200])
    def test_vocabulary_ends_anywhere(self, implementation, vocab_size):
        values = special_rows(100, F32)
        operands = {"vocab_size": np.full(len(values), vocab_size, np.int32)}
        result = implementation(values, operands, 3, TINY, 2)
        expected = row_statistics(values, **operands)
        check(result, expected)

    def test_no_rows(self, implementation):
        operands = {"token_ids": np.zeros(0, np.int32), "scale": np.zeros(0, F32)}
        result = implementation(np.zeros((0, 300), BF16), operands, 3, SMALL, 2)
        assert result.top_values.shape == (0, 3)
        assert {each.shape[0] for each in jax.tree.leaves(result)} == {0}


PUBLIC = {
    "xla": {"implementation": "xla"},
    "by platform": {},
    "triton": {"implementation": "triton", "interpret": True},
}


COMPILED = {"implementation": "triton", "interpret": on_gpu.IS_REHEARSAL}
ON_GPU = pytest.param(COMPILED, id="compiled", marks=pytest.mark.gpu)
PUBLIC_AND_ON_GPU = [*(pytest.param(options, id=name) for name, options in PUBLIC.items()), ON_GPU]


@pytest.mark.parametrize("options", PUBLIC_AND_ON_GPU)
def test_vmap(options):
    """Whatever is batched, on whichever axis: the batch is more rows."""
    values = special_rows(60, F32)[:12].reshape(3, 4, 60)
    scale, token_ids = np.full(4, 0.5, F32), np.arange(12, dtype=np.int32).reshape(4, 3)

    def statistics(values, token_ids):
        return kernels.row_statistics(values, token_ids, scale=jnp.asarray(scale), **options)

    batched = jax.jit(jax.vmap(statistics, in_axes=(0, 1)))(values, token_ids)
    for i in range(3):
        alone = statistics(values[i], token_ids[:, i])
        chex.assert_trees_all_equal(jax.tree.map(lambda each, i=i: each[i], batched), alone)


@pytest.mark.parametrize("options", PUBLIC_AND_ON_GPU)
def test_shard_map_over_rows(options):
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((len(devices),), ("rows",), (jax.sharding.AxisType.Auto,), devices=devices)
    values = special_rows(60, F32)[:10]
    function = functools.partial(kernels.row_statistics, **options)
    # The interpreter does not follow which axes arrays vary over.
    sharded = jax.shard_map(
        function, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"), check_vma=not options.get("interpret", False)
    )
    chex.assert_trees_all_equal(jax.device_get(jax.jit(sharded)(values)), jax.device_get(function(values)))


X64 = """
import jax
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
import test_kernels_triton as t
for implementation in (t.xla, t.interpreted):
    values = t.special_rows(75, t.BF16)
    operands = t.special_operands(values, t.ALL)
    t.check(implementation(values, operands, 3, t.TINY, 2), t.row_statistics(values, **operands))
t.test_lowered_for_each_platform("cuda", 1)
with t.pytest.raises(TypeError, match="got float64"):
    t.kernels.row_statistics(t.np.zeros((2, 20)))
"""


def test_x64_changes_nothing():
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-W", "error", "-c", X64], check=True, env=environment)


@pytest.mark.parametrize(
    ("dtype", "options", "error", "message"),
    [
        (np.int32, {}, TypeError, "float32, bfloat16 or float16"),
        (F32, {"implementation": "triton", "interpret": True, "k": 9}, ValueError, "at most 8 largest values"),
        (F32, {"implementation": "triton"}, ValueError, "runs on CUDA and ROCm"),
        (F32, {"implementation": "mosaic"}, ValueError, "must be None, 'xla' or 'triton', got 'mosaic'"),
        (F32, {"implementation": "xla", "interpret": True}, ValueError, "interpret is for implementation 'triton'"),
        (F32, {"interpret": True}, ValueError, "interpret is for implementation 'triton'"),
        (F32, {"k": 0}, ValueError, "k must be at least 1"),
        (F32, {"scale": np.ones(3, F32)}, ValueError, r"scale must be \[N\] = \[2\]"),
    ],
)
def test_what_cannot_be_done_is_said(dtype, options, error, message):
    with pytest.raises(error, match=message):
        kernels.row_statistics(np.zeros((2, 20), dtype), **options)


def lowered(function, platform, *arguments):
    with compat.lowering_without_device([platform]):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,))


def kernel_names(lowered):
    return [launch["name"] for _, launch in compat.triton_calls(lowered)]


@pytest.mark.parametrize(("platform", "expected"), [("cuda", 1), ("rocm", 1), ("tpu", 0), ("cpu", 0)])
def test_lowered_for_each_platform(platform, expected):
    logits = jax.ShapeDtypeStruct((16, 50257), jnp.bfloat16)
    for k, count in ((3, expected), (8, expected), (9, 0)):
        module = lowered(functools.partial(kernels.row_statistics, k=k), platform, logits)
        assert kernel_names(module) == [triton.NAME] * count
        assert (triton.NAME.encode() in module.as_text().encode()) or not count


MODES = {"greedy": (1, {}), "sampling": (1, {"temperature"}), "masked": (2, {"temperature", "top_p", "top_k"})}


@pytest.mark.parametrize(
    ("platform", "mode"),
    [*(("cuda", mode) for mode in MODES), ("rocm", "masked"), ("tpu", "sampling"), ("cpu", "greedy")],
)
def test_verification_reads_the_logits_once_a_pass(platform, mode):
    """One kernel; with masks two, since the threshold is relative to the maximum."""
    num_kernels, names = MODES[mode]
    shapes = {"temperature": jnp.float32, "top_p": jnp.float32, "top_k": jnp.int32}
    options = {name: jax.ShapeDtypeStruct((2,), shapes[name]) for name in names}
    if names:
        options["key"] = jax.eval_shape(jax.random.key, 0)
    call = {"target_logits": jax.ShapeDtypeStruct((2, 4, 1000), jnp.bfloat16), **options}
    call["draft_token_ids"] = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    module = lowered(lambda call: fly_jax.fly_verify(**call), platform, call)
    assert kernel_names(module) == [triton.NAME] * (num_kernels if platform in api.GPU_PLATFORMS else 0)


def test_rows_beyond_int32_offsets_are_read_by_row():
    """Their element offsets take 64 bits; only lowered here."""
    logits = jax.ShapeDtypeStruct((2**31 // 50257 + 1, 50257), jnp.bfloat16)
    ((text, _),) = compat.triton_calls(lowered(kernels.row_statistics, "cuda", logits))
    assert "tensor<512x8xi64>" in text or "tensor<128x8xi64>" in text


def test_other_warnings_are_not_silenced():
    def warns(values):
        warnings.warn("something else", DeprecationWarning, stacklevel=1)
        return [values + 1]

    quiet = compat.lowered_quietly("fly_jax_test", warns)
    with pytest.warns(DeprecationWarning, match="something else"):
        assert jax.jit(quiet).lower(jnp.zeros(3)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_recorded_requests_through_the_interpreted_kernel(version, monkeypatch):
    """Of the cases of `test_golden` the small target-only ones with one W and k; the entropies are the kernel's."""

    def statistics(arguments, *, k):
        logits, operands = arguments
        return triton.row_statistics(logits, operands, k=k, platform="cuda", interpret=True, tile=SMALL)

    def entropies(arguments, *, k):
        entropy, _, _, rows, wanted, _ = arguments
        return jnp.where(wanted, entropy[rows], jnp.nan)

    monkeypatch.setattr(api, "_statistics", statistics)
    monkeypatch.setattr(api, "_entropies", entropies)
    jax.clear_caches()
    verify = jax.jit(fly_jax.fly_verify_rows, compiler_options=QUICK_COMPILATION)
    compared = 0
    for case in golden.load(version)[::5]:
        if (
            test_golden.bucket(case) > 200
            or case.has_draft
            or (case.window, case.entropy_top_k) not in {(2, 3), (0, 3)}
        ):
            continue
        result = jax.device_get(test_golden.call(verify, case, as_array=False))
        test_golden.check_recorded_details(case, result)
        for b in range(case.batch):
            if test_golden.listed_difference(case, b) is None:
                tokens = result.token_ids[b, : result.num_tokens[b]].tolist()
                assert tokens == case.expected_of(b).tolist()
                compared += 1
    assert compared > 20
    jax.clear_caches()
