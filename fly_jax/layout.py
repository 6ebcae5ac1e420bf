"""From a serving engine's flattened rows to `fly_verify_rows`, and shape buckets against recompilation.

An engine's batch size and draft lengths change at every step, and each new shape would compile again. `pad_rows` pads
a step to the next bucket on the host: over a long run a handful of programs serve all steps. With up to 16 drafts each,
a mode (greedy, or sampling with or without draft probabilities) compiles at most 8 times for up to 32 requests, and at
most 11 times for up to 128: the request buckets, times the sizes that `row_bucket` allows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def row_index_from_lengths(num_draft_tokens: Any, num_positions: int, *, with_bonus_rows: bool) -> np.ndarray:
    """Which flattened row scores which position, from the number of drafts of each request.

    Args:
      num_draft_tokens: `[B]` integers.
      num_positions: K, at least the largest of them.
      with_bonus_rows: whether each request's rows end with its bonus row (vLLM V2's logits), or the rows of drafts
        follow each other directly (vLLM V1's target logits, with bonus tokens sampled apart).

    Returns:
      `[B, K + 1]` int32; entries past the last row of a request are -1.

    Raises:
      ValueError: a length is negative or above K.
    """
    lengths = _lengths("num_draft_tokens", num_draft_tokens)
    if lengths.size and (lengths.min() < 0 or lengths.max() > num_positions):
        raise ValueError(
            f"num_draft_tokens must be in [0, num_positions] = [0, {num_positions}], "
            f"got {lengths.min()} to {lengths.max()}"
        )
    num_rows = lengths + int(with_bonus_rows)
    first = np.cumsum(num_rows) - num_rows
    position = np.arange(num_positions + 1)
    rows = first[:, None] + position
    return np.where(position < num_rows[:, None], rows, -1).astype(np.int32)


def row_index_from_cumulative(cu_num_draft_tokens: Any, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Row indices from vLLM V1's `cu_num_draft_tokens` (no leading zero, no bonus rows).

    Args:
      cu_num_draft_tokens: `[B]` integers, running totals of the number of drafts.
      num_positions: K, at least the most drafts of a request.

    Returns:
      `row_index` `[B, K + 1]` int32 and `num_draft_tokens` `[B]` int32.

    Raises:
      ValueError: the totals decrease, or a request has more than K drafts.
    """
    cumulative = _lengths("cu_num_draft_tokens", cu_num_draft_tokens)
    lengths = np.diff(cumulative, prepend=0)
    if lengths.size and lengths.min() < 0:
        raise ValueError(f"cu_num_draft_tokens must not decrease, got {cumulative.tolist()}")
    return row_index_from_lengths(lengths, num_positions, with_bonus_rows=False), lengths.astype(np.int32)


def bucket(size: int, *, smallest: int = 1) -> int:
    """The next power of two that holds `size`, at least `smallest`."""
    if size < 0 or smallest < 1:
        raise ValueError(f"size must be at least 0 and smallest at least 1, got {size} and {smallest}")
    return max(smallest, 1 << max(size - 1, 0).bit_length())


def request_bucket(num_requests: int) -> int:
    """1, 8, 32, 128, ...: a single stream keeps its own programs, which pay for no padding request."""
    size = 1 if num_requests <= 1 else 8
    while size < num_requests:
        size *= 4
    return size


def position_bucket(num_positions: int) -> int:
    """16, 64, 256, ...: positions past a draft cost next to nothing."""
    size = 16
    while size < num_positions:
        size *= 4
    return size


def row_bucket(num_rows: int, most_rows: int) -> int:
    """A power of two that holds `num_rows`, at least 8 and a quarter of the most rows that the other buckets hold."""
    return bucket(num_rows, smallest=max(8, bucket(most_rows) // 4))


@dataclasses.dataclass(frozen=True)
class PaddedRows:
    """A step of a serving engine, padded to a bucket; the first three go to `fly_verify_rows` by position.

    Attributes:
      target_logits: `[N', V]`, the dtype of the given logits.
      row_index: `[B', K' + 1]` int32.
      draft_token_ids: `[B', K']` int32, -1 where there is none.
      num_draft_tokens: `[B']` int32, 0 for padding requests.
    """

    target_logits: np.ndarray
    row_index: np.ndarray
    draft_token_ids: np.ndarray
    num_draft_tokens: np.ndarray


def pad_rows(
    target_logits: Any,
    draft_token_ids: Any,
    num_draft_tokens: Any,
    *,
    with_bonus_rows: bool,
    num_requests: int | None = None,
    num_positions: int | None = None,
    num_rows: int | None = None,
) -> PaddedRows:
    """Pads flattened rows to a bucket of shapes, on the host.

    Per-request arrays (temperatures, keys) are padded with `pad_requests`. The results of the padding requests come
    last: take the first B. The window size must be given in `FlyConfig`, since the array's K is the bucket's.

    Args:
      target_logits: `[N, V]`.
      draft_token_ids: `[sum(num_draft_tokens)]` integers, the drafts of all requests in order.
      num_draft_tokens: `[B]` integers.
      with_bonus_rows: as in `row_index_from_lengths`.
      num_requests: B'; None is its `request_bucket`.
      num_positions: K'; None is its `position_bucket`.
      num_rows: N'; None is its `row_bucket`.

    Returns:
      The padded step.

    Raises:
      ValueError: the arrays do not fit each other, or the bucket is too small.
    """
    logits = np.asarray(target_logits)
    ids = _lengths("draft_token_ids", draft_token_ids)
    lengths = _lengths("num_draft_tokens", num_draft_tokens)
    total = int(lengths.sum())
    rows = total + (len(lengths) if with_bonus_rows else 0)
    if logits.ndim != 2 or len(logits) != rows:
        raise ValueError(
            f"target_logits must be [N, V] with N = {rows} rows for these drafts, got {list(logits.shape)}"
        )
    if len(ids) != total:
        raise ValueError(f"draft_token_ids must hold sum(num_draft_tokens) = {total} ids, got {len(ids)}")
    longest = int(lengths.max(initial=0))
    positions = _at_least("num_positions", num_positions, longest, position_bucket(longest))
    requests = _at_least("num_requests", num_requests, len(lengths), request_bucket(len(lengths)))
    most_rows = requests * (positions + int(with_bonus_rows))
    padded_rows = _at_least("num_rows", num_rows, rows, row_bucket(rows, most_rows))
    lengths = pad_requests(lengths, requests, 0)
    draft_ids = np.full((requests, positions), -1, np.int32)
    draft_ids[np.arange(positions) < lengths[:, None]] = np.clip(ids, -1, np.iinfo(np.int32).max)
    index = row_index_from_lengths(lengths[: len(num_draft_tokens)], positions, with_bonus_rows=with_bonus_rows)
    return PaddedRows(
        target_logits=pad_requests(logits, padded_rows, 0),
        row_index=pad_requests(index, requests, -1),
        draft_token_ids=draft_ids,
        num_draft_tokens=lengths.astype(np.int32),
    )


def pad_requests(values: Any, size: int, fill: Any) -> Any:
    """`values` (`jax.random` keys too) with the first axis padded to `size` with `fill`, on the host.

    Raises:
      ValueError: there are more than `size`.
    """
    if isinstance(values, jax.Array) and jnp.issubdtype(values.dtype, jax.dtypes.prng_key):
        padded = pad_requests(jax.random.key_data(values), size, fill)
        return jax.random.wrap_key_data(padded, impl=jax.random.key_impl(values))
    values = np.asarray(values)
    if len(values) > size:
        raise ValueError(f"values must hold at most size = {size} entries, got {len(values)}")
    padding = np.full((size - len(values), *values.shape[1:]), fill, values.dtype)
    return np.concatenate([values, padding])


def _at_least(name: str, size: int | None, needed: int, default: int) -> int:
    if size is None:
        return default
    if size < needed:
        raise ValueError(f"{name} must be at least {needed} for this step, got {size}")
    return size


def _lengths(name: str, values: Any) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"{name} must be one-dimensional integers, got {array.dtype} of shape {list(array.shape)}")
    return array.astype(np.int64)
