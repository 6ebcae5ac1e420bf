import chex
import jax
import numpy as np
import pytest

from fly_jax import FlyConfig, fly_verify, fly_verify_rows, layout


def test_rows_with_bonus_rows_as_in_vllm_v2():
    index = layout.row_index_from_lengths([2, 0, 3], 3, with_bonus_rows=True)
    assert index.tolist() == [[0, 1, 2, -1], [3, -1, -1, -1], [4, 5, 6, 7]]
    assert index.dtype == np.int32


def test_rows_without_bonus_rows_as_in_vllm_v1():
    index, lengths = layout.row_index_from_cumulative(np.array([2, 2, 5], np.int32), 3)
    assert index.tolist() == [[0, 1, -1, -1], [-1, -1, -1, -1], [2, 3, 4, -1]]
    assert lengths.tolist() == [2, 0, 3]


def test_no_requests_have_no_rows():
    assert layout.row_index_from_lengths([], 4, with_bonus_rows=True).shape == (0, 5)


@pytest.mark.parametrize(("size", "expected"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1025, 2048)])
def test_bucket_is_the_next_power_of_two(size, expected):
    assert layout.bucket(size) == expected
    assert layout.bucket(size, smallest=16) == max(16, expected)


@pytest.mark.parametrize(
    ("sizes", "allowed"), [(range(1, 33), {1, 8, 32}), (range(33, 129), {128}), (range(129, 200), {512})]
)
def test_request_buckets(sizes, allowed):
    assert {layout.request_bucket(size) for size in sizes} == allowed
    assert all(layout.request_bucket(size) >= size for size in sizes)


@pytest.mark.parametrize("most", [8, 64, 96, 256])
def test_three_row_buckets_hold_every_step(most):
    sizes = {rows: layout.row_bucket(rows, most) for rows in range(most + 1)}
    assert all(size >= rows for rows, size in sizes.items())
    assert len(set(sizes.values())) <= 3


@pytest.mark.parametrize("with_bonus_rows", [True, False])
def test_a_padded_step_gives_the_result_of_the_unpadded_one(with_bonus_rows):
    rng = np.random.default_rng(0)
    lengths, vocab = np.array([3, 0, 5, 1]), 20
    num_rows = lengths.sum() + with_bonus_rows * len(lengths)
    logits = rng.normal(size=(num_rows, vocab)).astype(np.float32)
    ids = rng.integers(0, vocab, lengths.sum())
    # No real request has the padding's temperature: it must not reach the row that padding requests point at.
    temperature = np.array([0.3, 0.7, 1.0, 5.0], np.float32)
    keys = jax.random.split(jax.random.key(1), 4)
    padded = layout.pad_rows(logits, ids, lengths, with_bonus_rows=with_bonus_rows, num_requests=8)
    bonus = {} if with_bonus_rows else {"bonus_token_ids": np.arange(8, dtype=np.int32)}
    result = jax.jit(fly_verify_rows)(
        padded.target_logits,
        padded.row_index,
        padded.draft_token_ids,
        num_draft_tokens=padded.num_draft_tokens,
        temperature=layout.pad_requests(temperature, 8, 0.0),
        key=layout.pad_requests(keys, 8, 0),
        config=FlyConfig(1),
        **bonus,
    )
    assert padded.draft_token_ids.shape == (8, 16)
    assert padded.target_logits.shape == (64 if with_bonus_rows else 32, vocab)
    verify = jax.jit(fly_verify)
    start = 0
    for b, n in enumerate(lengths):
        rows = logits[start : start + n + with_bonus_rows]
        if not with_bonus_rows:
            rows = np.concatenate([rows, np.zeros((1, vocab), np.float32)])
        alone = verify(
            np.pad(rows, ((0, 16 - n), (0, 0)), constant_values=np.nan)[None],
            padded.draft_token_ids[b : b + 1],
            num_draft_tokens=np.array([n], np.int32),
            temperature=temperature[b : b + 1],
            key=keys[b : b + 1],
            config=FlyConfig(1),
        )
        if not with_bonus_rows and alone.num_accepted[0] == n:
            alone_ids = [*alone.token_ids[0, :n].tolist(), b]
        else:
            alone_ids = alone.token_ids[0, : n + 1].tolist()
        assert result.token_ids[b].tolist() == alone_ids + [-1] * (16 - n)
        start += n + with_bonus_rows


def test_a_serving_loop_compiles_a_handful_of_times():
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(fly_verify_rows, n=6))
    rng = np.random.default_rng(0)
    shapes = set()
    for _ in range(60):
        lengths = rng.integers(0, 4, rng.integers(1, 5))
        logits = rng.normal(size=(lengths.sum() + len(lengths), 8)).astype(np.float32)
        padded = layout.pad_rows(
            logits, rng.integers(0, 8, lengths.sum()), lengths, with_bonus_rows=True, num_positions=3, num_requests=4
        )
        shapes.add(padded.target_logits.shape)
        step(
            padded.target_logits,
            padded.row_index,
            padded.draft_token_ids,
            num_draft_tokens=padded.num_draft_tokens,
            config=FlyConfig(1),
        )
    assert len(shapes) <= 6


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: layout.row_index_from_lengths([4], 3, with_bonus_rows=True), r"must be in .* \[0, 3\], got 4 to 4"),
        (lambda: layout.row_index_from_lengths([-1], 3, with_bonus_rows=True), "got -1 to -1"),
        (lambda: layout.row_index_from_lengths([[1]], 3, with_bonus_rows=True), "must be one-dimensional integers"),
        (lambda: layout.row_index_from_cumulative([3, 2], 3), "cu_num_draft_tokens must not decrease"),
        (lambda: layout.bucket(-1), "size must be at least 0"),
        (
            lambda: layout.pad_rows(np.zeros((3, 4)), [1, 2], [2], with_bonus_rows=False),
            r"target_logits must be \[N, V\] with N = 2 rows",
        ),
        (
            lambda: layout.pad_rows(np.zeros((3, 4)), [1], [2], with_bonus_rows=True),
            r"draft_token_ids must hold .* = 2 ids, got 1",
        ),
        (
            lambda: layout.pad_rows(np.zeros((3, 4)), [1, 2], [2], with_bonus_rows=True, num_rows=2),
            "num_rows must be at least 3 for this step, got 2",
        ),
        (lambda: layout.pad_requests([1, 2], 1, 0), "values must hold at most size = 1 entries, got 2"),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
