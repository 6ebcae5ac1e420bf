"""One artifact for several platforms: serialised, read back and run here, it equals the function."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fly_jax
from fly_jax import FlyConfig
from fly_jax.compat import TRITON_CALL
from fly_jax.export import export_verify, load_verify

B, K, V = 3, 4, 300


def arguments(mode, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(B, K + 1, V)).astype(np.float32) * 4
    drafts = logits[:, :K].argmax(2).astype(np.int32)
    drafts[:, 0] = np.argsort(logits[:, 0])[:, -2]
    call = {"target_logits": logits, "draft_token_ids": drafts, "config": FlyConfig(2, 0.01)}
    call["num_draft_tokens"] = np.array([K, K, 2], np.int32)
    if mode != "greedy":
        call["temperature"] = np.array([0.0, 0.7, 1.3], np.float32)
        call["key"] = jax.random.key(seed)
    if mode == "draft probabilities, top-p":
        call["draft_probs"] = rng.dirichlet(np.ones(V), (B, K)).astype(np.float32)
        call["top_p"] = np.full(B, 0.9, np.float32)
    if mode == "vLLM V2's noise":
        del call["key"]
        call["noise"] = fly_jax.VllmV2Noise(
            rng.integers(0, 2**32, (B, 2), np.uint32), rng.integers(0, 2**32, (B, K + 1, 2), np.uint32)
        )
    return jax.tree.map(jnp.asarray, call)


@pytest.mark.parametrize(
    ("mode", "platforms"),
    [
        pytest.param("greedy", ("cpu",), marks=pytest.mark.slow),
        ("greedy", ("cpu", "cuda", "rocm", "tpu")),
        ("one-hot drafts", ("cpu", "cuda", "rocm")),
        pytest.param("draft probabilities, top-p", ("cpu", "cuda", "rocm"), marks=pytest.mark.slow),
        pytest.param("vLLM V2's noise", ("cpu", "cuda", "rocm"), marks=pytest.mark.slow),
    ],
)
def test_what_is_read_back_equals_the_function(mode, platforms):
    exported = export_verify(**arguments(mode), platforms=platforms)
    assert exported.platforms == platforms
    # One pass for CUDA and one for ROCm; a second one under the masks.
    passes = 2 if mode == "draft probabilities, top-p" else 1
    kernels = exported.mlir_module().count(f"@{TRITON_CALL}")
    assert kernels == (2 * passes if "cuda" in platforms else 0)
    loaded = load_verify(exported.serialize())
    deferred = 0
    for seed in range(3):
        call = arguments(mode, seed)
        expected = jax.jit(fly_jax.fly_verify)(**call)
        result = loaded.call(call.pop("target_logits"), call.pop("draft_token_ids"), **call)
        assert isinstance(result, fly_jax.Verification)
        chex.assert_trees_all_equal(result, expected)
        deferred += int(result.deferred.sum())
    assert deferred > 0


def test_shapes_are_enough_to_export():
    call = arguments("greedy")
    shapes = jax.tree.map(lambda values: jax.ShapeDtypeStruct(values.shape, values.dtype), call)
    exported = export_verify(**shapes)
    result = exported.call(call.pop("target_logits"), call.pop("draft_token_ids"), **call)
    chex.assert_trees_all_equal(result, fly_jax.fly_verify(**arguments("greedy")))


@pytest.mark.parametrize("platforms", [(), ("cpu", "gpu")])
def test_unknown_platforms_are_refused(platforms):
    with pytest.raises(ValueError, match=r"platforms must be some of \['cpu', 'cuda', 'rocm', 'tpu'\]"):
        export_verify(**arguments("greedy"), platforms=platforms)


def test_other_bytes_are_refused():
    with pytest.raises(ValueError, match="not an artifact of export_verify"):
        load_verify(b"something else")


def test_arguments_are_checked_as_ever():
    call = arguments("greedy")
    call["draft_token_ids"] = call["draft_token_ids"][:, :-1]
    with pytest.raises(ValueError, match="must be"):
        export_verify(**call)
