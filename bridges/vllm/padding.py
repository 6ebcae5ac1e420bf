"""Shape buckets for torch tensors, so that an engine whose batch changes at every step runs a handful of programs.

With up to 16 drafts each, a mode (greedy, or sampling with or without draft probabilities) compiles at most 8 times for
up to 32 requests, at most 11 times for up to 128: the request buckets, times the sizes that `row_bucket` allows.
"""

import torch

from fly_jax.layout import bucket


def request_bucket(num_requests: int) -> int:
    """1, 8, 32, 128, ...: a single stream keeps its own programs, which pay for no padding request."""
    size = 1 if num_requests <= 1 else 8
    while size < num_requests:
        size *= 4
    return size


def position_bucket(num_positions: int) -> int:
    """16, 64, 256: positions past a draft cost next to nothing."""
    size = 16
    while size < num_positions:
        size *= 4
    return size


def row_bucket(num_rows: int, most_rows: int) -> int:
    """A power of two that holds `num_rows`, at least 8 and a quarter of the most rows that the other buckets hold."""
    return bucket(num_rows, smallest=max(8, bucket(most_rows) // 4))


def pad(tensor: torch.Tensor, size: int, fill: float) -> torch.Tensor:
    """`tensor` with the first axis filled up to `size`: itself where it has that size, otherwise one copy."""
    if len(tensor) == size:
        return tensor
    padded = tensor.new_empty((size, *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    padded[len(tensor) :] = fill
    return padded
