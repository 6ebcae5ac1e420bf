import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fly_jax import noise

UINT32 = 0xFFFFFFFF


def philox_word(seed, position):
    """Philox4x32-10 in Python integers (Salmon et al., SC 2011); word 0."""
    key = [seed & UINT32, seed >> 32]
    counter = [position & UINT32, position >> 32, 0, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & UINT32, (a >> 32) ^ counter[3] ^ key[1], a & UINT32]
        key = [(key[0] + 0x9E3779B9) & UINT32, (key[1] + 0xBB67AE85) & UINT32]
    return counter[0]


def test_philox_known_answer():
    """The published vector for an all-zero key and counter."""
    assert philox_word(0, 0) == 0x6627E8D5


def words(values):
    values = np.asarray(values, np.uint64)
    return np.stack([values & UINT32, values >> np.uint64(32)], -1).astype(np.uint32)


def test_philox_uniform():
    seeds, positions = [0, 7, 2**40 + 3, 2**64 - 1], [[0, 1, 2**33], [5, 6, 7], [1, 1, 2**63], [9, 8, 7]]
    result = jax.jit(noise.philox_uniform)(words(seeds), words(positions))
    for b, seed in enumerate(seeds):
        for i, position in enumerate(positions[b]):
            word = philox_word(seed, position)
            word = word if word < 2**31 else UINT32 - word
            step = np.float32(4.6566127342e-10)
            assert result[b, i] == max(np.float32(word) * step, step)
    assert ((result > 0) & (result <= 1)).all()


def test_murmur_gumbel_is_gumbel():
    """Mean and variance of a standard Gumbel, and none of it repeats."""
    sample = np.asarray(noise.murmur_gumbel(words([3]), words([11]), 200_000))[0]
    assert abs(sample.mean() - np.euler_gamma) < 0.01
    assert abs(sample.var() - np.pi**2 / 6) < 0.03
    assert np.isfinite(sample).all()
    assert len(np.unique(sample)) > 198_000


def test_uniforms_are_on_the_open_closed_interval_and_depend_on_position_alone():
    keys = jax.random.split(jax.random.key(0), 500)
    long, short = noise.verify_noise(keys, 64), noise.verify_noise(keys[:3], 5)
    assert (long.uniform > 0).all()
    assert (long.uniform <= 1).all()
    np.testing.assert_array_equal(long.uniform[:3, :5], short.uniform)
    np.testing.assert_array_equal(long.final_uniform[:3], short.final_uniform)
    assert len(np.unique(long.uniform)) > 0.99 * long.uniform.size


def test_drafting_and_verifying_draw_from_different_streams():
    keys = jax.random.split(jax.random.key(0), 100)
    verify, draft = noise.verify_noise(keys, 3), noise.verify_noise(noise.draft_keys(keys), 3)
    assert not jnp.isin(draft.uniform, verify.uniform).any()
    assert not jnp.isin(draft.final_uniform, verify.final_uniform).any()


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
@pytest.mark.parametrize("raw", [False, True], ids=["typed", "raw"])
def test_a_request_draws_with_its_own_key_whatever_the_generator(impl, raw):
    """Under vmap these generators use the first key only."""
    keys = jax.vmap(lambda seed: jax.random.key(seed, impl=impl))(jnp.arange(6, dtype=jnp.uint32))
    given = jax.random.key_data(keys) if raw else keys
    together = noise.verify_noise(noise.request_keys(given, 6), 3)
    for b in range(6):
        alone = noise.verify_noise(noise.request_keys(given[b : b + 1], 1), 3)
        np.testing.assert_array_equal(alone.uniform[0], together.uniform[b])
        np.testing.assert_array_equal(alone.final_uniform[0], together.final_uniform[b])
    assert len(np.unique(together.uniform)) == together.uniform.size
    one = noise.verify_noise(noise.request_keys(given[0], 6), 3)
    assert len(np.unique(one.uniform)) == one.uniform.size
    if not raw:
        direct = noise.verify_noise(keys, 3), noise.verify_noise(noise.draft_keys(keys), 3)
        np.testing.assert_array_equal(direct[0].uniform, together.uniform)
        reversed_ = noise.verify_noise(noise.draft_keys(keys[::-1]), 3)
        np.testing.assert_array_equal(reversed_.uniform[::-1], direct[1].uniform)
        assert not jnp.isin(direct[1].uniform, direct[0].uniform).any()


def test_draft_keys_are_of_requests():
    with pytest.raises(ValueError, match=r"keys must be \[B\] typed keys, as request_keys gives, got key<fry>\[\]"):
        noise.draft_keys(jax.random.key(0))
