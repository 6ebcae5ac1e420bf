"""What of vLLM the plugin touches: the arguments of the function that it hooks, and how it looks for the rest."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class SamplingMetadata(Protocol):
    """What is read of vLLM's class of that name.

    Attributes:
      all_greedy: whether no request samples; `temperature` is None then, or all 0.
      temperature: `[B]` float32; 0 exactly for a greedy request.
      generators: of the requests that have one of their own, by their place in the batch.
    """

    all_greedy: bool
    temperature: torch.Tensor | None
    generators: dict[int, torch.Generator]


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of vLLM V1's `rejection_sample`, in its order; see `v1.rejection_sample`.

    The last three are there since vLLM 0.33; before, they are the plugin's own settings. None is their default.
    """

    draft_token_ids: torch.Tensor
    num_draft_tokens: list[int]
    max_spec_len: int
    cu_num_draft_tokens: torch.Tensor
    draft_probs: torch.Tensor | None
    target_logits: torch.Tensor
    bonus_token_ids: torch.Tensor
    sampling_metadata: SamplingMetadata
    synthetic_mode: bool = False
    synthetic_conditional_rates: torch.Tensor | None = None
    use_fp64_gumbel: bool = False
    fly_window_size: int | None = None
    fly_entropy_threshold: float | None = None
    fly_entropy_top_k: int | None = None


PARAMETERS = [field.name for field in dataclasses.fields(Call)]
"""Of `rejection_sample` in vLLM 0.33."""

PARAMETERS_WITHOUT_FLY = [name for name in PARAMETERS if not name.startswith("fly_")]
"""Of `rejection_sample` in vLLM 0.32."""


def found(module: ModuleType, name: str) -> Any:
    """An attribute of a module of vLLM's.

    Raises:
      RuntimeError: there is none of that name.
    """
    if not hasattr(module, name):
        raise RuntimeError(f"FLY_JAX_VLLM: {module.__name__} has no {name}; this vLLM cannot be hooked")
    return getattr(module, name)
