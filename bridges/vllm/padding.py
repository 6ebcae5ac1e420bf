"""Padding of torch tensors, on the device where they are: `fly_jax.layout` pads on the host.

The sizes are `fly_jax.layout`'s buckets.
"""

import torch


def pad(tensor: torch.Tensor, size: int, fill: float) -> torch.Tensor:
    """`tensor` with the first axis filled up to `size`: itself where it has that size, otherwise one copy."""
    if len(tensor) == size:
        return tensor
    padded = tensor.new_empty((size, *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    padded[len(tensor) :] = fill
    return padded
