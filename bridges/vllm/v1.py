"""vLLM V1's `rejection_sample`, decided by `fly_verify_rows`: torch tensors in, torch tensors out.

The noise is drawn as vLLM draws it, in the same order from the same generators, so that the tokens are vLLM's and its
generators are left as vLLM would leave them.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from fly_jax.bridges import dlpack
from fly_jax.bridges.vllm import V1_MODULE, programs
from fly_jax.bridges.vllm.interface import SamplingMetadata
from fly_jax.bridges.vllm.padding import pad
from fly_jax.config import FlyConfig
from fly_jax.layout import position_bucket, request_bucket, row_bucket
from fly_jax.noise import VerifyNoise
from fly_jax.verify import Verification, fly_verify_rows


@dataclasses.dataclass(frozen=True)
class Step:
    """All that one call decides on: vLLM's arguments, and the noise drawn for it.

    `N` is the number of draft tokens of all `B` requests; the rows of a request follow each other.

    Attributes:
      draft_token_ids: `[N]` integers.
      num_draft_tokens: the number of drafts of each request.
      target_logits: `[N, V]` float32, processed: divided by the temperature, masked.
      draft_probs: `[N, V]` float32, or None for one-hot drafts.
      bonus_token_ids: `[B]` integers.
      sampling: `[B]` bool, which requests sample; None when none does.
      uniform: `[N]` float64 on [0, 1), compared with the acceptance ratio; None when no request samples.
      exponential: `[B', V]` float32, B' at least B: the token after a rejection is the argmax of the weights over it;
        None when no request samples.
      config: FLy's settings with a window size, or None for standard verification.
    """

    draft_token_ids: torch.Tensor
    num_draft_tokens: list[int]
    target_logits: torch.Tensor
    draft_probs: torch.Tensor | None
    bonus_token_ids: torch.Tensor
    sampling: torch.Tensor | None = None
    uniform: torch.Tensor | None = None
    exponential: torch.Tensor | None = None
    config: FlyConfig | None = None


def rejection_sample(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata: SamplingMetadata,
    synthetic_mode: bool = False,
    synthetic_conditional_rates: torch.Tensor | None = None,
    use_fp64_gumbel: bool = False,
    fly_window_size: int | None = None,
    fly_entropy_threshold: float | None = None,
    fly_entropy_top_k: int = FlyConfig.entropy_top_k,
) -> torch.Tensor:
    """The signature of vLLM 0.33's `vllm.v1.sample.rejection_sampler.rejection_sample`, and of 0.32's without `fly_*`.

    Args:
      draft_token_ids: `[N]` int32; -1 is a placeholder.
      num_draft_tokens: the number of drafts of each of the `B` requests; N is their sum and may be 0.
      max_spec_len: the largest of them.
      cu_num_draft_tokens: `[B]` int32, their running totals; not used, since `num_draft_tokens` says the same.
      draft_probs: `[N, V]` float32, or None for one-hot drafts.
      target_logits: `[N, V]` float32, processed.
      bonus_token_ids: `[B, 1]` integers, emitted where every draft is kept.
      sampling_metadata: vLLM's; read here: `all_greedy`, `temperature`, `generators`.
      synthetic_mode: goes to vLLM's own function, and so does `use_fp64_gumbel`.
      synthetic_conditional_rates: for that.
      use_fp64_gumbel: noise in float64; see `synthetic_mode`.
      fly_window_size: W; None turns FLy off.
      fly_entropy_threshold: nats.
      fly_entropy_top_k: k.

    Returns:
      `[B, max_spec_len + 1]` int32, -1 padded, on the device of the logits.

    Raises:
      ValueError: FLy with synthetic acceptance, or without a threshold.
    """
    if fly_window_size is not None and synthetic_mode:
        raise ValueError("fly_window_size is set together with synthetic_mode=True: FLy excludes synthetic acceptance")
    if synthetic_mode or use_fp64_gumbel:
        fly = {
            "fly_window_size": fly_window_size,
            "fly_entropy_threshold": fly_entropy_threshold,
            "fly_entropy_top_k": fly_entropy_top_k,
        }
        return vllm_original()(
            draft_token_ids,
            num_draft_tokens,
            max_spec_len,
            cu_num_draft_tokens,
            draft_probs,
            target_logits,
            bonus_token_ids,
            sampling_metadata,
            synthetic_mode=synthetic_mode,
            synthetic_conditional_rates=synthetic_conditional_rates,
            use_fp64_gumbel=use_fp64_gumbel,
            **({} if fly_window_size is None else fly),
        )
    step = draw_step(
        draft_token_ids,
        num_draft_tokens,
        draft_probs,
        target_logits,
        bonus_token_ids,
        sampling_metadata,
        config=fly_config(fly_window_size, fly_entropy_threshold, fly_entropy_top_k),
    )
    verification, _ = verify(step)
    return emitted(verification, len(num_draft_tokens), max_spec_len)


def fly_config(window_size: int | None, entropy_threshold: float | None, entropy_top_k: int | None) -> FlyConfig | None:
    """vLLM's `fly_*` arguments as settings; None where FLy is off."""
    if window_size is None:
        return None
    if entropy_threshold is None:
        raise ValueError("fly_entropy_threshold must be a number of nats when fly_window_size is set, got None")
    top_k = FlyConfig.entropy_top_k if entropy_top_k is None else entropy_top_k
    return FlyConfig(window_size, entropy_threshold, top_k)


def vllm_original() -> Callable[..., torch.Tensor]:
    """vLLM's own `rejection_sample`, also where the plugin has put another in its place."""
    function = importlib.import_module(V1_MODULE).rejection_sample
    session = getattr(function, "fly_jax_session", None)
    return function if session is None else session.original


def draw_step(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata: SamplingMetadata,
    *,
    config: FlyConfig | None = None,
    generators: Mapping[int, torch.Generator] | None = None,
    default_generator: torch.Generator | None = None,
) -> Step:
    """The step of a call of `rejection_sample`, its noise drawn.

    Args:
      draft_token_ids: as in `rejection_sample`, and so are the next five.
      num_draft_tokens: see there.
      draft_probs: see there.
      target_logits: see there.
      bonus_token_ids: see there.
      sampling_metadata: see there.
      config: FLy's settings with a window size, or None for standard verification.
      generators: to draw from instead of `sampling_metadata.generators`: copies leave vLLM's own untouched.
      default_generator: to draw from instead of torch's own.
    """
    step = Step(
        draft_token_ids, num_draft_tokens, target_logits, draft_probs, bonus_token_ids.reshape(-1), config=config
    )
    if sampling_metadata.all_greedy:
        # Whatever the draft's distribution is: it makes no difference, but another program.
        return dataclasses.replace(step, draft_probs=None)
    uniform, exponential = draw_noise(
        num_draft_tokens,
        target_logits,
        sampling_metadata.generators if generators is None else generators,
        default_generator,
    )
    return dataclasses.replace(
        step, sampling=sampling_requests(sampling_metadata), uniform=uniform, exponential=exponential
    )


def sampling_requests(sampling_metadata: SamplingMetadata) -> torch.Tensor:
    """`[B]` bool: which requests sample; only where not all are greedy."""
    assert sampling_metadata.temperature is not None, "vLLM has temperatures wherever a request samples"
    # vLLM sets the temperature of a greedy request to 0 exactly.
    return sampling_metadata.temperature != 0


def draw_uniform(
    num_draft_tokens: list[int],
    device: torch.device,
    generators: Mapping[int, torch.Generator],
    default_generator: torch.Generator | None = None,
) -> torch.Tensor:
    """The part of `draw_noise` that acceptance needs, which is drawn first: `[N]` float64."""
    uniform = torch.rand((sum(num_draft_tokens),), dtype=torch.float64, device=device, generator=default_generator)
    start = 0
    for request, num_drafts in enumerate(num_draft_tokens):
        if num_drafts > 0 and request in generators:
            uniform[start : start + num_drafts].uniform_(generator=generators[request])
        start += num_drafts
    return uniform


def draw_noise(
    num_draft_tokens: list[int],
    target_logits: torch.Tensor,
    generators: Mapping[int, torch.Generator],
    default_generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM V1 draws for a batch that is not all greedy: every request from torch's generator, then those with one
    of their own again, unless they have no drafts; first the uniforms, then the exponential noise.

    Returns:
      `uniform` `[N]` float64, and `exponential` `[B', V]` float32 of which the first B rows count.
    """
    device, num_requests = target_logits.device, len(num_draft_tokens)
    uniform = draw_uniform(num_draft_tokens, device, generators, default_generator)
    # Allocated at the size it crosses with: padding it later would copy [B, V].
    exponential = torch.empty(
        (request_bucket(num_requests), target_logits.shape[1]), dtype=torch.float32, device=device
    )
    exponential[num_requests:] = 1.0
    exponential[:num_requests].exponential_(generator=default_generator)
    for request, generator in generators.items():
        if num_draft_tokens[request] > 0:
            exponential[request].exponential_(generator=generator)
    return uniform, exponential


def verify(step: Step) -> tuple[Verification, Array]:
    """Decides a step in JAX, padded to a bucket of shapes; nothing of it is copied that needs no padding.

    Returns:
      The verification of `B'` requests and `K'` positions (at least as many as the step has, the step's first), and
      how many drafts were kept, deferred, and how many requests stopped at an invalid row, `[3]` int32.
    """
    return program(step.target_logits.device)(*crossed(step), num_positions=num_positions(step))


def num_positions(step: Step) -> int:
    """K' of a step's bucket."""
    return position_bucket(max(step.num_draft_tokens, default=0))


def crossed(step: Step) -> tuple[Any, ...]:
    """A step's arrays in JAX, and FLy's settings: the positional arguments of `program`."""
    lengths = step.num_draft_tokens
    requests = request_bucket(len(lengths))
    rows = row_bucket(len(step.draft_token_ids), requests * num_positions(step))

    device = step.target_logits.device

    def matrix(name: str, tensor: torch.Tensor | None, size: int, fill: float) -> Array | None:
        return None if tensor is None else dlpack.to_jax(pad(tensor, size, fill), name=name)

    def vector(name: str, tensor: torch.Tensor | None, size: int, fill: float) -> Array | np.ndarray | None:
        if tensor is None:
            return None
        tensor = dlpack.narrow(pad(tensor, size, fill), name=name, round_up=name == "uniform")
        # On a CPU a small array costs less when the jitted function takes it from NumPy than through DLPack.
        return tensor.numpy() if device.type == "cpu" else dlpack.to_jax(tensor, name=name)

    return (
        matrix("target_logits", step.target_logits, rows, 0.0),
        vector("draft_token_ids", step.draft_token_ids, rows, -1),
        vector("num_draft_tokens", torch.tensor(lengths, dtype=torch.int32, device=device), requests, 0),
        vector("bonus_token_ids", step.bonus_token_ids, requests, 0),
        vector("sampling", step.sampling, requests, False),
        vector("uniform", step.uniform, rows, 1.0),
        matrix("exponential", step.exponential, requests, 1.0),
        matrix("draft_probs", step.draft_probs, rows, 0.0),
        None if step.config is None else _with_array(step.config),
    )


@functools.lru_cache(maxsize=64)
def _with_array(config: FlyConfig) -> FlyConfig:
    """The threshold as an array, so that another one is not another program."""
    return dataclasses.replace(config, entropy_threshold=np.float32(config.single_threshold))


def program(device: torch.device) -> Callable[..., tuple[Verification, Array]]:
    """The jitted function that decides steps on a device of torch's."""
    return programs.program(_verify, device)


def emitted(verification: Verification, num_requests: int, max_spec_len: int) -> torch.Tensor:
    """`[num_requests, max_spec_len + 1]` int32 on torch's side, -1 padded; nothing of JAX's memory is in it."""
    token_ids = verification.token_ids
    if next(iter(token_ids.devices())).platform == "cpu":
        # A small array, as in `crossed`; NumPy waits for it, and the copy is torch's own.
        return torch.tensor(np.asarray(token_ids)[:num_requests, : max_spec_len + 1])
    return dlpack.to_torch(token_ids)[:num_requests, : max_spec_len + 1].contiguous()


def _verify(
    target_logits: Array,
    draft_token_ids: Array,
    num_draft_tokens: Array,
    bonus_token_ids: Array,
    sampling: Array | None,
    uniform: Array | None,
    exponential: Array | None,
    draft_probs: Array | None,
    config: FlyConfig | None,
    *,
    num_positions: int,
) -> tuple[Verification, Array]:
    row_index = row_index_of(num_draft_tokens, num_positions)
    noise = None
    if uniform is not None and exponential is not None:
        noise = VerifyNoise(per_request(row_index, uniform, 1.0), gumbel=-jnp.log(exponential))
    verification = fly_verify_rows(
        target_logits,
        row_index,
        per_request(row_index, draft_token_ids, -1),
        config=config,
        num_draft_tokens=num_draft_tokens,
        draft_probs=draft_probs,
        # The logits are divided by it already.
        temperature=None if sampling is None else sampling.astype(jnp.float32),
        noise=noise,
        bonus_token_ids=bonus_token_ids,
    )
    totals = (verification.num_accepted, verification.deferred, verification.invalid)
    return verification, jnp.stack([jnp.sum(each, dtype=jnp.int32) for each in totals])


def row_index_of(num_draft_tokens: Array, num_positions: int) -> Array:
    """`[B, K + 1]` int32: which row scores which draft; -1 past a request's drafts."""
    position = jnp.arange(num_positions + 1, dtype=jnp.int32)[None]
    start = jnp.cumsum(num_draft_tokens) - num_draft_tokens
    return jnp.where(position < num_draft_tokens[:, None], start[:, None] + position, -1)


def per_request(row_index: Array, rows: Array, fill: float) -> Array:
    """`rows` `[N]` as `[B, K]`, `fill` past a request's drafts."""
    return jnp.where(row_index[:, :-1] >= 0, rows[row_index[:, :-1]], jnp.asarray(fill, rows.dtype))
