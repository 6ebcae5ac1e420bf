"""Row statistics in NumPy and float64, and the rows that implementations get wrong: what every one is tested with."""

import dataclasses

import numpy as np

TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Expected:
    """Float64 statistics; what is unspecified for a row with a NaN is whatever came out."""

    argmax: np.ndarray
    max: np.ndarray
    log_mass: np.ndarray
    top_values: np.ndarray
    entropy: np.ndarray
    token_logits: np.ndarray | None
    has_nan: np.ndarray


def row_statistics(logits, token_ids=None, *, scale=None, threshold=None, vocab_size=None, k=3):
    """The definition, row by row."""
    logits = logits.astype(np.float64)
    num_rows, num_columns = logits.shape
    scale = np.ones(num_rows) if scale is None else scale.astype(np.float64)
    limit = np.full(num_rows, num_columns) if vocab_size is None else np.broadcast_to(vocab_size, num_rows)
    there = np.where(np.arange(num_columns) < limit[:, None], logits, -np.inf)
    has_nan = np.isnan(there).any(axis=1)
    row_max = np.where(has_nan, np.nan, there.max(axis=1))
    kept = there if threshold is None else np.where(there < threshold[:, None], -np.inf, there)
    shift = np.where(np.isfinite(row_max), row_max, 0.0)[:, None]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        log_mass = np.log(np.exp((kept - shift) * scale[:, None]).sum(axis=1))
        log_mass = np.where(np.isinf(row_max), row_max, log_mass)
        top_values = -np.sort(-kept, axis=1)[:, :k]
        log_p = (top_values - shift) * scale[:, None] - log_mass[:, None]
        p = np.exp(log_p)
        entropy = -np.where(p < TINY, 0.0, p * log_p).sum(axis=1)
    token_logits = None
    if token_ids is not None:
        token_logits = logits[np.arange(num_rows), np.clip(token_ids, 0, num_columns - 1)]
    return Expected(
        argmax=there.argmax(axis=1),
        max=row_max,
        log_mass=log_mass,
        top_values=top_values,
        entropy=np.where(np.isfinite(row_max), entropy, np.nan),
        token_logits=token_logits,
        has_nan=has_nan,
    )


def special_rows(num_columns, dtype, seed=0):
    """`[15, V]`: two plain ones; the rest by the names in the code, each hard for some implementation."""
    rng = np.random.default_rng(seed)
    plain = rng.normal(0, 4, (2, num_columns))
    ties = np.round(rng.normal(0, 1, num_columns))
    sparse = np.where(rng.random(num_columns) < 0.9, -np.inf, rng.normal(0, 4, num_columns))
    only_the_last = np.append(np.full(num_columns - 1, -np.inf), 2.5)
    nothing = np.full(num_columns, -np.inf)
    infinite = rng.normal(0, 100, num_columns)
    infinite[num_columns // 2] = np.inf
    all_infinite = np.full(num_columns, np.inf)
    zeros = np.where(rng.random(num_columns) < 0.5, 0.0, -0.0)
    equal = np.full(num_columns, 1.25)
    largest = float(np.finfo(np.float16).max if dtype == np.float16 else np.finfo(np.float32).max) * 0.99
    huge = np.where(rng.random(num_columns) < 0.5, -largest, largest)
    mask = np.full(num_columns, -largest)
    mask[num_columns // 3] = -3.0
    nan, negative_nan, only_nan = plain[0].copy(), plain[1].copy(), np.full(num_columns, np.nan)
    nan[num_columns // 2], negative_nan[-1] = np.nan, -np.nan
    rows = [ties, sparse, only_the_last, nothing, infinite, all_infinite, zeros, equal, huge, mask]
    with np.errstate(over="ignore"):
        return np.stack([*plain, *rows, nan, negative_nan, only_nan]).astype(dtype)


def special_operands(values, names, seed=1):
    """Those of `names`: tokens out of range among them, thresholds that keep one value, some, all, and only +inf."""
    rng = np.random.default_rng(seed)
    num_rows, num_columns = values.shape
    operands = {
        "token_ids": rng.integers(-3, num_columns + 3, num_rows).astype(np.int32),
        "scale": np.exp(rng.normal(0, 1, num_rows)).astype(np.float32),
        "vocab_size": np.where(rng.random(num_rows) < 0.3, num_columns, max(1, num_columns - 5)).astype(np.int32),
    }
    limit = operands["vocab_size"] if "vocab_size" in names else np.full(num_rows, num_columns)
    there = np.where(np.arange(num_columns) < limit[:, None], values.astype(np.float32), -np.inf)
    row_max = np.nan_to_num(np.nanmax(np.where(np.isnan(there), -np.inf, there), axis=1), nan=0.0, posinf=np.inf)
    below = rng.choice([0.0, 1.5, 30.0], num_rows).astype(np.float32)
    operands["threshold"] = np.where(np.isfinite(row_max), row_max - below, row_max).astype(np.float32)
    return {name: operands[name] for name in names}


def check(result, expected, *, rtol=3e-6, atol=3e-6):
    """Everything but what is unspecified for a row with a NaN."""
    valid = ~expected.has_nan
    np.testing.assert_array_equal(result.has_nan, expected.has_nan)
    for name in ("argmax", "max", "top_values"):
        np.testing.assert_array_equal(np.asarray(getattr(result, name))[valid], getattr(expected, name)[valid], name)
    np.testing.assert_allclose(result.log_mass, expected.log_mass, rtol, atol, err_msg="log_mass")
    np.testing.assert_allclose(result.entropy, expected.entropy, rtol, atol, err_msg="entropy")
    if expected.token_logits is None:
        assert result.token_logits is None
    else:
        np.testing.assert_array_equal(result.token_logits, expected.token_logits)
    assert [result.argmax.dtype, result.has_nan.dtype] == [np.int32, bool]
    for name in ("max", "log_mass", "top_values", "entropy"):
        assert getattr(result, name).dtype == np.float32
