"""Repairs of two faults of vLLM's sampling on CPUs, in 0.32 and 0.33; `FLY_JAX_VLLM=replace` puts them in."""

import functools
from types import ModuleType
from typing import Any

import torch

from fly_jax.bridges.vllm.interface import found


def install(module: ModuleType) -> list[str]:
    """Replaces two functions in vLLM's module of the V1 sampler; returns their names.

    Raises:
      RuntimeError: one of them is missing.
    """
    constraints = found(module, "apply_sampling_constraints")
    found(module, "expand_batch_to_tokens")

    @functools.wraps(constraints)
    def apply_sampling_constraints(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # A step without drafts has no rows, and vLLM's top-k takes the maximum of none.
        return logits if len(logits) == 0 else constraints(logits, *args, **kwargs)

    module.__dict__["expand_batch_to_tokens"] = expand_batch_to_tokens
    module.__dict__["apply_sampling_constraints"] = apply_sampling_constraints
    return ["expand_batch_to_tokens", "apply_sampling_constraints"]


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """A value of each request, repeated for each of its tokens.

    vLLM's kernel for CPUs expands into a copy and drops it: temperature, top-k and top-p are then garbage.

    Args:
      x: `[B]`.
      cu_num_tokens: `[B]` integers, running totals of the requests' tokens.
      num_tokens: the last of them.
      replace_from: a value of `x` that becomes `replace_to`.
      replace_to: see there.

    Returns:
      `[num_tokens]`, the dtype of `x`.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = x.masked_fill(x == replace_from, replace_to)
    return replaced.repeat_interleave(counts, output_size=num_tokens)
