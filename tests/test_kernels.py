"""What XLA gets wrong by itself in statistics of rows, and the thresholds of masks.

`test_kernels_triton.py` has the tests that every implementation passes.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import FULL_COMPILATION

from fly_jax import kernels
from fly_jax.config import SamplingParams
from fly_jax.rule import thresholds

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16]
SIZES = [1, 7, 128, 300, 1024]


def rows(size, dtype, seed=0):
    """Plain, tied, mostly -inf, one finite value at the end, nothing, +inf, and zeros of both signs."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(7, size)).astype(np.float32) * 4
    values[1] = np.round(values[1] / 4)
    values[2, rng.random(size) < 0.9] = -np.inf
    values[3] = np.append(np.full(size - 1, -np.inf), 2.5)
    values[4] = -np.inf
    values[5, size // 2] = np.inf
    values[6] = np.where(rng.random(size) < 0.5, 0.0, -0.0)
    return values.astype(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_and_max(size, dtype):
    values = rows(size, dtype)
    result = jax.jit(kernels.row_statistics)(values)
    exact = values.astype(np.float32)
    np.testing.assert_array_equal(result.max, exact.max(1))
    np.testing.assert_array_equal(result.argmax, exact.argmax(1))
    assert not result.has_nan.any()


@pytest.mark.parametrize("size", [300, 50257, 151936, pytest.param(50304, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [*DTYPES[:2], pytest.param(DTYPES[2], marks=pytest.mark.slow)])
def test_every_nan_is_found(size, dtype):
    """XLA CPU's max loses NaN on long rows, of either sign and wherever it stands."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=(12, size)).astype(dtype)
    columns = [0, size - 1, size // 2, 127 % size, *rng.integers(0, size, 6)]
    for row, column in enumerate(columns):
        values[row, column] = np.copysign(np.float32(np.nan), -1.0 if row % 2 else 1.0)
    values[11, 0], values[11, 1] = np.inf, -np.inf
    result = jax.jit(kernels.row_statistics, compiler_options=FULL_COMPILATION)(values)
    assert result.has_nan.tolist() == [True] * 10 + [False] * 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [None, 3])
def test_mass_under_scale_and_threshold(size, dtype, vocab_size):
    values = rows(size, dtype)[:4]
    exact = values.astype(np.float64)
    if vocab_size is not None:
        exact[:, vocab_size:] = -np.inf
    scale = np.array([2.0, 1.0, 0.5, 0.1], np.float32)
    row_max = np.where(np.isfinite(exact.max(1)), exact.max(1), 0)
    kept = np.where(exact >= row_max[:, None] - 1.5, exact, -np.inf)
    result = jax.jit(kernels.row_mass)(
        values,
        row_max.astype(np.float32),
        scale=scale,
        threshold=(row_max - 1.5).astype(np.float32),
        vocab_size=None if vocab_size is None else np.int32(vocab_size),
    )
    np.testing.assert_allclose(result, np.exp((kept - row_max[:, None]) * scale[:, None]).sum(1), rtol=2e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("k", [1, 3, 200])
def test_top_values(size, k):
    values = rows(size, np.float32)
    result = kernels.row_statistics(values, k=k)
    np.testing.assert_array_equal(result.top_values, -np.sort(-values, axis=1)[:, :k])


def test_columns_beyond_the_vocabulary_do_not_count():
    values = rows(300, np.float32)
    values[:, 131:] = 99.0
    values[0, 200] = np.nan
    result = kernels.row_statistics(values, vocab_size=np.int32(131), k=4)
    np.testing.assert_array_equal(result.argmax, values[:, :131].argmax(1))
    assert not result.has_nan.any()
    np.testing.assert_array_equal(result.top_values, -np.sort(-values[:, :131], axis=1)[:, :4])


@pytest.mark.parametrize("divisor", [np.linspace(0.1, 3, 1000, dtype=np.float32), np.full(1000, 0.7, np.float32)])
def test_division_is_division(divisor):
    """XLA would multiply by the reciprocal, which differs in the last place for a quarter of all quotients."""
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    values[0] = np.nan

    def divided(divisor):
        function = jax.jit(lambda values: thresholds.divide(values, divisor), compiler_options=FULL_COMPILATION)
        return function(values)

    result = divided(jnp.asarray(divisor))
    np.testing.assert_array_equal(result, values / divisor)
    constant = divided(jnp.full(1000, 0.7, jnp.float32))
    np.testing.assert_array_equal(constant, values / np.float32(0.7))


@pytest.mark.parametrize("temperature", [0.7, 3.0])
def test_ties_that_the_division_makes_are_kept(temperature):
    """Neighbouring floats with one quotient stand or fall together, whichever of them is the k-th."""
    base = np.float32(1.7)
    values = [base]
    for _ in range(15):
        values.append(np.nextafter(values[-1], np.float32(0)))
    values = np.array([[9.0, *values, -3.0]], np.float32)
    quotients = values / np.float32(temperature)
    assert len(np.unique(quotients)) < values.size
    for k in range(1, values.size):
        params = SamplingParams(jnp.full(1, temperature, jnp.float32), jnp.full(1, k, jnp.int32))
        threshold = jax.jit(thresholds.thresholds)(values, values.max(1), params.temperature, params)
        np.testing.assert_array_equal(values >= np.asarray(threshold), quotients >= np.sort(quotients[0])[-k])


def nucleus(probabilities, top_p):
    """The smallest kept probability: keep while the mass strictly above is below top_p."""
    return min(p for p in probabilities if probabilities[probabilities > p].sum() < top_p * probabilities.sum())


@pytest.mark.parametrize("size", [1, 7, 300])
@pytest.mark.parametrize("seed", range(3))
def test_masks_in_their_order(size, seed):
    rng = np.random.default_rng(seed)
    values = np.round(rng.normal(size=(4, size)) * 3, 1).astype(np.float32)
    temperature = np.array([0.7, 1.0, 3.0, 0.0], np.float32)
    top_k, top_p, min_p = rng.integers(1, 40, 4), rng.uniform(0.3, 0.95, 4), rng.uniform(0.001, 0.2, 4)
    params = SamplingParams(
        jnp.asarray(temperature),
        jnp.asarray(top_k, jnp.int32),
        jnp.asarray(top_p, jnp.float32),
        jnp.asarray(min_p, jnp.float32),
    )
    divisor = thresholds.divisor(params.temperature)
    result = np.asarray(jax.jit(thresholds.thresholds)(values, values.max(1), divisor, params))
    for row in range(3):
        scaled = values[row] / temperature[row]
        kept = np.sort(scaled)[::-1].astype(np.float64)
        kept = kept[kept >= kept[0] + np.log(min_p[row])]
        kept = kept[kept >= kept[min(top_k[row], len(kept)) - 1]]
        p = np.exp(kept - kept[0])
        kept = kept[p >= nucleus(p, top_p[row])]
        assert ((values[row] >= result[row]) == np.isin(scaled, kept.astype(np.float32))).all()
    assert result[3] == -np.inf


@pytest.mark.parametrize("spread", [0.0, 1e-30, 1.0, 3e38])
def test_the_search_is_exact_over_all_floats(spread):
    """Top-k of values around zero, tiny distances, and the whole range."""
    values = (np.array([[-1.0, -0.5, 0.0, 0.25, 1.0]]) * spread).astype(np.float32)
    for k in range(1, 5):
        params = SamplingParams(jnp.ones(1), jnp.full(1, k, jnp.int32))
        threshold = thresholds.thresholds(jnp.asarray(values), jnp.asarray(values.max(1)), jnp.ones(1), params)
        assert (values >= np.asarray(threshold)).sum() == (5 if spread == 0 else k)


@pytest.mark.parametrize("threshold", [0.0, -0.0])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_of_both_signs_are_one_number_to_top_p(threshold, zero):
    """More blocks than are looked up at the end, and only one of them holds the zeros."""
    logits = np.full((1, 16384), -5.0, np.float32)
    logits[0, 0] = 1.0
    logits[0, 12800:12810] = zero
    result = kernels.smallest_in_nucleus(
        jnp.asarray(logits),
        jnp.ones(1),
        jnp.ones(1),
        jnp.full(1, 0.999, jnp.float32),
        jnp.ones(1, bool),
        threshold=jnp.full(1, threshold, jnp.float32),
    )
    assert result.tolist() == [0.0]
