import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from fly_jax import emitted_logprobs, fly_verify, fly_verify_rows


def setup(temperature=1.0):
    rng = np.random.default_rng(3)
    logits = (3 * rng.normal(size=(4, 4, 300))).astype(np.float32)
    drafts = logits[:, :3].argmax(-1).astype(np.int32)
    return logits, fly_verify(logits, drafts, temperature=temperature, key=jax.random.key(0), config=None)


def expected(logits, verification):
    ids = np.asarray(verification.token_ids)
    values = np.take_along_axis(logits, np.maximum(ids, 0)[..., None], -1)[..., 0]
    return np.where(ids >= 0, values, np.nan)


def test_raw_logprobs_are_those_of_the_softmax():
    logits, verification = setup()
    result = emitted_logprobs(logits, verification)
    np.testing.assert_allclose(result, expected(log_softmax(logits.astype(np.float64), -1), verification), atol=1e-5)
    assert np.isnan(result).sum() == 16 - verification.num_tokens.sum()


def test_processed_logprobs_follow_temperature_and_top_k():
    logits, verification = setup(0.5)
    scaled = logits.astype(np.float64) / 0.5
    kept = scaled >= np.sort(scaled, -1)[..., -5][..., None]
    wanted = expected(log_softmax(np.where(kept, scaled, -np.inf), -1), verification)
    result = emitted_logprobs(logits, verification, temperature=0.5, top_k=5)
    np.testing.assert_allclose(result, wanted, atol=1e-5)


def test_columns_beyond_the_vocabulary_do_not_count():
    logits, verification = setup()
    padded = np.concatenate([logits, np.full((4, 4, 20), 50.0, np.float32)], -1)
    np.testing.assert_allclose(
        emitted_logprobs(padded, verification, vocab_size=300), emitted_logprobs(logits, verification), atol=1e-6
    )


def test_a_row_that_is_no_distribution_has_no_logprob():
    logits, verification = setup()
    logits[0, 0, 7] = np.nan
    result = emitted_logprobs(logits, verification)
    assert np.isnan(result[0, 0])
    assert not np.isnan(result[1, 0])


def test_low_temperature_and_large_logits_stay_precise():
    logits = np.full((1, 2, 4), 3e4, np.float32) - np.arange(4, dtype=np.float32)
    verification = fly_verify(logits, np.array([[2]]), config=None)
    wanted = expected(log_softmax(logits.astype(np.float64), -1), verification)
    np.testing.assert_allclose(emitted_logprobs(logits, verification), wanted, atol=1e-6)


def test_a_bonus_token_outside_the_vocabulary_has_no_probability():
    rows = np.zeros((2, 3), np.float32)
    verification = fly_verify_rows(rows, np.array([[0, 1]]), np.array([[0]]), bonus_token_ids=np.array([7]))
    assert verification.token_ids.tolist() == [[0, 7]]
    assert emitted_logprobs(rows[None], verification)[0, 1] == -np.inf


def test_masks_need_a_temperature():
    logits, verification = setup()
    with pytest.raises(ValueError, match="top_k is for sampling: pass temperature"):
        emitted_logprobs(logits, verification, top_k=3)


def test_shapes_must_agree():
    logits, verification = setup()
    with pytest.raises(ValueError, match=r"target_logits must be \[B, K \+ 1, V\] .* got \[4, 3, 300\]"):
        emitted_logprobs(logits[:, :3], verification)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_is_that_of_log_softmax(dtype):
    logits, verification = setup()
    logits = jnp.asarray(logits, dtype)
    rows, columns = np.nonzero(np.asarray(verification.token_ids) >= 0)
    tokens = np.asarray(verification.token_ids)[rows, columns]

    def plain(logits):
        return jax.nn.log_softmax(logits.astype(jnp.float32) / 0.7, axis=-1)[rows, columns, tokens].sum()

    def ours(logits):
        return jnp.nansum(emitted_logprobs(logits, verification, temperature=0.7))

    result, wanted = (jax.grad(each)(logits).astype(jnp.float32) for each in (ours, plain))
    np.testing.assert_allclose(result, wanted, rtol=0, atol=2e-6 if dtype == "float32" else 2**-6)
