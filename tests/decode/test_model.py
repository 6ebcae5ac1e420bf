import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fly_jax.decode.model import DecoderConfig, KVCache, random_decoder
from fly_jax.errors import UserError

LLAMA = DecoderConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
CONFIGS = {
    "llama": LLAMA,
    "qwen": dataclasses.replace(
        LLAMA, qkv_bias=True, qk_norm=True, tie_word_embeddings=False, num_kv_heads=4, head_dim=16
    ),
}
# Few shapes, since compiling is what takes the time: two requests, a cache of 20, steps of 4 or 20 tokens.
MAX_LENGTH = 20


@pytest.fixture(scope="module", params=CONFIGS)
def decoder(request):
    return random_decoder(CONFIGS[request.param], jax.random.key(0))


def random_ids(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, LLAMA.vocab_size, shape), jnp.int32)


def lengths(*values):
    return jnp.asarray(values, jnp.int32)


@functools.partial(jax.jit, static_argnames=("graphdef", "skip_layers"))
def _run(graphdef, state, token_ids, cache, skip_layers):
    return nnx.merge(graphdef, state)(token_ids, cache, skip_layers=skip_layers)


def run(decoder, token_ids, cache, skip_layers=()):
    """(logits, cache), compiled: operation by operation the tests take minutes."""
    return _run(*nnx.split(decoder), token_ids, cache, skip_layers)


def empty(config=LLAMA):
    return KVCache.zeros(config, 2, MAX_LENGTH)


def full_logits(decoder, token_ids):
    """token_ids [2, T] in one step, padded to the cache's length: [2, T, V]."""
    padding = jnp.zeros((2, MAX_LENGTH - token_ids.shape[1]), jnp.int32)
    logits, _ = run(decoder, jnp.concatenate([token_ids, padding], axis=1), empty(decoder.config))
    return logits[:, : token_ids.shape[1]]


def numpy_logits(decoder, token_ids):
    """The whole model for one request in plain float64 numpy, without a cache."""
    config = decoder.config
    state = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(decoder)))

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weight

    def rotate(x):
        angles = np.arange(x.shape[0])[:, None] * config.rope_theta ** -(np.arange(0, x.shape[-1], 2) / x.shape[-1])
        turn = np.exp(1j * angles)[:, None, :]
        half = x.shape[-1] // 2
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    x = state["embedding"].T[token_ids]
    future = np.triu(np.full((len(token_ids),) * 2, -np.inf), 1)
    for i in range(config.num_layers):
        w = state["layers"][i]
        qkv = norm(x, w["attention_norm"]) @ w["qkv"] + w.get("qkv_bias", 0.0)
        heads = qkv.reshape(len(token_ids), -1, config.head_dim)
        query, key, value = np.split(heads, [config.num_heads, config.num_heads + config.num_kv_heads], 1)
        if config.qk_norm:
            query, key = norm(query, w["query_norm"]), norm(key, w["key_norm"])
        repeats = config.num_heads // config.num_kv_heads
        query, key, value = rotate(query), np.repeat(rotate(key), repeats, 1), np.repeat(value, repeats, 1)
        scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(config.head_dim) + future
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), value)
        x = x + attended.reshape(len(token_ids), -1) @ w["attention_output"]
        gate, up = np.split(norm(x, w["mlp_norm"]) @ w["gate_up"], 2, -1)
        x = x + gate / (1 + np.exp(-gate)) * up @ w["down"]
    return norm(x, state["final_norm"]) @ state.get("head", state["embedding"])


def test_full_forward_equals_numpy(decoder):
    token_ids = random_ids((2, 20))
    expected = [numpy_logits(decoder, request) for request in token_ids]
    np.testing.assert_allclose(full_logits(decoder, token_ids), expected, atol=2e-5)


def test_cached_steps_equal_full_forward(decoder):
    token_ids = random_ids((2, 20))
    expected, cache = full_logits(decoder, token_ids), empty(decoder.config)
    for start in range(0, 20, 4):
        logits, cache = run(decoder, token_ids[:, start : start + 4], cache)
        np.testing.assert_array_equal(cache.length, [start, start])
        np.testing.assert_allclose(logits, expected[:, start : start + 4], atol=1e-5)
        cache = cache.advance(lengths(4, 4))


def test_ragged_lengths_equal_each_request_alone(decoder):
    token_ids = random_ids((2, 20))
    _, cache = run(decoder, token_ids, empty(decoder.config))
    logits, _ = run(decoder, random_ids((2, 4), seed=1), cache.advance(lengths(3, 14)))
    for i, length in enumerate((3, 14)):
        alone = jnp.concatenate([token_ids[:, :length], random_ids((2, 4), seed=1)], axis=1)
        np.testing.assert_allclose(logits[i], full_logits(decoder, alone)[i, length:], atol=1e-5)


def test_rejected_tokens_are_overwritten(decoder):
    steps = [random_ids((2, 4), seed=i) for i in range(3)]
    cache, kept = empty(decoder.config), []
    for token_ids in steps:
        logits, cache = run(decoder, token_ids, cache)
        cache = cache.advance(lengths(2, 2))
        kept.append(token_ids[:, :2])
    expected = full_logits(decoder, jnp.concatenate(kept, axis=1))
    np.testing.assert_allclose(logits[:, :2], expected[:, 4:], atol=1e-5)


def test_positions_past_the_cache_are_dropped(decoder):
    token_ids = random_ids((2, 20))
    expected, cache = run(decoder, token_ids, empty(decoder.config))
    step = jnp.concatenate([token_ids[:, 18:], random_ids((2, 2), seed=1)], axis=1)
    logits, overflown = run(decoder, step, cache.advance(lengths(18, 18)))
    np.testing.assert_allclose(logits[:, :2], expected[:, 18:], atol=1e-5)
    for before, after in zip(cache.keys + cache.values, overflown.keys + overflown.values, strict=True):
        np.testing.assert_allclose(before, after, atol=1e-5)


def test_token_ids_outside_the_vocabulary_do_not_reach_others(decoder):
    token_ids = random_ids((2, 4))
    padded = token_ids.at[0, 2:].set(-1).at[1, 2:].set(10**6)
    expected, _ = run(decoder, token_ids, empty(decoder.config))
    logits, cache = run(decoder, padded, empty(decoder.config))
    np.testing.assert_allclose(logits[:, :2], expected[:, :2], atol=1e-6)
    assert all(np.isfinite(array).all() for array in cache.keys + cache.values)


def test_skipped_layers(decoder):
    token_ids = random_ids((2, 4))
    shorter = nnx.merge(*nnx.split(decoder))
    shorter.config = dataclasses.replace(decoder.config, num_layers=1)
    shorter.layers = nnx.List([decoder.layers[1]])
    expected, expected_cache = run(shorter, token_ids, empty(shorter.config))
    logits, cache = run(decoder, token_ids, empty(decoder.config), skip_layers=(0,))
    np.testing.assert_allclose(logits, expected, atol=1e-6)
    np.testing.assert_allclose(cache.keys[1], expected_cache.keys[0], atol=1e-6)
    assert not cache.keys[0].any()
    assert not cache.values[0].any()


def test_jitted_split_module_is_traced_once_a_shape(decoder, count_traces):
    graphdef, state = nnx.split(decoder)
    step, traces = count_traces(lambda state, token_ids, cache: nnx.merge(graphdef, state)(token_ids, cache))
    cache, token_ids = empty(decoder.config), random_ids((2, 4))
    for num_kept in ((1, 4), (0, 2), (3, 3)):
        logits, cache = step(state, token_ids, cache)
        assert logits.dtype == jnp.float32
        cache = cache.advance(lengths(*num_kept))
    assert len(traces) == 1


def test_x64_changes_nothing(decoder):
    token_ids = random_ids((2, 4))
    expected, _ = run(decoder, token_ids, empty(decoder.config))
    with jax.enable_x64(True):
        logits, cache = run(decoder, token_ids, empty(decoder.config))
    assert logits.dtype == jnp.float32
    assert cache.length.dtype == jnp.int32
    np.testing.assert_allclose(logits, expected, atol=1e-6)


def test_bfloat16_weights_and_cache():
    expected = full_logits(random_decoder(LLAMA, jax.random.key(0)), random_ids((2, 20)))
    decoder = random_decoder(LLAMA, jax.random.key(0), dtype=jnp.bfloat16)
    logits, cache = run(decoder, random_ids((2, 20)), KVCache.zeros(LLAMA, 2, MAX_LENGTH, jnp.bfloat16))
    assert logits.dtype == jnp.float32
    assert cache.keys[0].dtype == jnp.bfloat16
    assert float(jnp.abs(logits - expected).max()) < 0.1 * float(expected.std())


def test_cache_is_a_pytree():
    cache = KVCache.zeros(LLAMA, 2, 16)
    leaves, treedef = jax.tree.flatten(cache)
    assert len(leaves) == 2 * LLAMA.num_layers + 1
    assert jax.tree.unflatten(treedef, leaves).max_length == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_ids": jnp.zeros(3, jnp.int32)}, r"token_ids must be \[B, T\] integers, got int32\[3\]"),
        ({"token_ids": jnp.zeros((1, 3))}, r"token_ids must be \[B, T\] integers, got float32"),
        ({"token_ids": jnp.zeros((2, 3), jnp.int32)}, "cache must have 2 layers of"),
        ({"token_ids": jnp.zeros((1, 9), jnp.int32)}, "9 tokens a request, but the cache has room for 8"),
        ({"skip_layers": (1, 2)}, r"skip_layers has \[2\]: layers are numbered from 0 to 1"),
    ],
)
def test_bad_steps(arguments, message):
    decoder = random_decoder(LLAMA, jax.random.key(0))
    arguments = {"token_ids": jnp.zeros((1, 3), jnp.int32), "cache": KVCache.zeros(LLAMA, 1, 8), **arguments}
    with pytest.raises(UserError, match=message):
        decoder(**arguments)


def test_bad_cache_sizes():
    with pytest.raises(UserError, match="max_length must be at least 1, got 0"):
        KVCache.zeros(LLAMA, 1, 0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_layers", 0, "num_layers must be a positive integer, got 0"),
        ("hidden_size", 3.5, "hidden_size must be a positive integer, got 3.5"),
        ("rope_theta", -1.0, "rope_theta must be a positive number, got -1.0"),
        ("num_heads", 3, "num_heads must be a multiple of num_kv_heads, got 3 and 2"),
        ("head_dim", 7, "head_dim must be even for rotary embeddings, got 7"),
    ],
)
def test_bad_configs(field, value, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(LLAMA, **{field: value})
