"""Every bad argument gets one error that names it, what it was and what is allowed; device values never do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fly_jax import FlyConfig, VerifyNoise, VllmV2Noise, fly_verify, fly_verify_rows

B, K, V = 2, 3, 5
LOGITS = np.zeros((B, K + 1, V), np.float32)
DRAFTS = np.zeros((B, K), np.int32)
KEY = jax.random.key(0)
UNIFORM = VerifyNoise(np.ones((B, K), np.float32), np.ones((B, 2), np.float32))


def verify(**changes):
    arguments = {"target_logits": LOGITS, "draft_token_ids": DRAFTS} | changes
    return fly_verify(arguments.pop("target_logits"), arguments.pop("draft_token_ids"), **arguments)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"target_logits": LOGITS[0]}, ValueError, r"target_logits must be \[B, K \+ 1, V\], got shape \[4, 5\]"),
        ({"target_logits": LOGITS[:, :3]}, ValueError, r"target_logits must be .* got \[2, 3, 5\] and \[2, 3\]"),
        ({"target_logits": LOGITS.astype(np.float64)}, TypeError, "target_logits must be float32.* got float64"),
        ({"target_logits": LOGITS.astype(np.int32)}, TypeError, "target_logits must be float32.* got int32"),
        ({"target_logits": LOGITS[:, :, :0]}, ValueError, "target_logits must have a vocabulary of at least 1 column"),
        ({"draft_token_ids": DRAFTS.astype(np.float32)}, TypeError, "draft_token_ids must be int32 .* got float32"),
        ({"draft_token_ids": DRAFTS[0]}, ValueError, "target_logits must be"),
        ({"target_logits": [[[0.0]]]}, ValueError, r"target_logits must be .* got \[1, 1, 1\] and \[2, 3\]"),
        ({"config": FlyConfig(1, None)}, TypeError, "entropy_threshold must be a number of nats .* got None"),
        ({"config": FlyConfig(1, jnp.ones(2, bool))}, TypeError, "entropy_threshold must be .* got bool"),
        ({"num_draft_tokens": [1]}, ValueError, r"num_draft_tokens must have shape \[B\] with B = 2, got \[1\]"),
        ({"num_draft_tokens": [1.0, 2.0]}, TypeError, "num_draft_tokens must be int32 .* got float32"),
        ({"config": {"window_size": 1}}, TypeError, "config must be a FlyConfig, or None .* got dict"),
        ({"config": FlyConfig(1, np.zeros(3))}, ValueError, r"entropy_threshold must be a number or \[B\] = \[2\]"),
        ({"temperature": 1.0}, ValueError, "temperature needs key= or noise=, and not both"),
        ({"temperature": 1.0, "key": KEY, "noise": UNIFORM}, ValueError, "temperature needs key= or noise="),
        ({"key": KEY}, ValueError, "key and noise are for sampling"),
        ({"noise": UNIFORM}, ValueError, "key and noise are for sampling"),
        ({"top_k": 3}, ValueError, "top_k is for sampling: pass temperature"),
        ({"top_p": 0.9}, ValueError, "top_p is for sampling: pass temperature"),
        ({"min_p": 0.1}, ValueError, "min_p is for sampling: pass temperature"),
        ({"temperature": np.ones(3, np.float32), "key": KEY}, ValueError, r"temperature must have shape \[B\]"),
        ({"temperature": np.ones(2, bool), "key": KEY}, TypeError, "temperature must be float32, got bool"),
        ({"temperature": 1.0, "key": KEY, "top_k": 2.5}, TypeError, "top_k must be int32 .* got float32"),
        ({"temperature": 1.0, "key": 0}, TypeError, "key must be a jax.random key"),
        (
            {"temperature": 1.0, "key": jax.random.split(KEY, 3)},
            ValueError,
            r"key must be one key or \[B\] = \[2\] keys",
        ),
        ({"temperature": 1.0, "noise": np.ones(3)}, TypeError, "noise must be VerifyNoise or VllmV2Noise, got ndarray"),
        (
            {"temperature": 1.0, "noise": VerifyNoise(np.ones((B, K), np.float32))},
            ValueError,
            "noise needs final_uniform .* or gumbel",
        ),
        (
            {"temperature": 1.0, "noise": VerifyNoise(np.ones((B, K + 1), np.float32), np.ones((B, 2), np.float32))},
            ValueError,
            r"noise.uniform must have shape \[B, K\] with B = 2, K = 3, got \[2, 4\]",
        ),
        (
            {"temperature": 1.0, "noise": VllmV2Noise(np.ones((B, 2), np.int32), np.ones((B, K + 1, 2), np.uint32))},
            TypeError,
            "noise.seed must be uint32 .* got int32",
        ),
        (
            {"draft_probs": np.zeros((B, K, V), np.float32), "draft_logits": np.zeros((B, K, V), np.float32)},
            ValueError,
            "draft_probs and draft_logits exclude each other",
        ),
        ({"draft_probs": np.zeros((B, K + 1, V), np.float32)}, ValueError, r"draft_probs must be \[B, K, Vd\]"),
        ({"draft_probs": np.zeros((B, K, V))}, TypeError, "draft_probs must be float32.* got float64"),
        (
            {"temperature": 1.0, "key": KEY, "draft_temperature": 1.0},
            ValueError,
            "draft_temperature divides draft_logits",
        ),
        ({"vocab_size": 0}, ValueError, r"vocab_size must be in \[1, V\] = \[1, 5\], got 0"),
        ({"vocab_size": 6}, ValueError, r"vocab_size must be in \[1, V\] = \[1, 5\], got 6"),
        ({"vocab_size": 4.0}, TypeError, "vocab_size must be an int"),
    ],
)
def test_bad_arguments(changes, error, words):
    with pytest.raises(error, match=words):
        verify(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"row_index": np.zeros((B, K), np.int32)}, ValueError, r"row_index must have shape \[B, K \+ 1\]"),
        ({"target_logits": LOGITS}, ValueError, r"target_logits must have shape \[N, V\], got \[2, 4, 5\]"),
        ({"draft_row_index": np.zeros((B, 1), np.int32), "draft_probs": LOGITS[0]}, ValueError, "draft_row_index must"),
        ({"bonus_token_ids": np.zeros((B, 1), np.int32)}, ValueError, r"bonus_token_ids must have shape \[B\]"),
    ],
)
def test_bad_rows(changes, error, words):
    arguments = {
        "target_logits": LOGITS.reshape(-1, V),
        "row_index": np.arange(B * (K + 1)).reshape(B, -1),
        "draft_token_ids": DRAFTS,
    } | changes
    positional = [arguments.pop(name) for name in ("target_logits", "row_index", "draft_token_ids")]
    with pytest.raises(error, match=words):
        fly_verify_rows(*positional, **arguments)


def test_errors_come_at_trace_time_under_jit():
    with pytest.raises(ValueError, match="temperature needs key="):
        jax.jit(fly_verify)(LOGITS, DRAFTS, temperature=np.float32(1))


def test_scalars_stand_for_every_request():
    one = verify(temperature=0.7, key=KEY, top_k=3, top_p=0.9, min_p=0.1)
    each = verify(
        temperature=np.full(B, 0.7, np.float32),
        key=KEY,
        top_k=np.full(B, 3),
        top_p=np.full(B, 0.9, np.float32),
        min_p=np.full(B, 0.1, np.float32),
    )
    np.testing.assert_array_equal(one.token_ids, each.token_ids)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.uint8, np.uint32, np.int64, np.uint64])
def test_ids_of_any_integer_dtype(dtype):
    ids = np.argmax(LOGITS + np.arange(V, dtype=np.float32), -1)[:, :K].astype(dtype)
    result = verify(target_logits=LOGITS + np.arange(V, dtype=np.float32), draft_token_ids=ids)
    assert result.num_accepted.tolist() == [K, K]


def test_a_wide_id_is_not_wrapped_into_the_vocabulary():
    logits = LOGITS.copy()
    logits[..., 2] = 1.0
    assert verify(target_logits=logits, draft_token_ids=np.full((B, K), 2)).num_accepted.tolist() == [K, K]
    assert verify(target_logits=logits, draft_token_ids=np.full((B, K), 2**32 + 2)).num_accepted.tolist() == [0, 0]


@pytest.mark.parametrize("verify", [fly_verify, jax.jit(fly_verify)], ids=["as it is", "jit"])
def test_a_float64_uniform_is_rounded_up(verify):
    """p == 0.5 accepts u == 0.5 and rejects the next float64, which is nearest to the same float32."""
    logits = np.array([[[0.0, 0.0], [9.0, 0.0]]], np.float32)
    final = np.ones((1, 2), np.float32)

    def accepted(u):
        noise = VerifyNoise(np.array([[u]], np.float64), final)
        return verify(logits, np.array([[1]]), temperature=1.0, noise=noise).num_accepted.tolist()

    assert accepted(0.5) == [1]
    assert np.float32(np.nextafter(0.5, 1)) == np.float32(0.5)
    assert accepted(np.nextafter(0.5, 1)) == [0]


def test_huge_lengths_and_nested_lists_are_clipped_and_converted():
    assert verify(num_draft_tokens=[2**40, -(2**40)]).num_tokens.tolist() == [K + 1, 1]
    assert verify(target_logits=LOGITS.tolist(), draft_token_ids=DRAFTS.tolist()).num_accepted.tolist() == [K, K]


def test_numbers_of_one_kind_compile_once(count_traces):
    run, traces = count_traces(fly_verify)
    for threshold in (0, 1, 0.5, np.float32(0.2), np.float64(0.1)):
        run(LOGITS, DRAFTS, config=FlyConfig(1, threshold))
    assert len(traces) == 1


def test_device_values_out_of_range_follow_the_rule():
    result = jax.jit(fly_verify)(
        LOGITS,
        np.array([[-1, 99, 0], [0, 0, 0]]),
        num_draft_tokens=np.array([99, -3]),
        temperature=np.array([np.nan, np.inf], np.float32),
        top_k=np.array([-5, 10**6]),
        top_p=np.array([-1.0, np.nan], np.float32),
        min_p=np.array([7.0, np.nan], np.float32),
        key=KEY,
        vocab_size=jnp.int32(99),
    )
    assert result.num_tokens.tolist() == [1, 1]
    assert not result.invalid.any()
    assert ((result.token_ids[:, 0] >= 0) & (result.token_ids[:, 0] < V)).all()


def test_raw_keys_are_keys():
    raw = jax.random.key_data(KEY)
    one = verify(temperature=1.0, key=KEY)
    np.testing.assert_array_equal(one.token_ids, verify(temperature=1.0, key=raw).token_ids)
    keys = jax.random.split(KEY, B)
    np.testing.assert_array_equal(
        verify(temperature=1.0, key=keys).token_ids,
        verify(temperature=1.0, key=jax.random.key_data(keys)).token_ids,
    )


def test_row_indices_past_the_draft_may_hold_anything():
    """Also where such an entry points at another request's row, whose draft temperature differs."""
    rng = np.random.default_rng(1)
    logits, q_logits = rng.normal(size=(B * (K + 1), 40)), rng.normal(size=(B * K, 40)) * 4
    rows, draft_rows = np.arange(B * (K + 1)).reshape(B, -1), np.arange(B * K).reshape(B, -1)

    def run(rows, draft_rows):
        return jax.jit(fly_verify_rows)(
            logits.astype(np.float32),
            rows,
            np.full((B, K), 3),
            draft_row_index=draft_rows,
            draft_logits=q_logits.astype(np.float32),
            num_draft_tokens=np.array([K, 1]),
            temperature=np.array([0.5, 2.0], np.float32),
            key=KEY,
        )

    wild_rows, wild_draft_rows = rows.copy(), draft_rows.copy()
    wild_rows[1, 2:] = [0, -9]
    wild_draft_rows[1, 1:] = [0, 10**6]
    plain, wild = run(rows, draft_rows), run(wild_rows, wild_draft_rows)
    jax.tree.map(np.testing.assert_array_equal, plain, wild)
