"""All that the plugin holds in a process of an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fly_jax.bridges.vllm.counting import Counters
from fly_jax.bridges.vllm.settings import Settings

if TYPE_CHECKING:
    import torch

    from fly_jax.bridges.vllm.recording import Recorder


@dataclasses.dataclass
class Session:
    """Made when vLLM is hooked; an attribute of the function in vLLM's place.

    Attributes:
      settings: what the variables say.
      original: vLLM's own `rejection_sample`.
      counters: what was verified.
      speculation: of the sampler that was made last, for the trace: an engine has one.
      recorder: the trace under way, from the first recorded step on.
    """

    settings: Settings
    original: Callable[..., torch.Tensor]
    counters: Counters
    speculation: dict[str, Any] = dataclasses.field(default_factory=lambda: {"num_speculative_tokens": 1})
    recorder: Recorder | None = None
