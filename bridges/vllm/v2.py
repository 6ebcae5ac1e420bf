"""vLLM V2's `rejection_sample`, decided by `fly_verify_rows` with vLLM V2's own noise: torch tensors in and out.

At function level only: this project has no GPU to run a V2 engine on, and vLLM's CPU wheels run V1.
"""

import importlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from fly_jax.bridges import dlpack
from fly_jax.bridges.vllm.padding import pad
from fly_jax.bridges.vllm.programs import program
from fly_jax.config import FlyConfig
from fly_jax.layout import request_bucket, row_bucket
from fly_jax.noise import VllmV2Noise
from fly_jax.verify import fly_verify_rows

_DEFAULTS = FlyConfig()
VLLM_MODULE = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"


def rejection_sample(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    pos: torch.Tensor,
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    num_speculative_steps: int,
    synthetic_conditional_rates: torch.Tensor | None = None,
    use_fp64: bool = False,
    use_block_verification: bool = False,
    contexts: torch.Tensor | None = None,
    watermarking: torch.Tensor | None = None,
    watermarking_skip_mask: torch.Tensor | None = None,
    watermark_key: int | None = None,
    fly_window_size: int = 0,
    fly_entropy_threshold: float = _DEFAULTS.single_threshold,
    fly_entropy_top_k: int = _DEFAULTS.entropy_top_k,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The signature of vLLM 0.33's `vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils.rejection_sample`.

    Args:
      target_logits: `[L, V]` float32, bfloat16 or float16, processed; L is the number of drafts plus one bonus row for
        each of the `B` requests. The rows of a request follow each other.
      draft_logits: `[R, S, Vd]` before the temperature, by request state and position; None for one-hot drafts.
      draft_sampled: `[L]`: row r scores `draft_sampled[r + 1]`; below 0 is a placeholder.
      cu_num_logits: `[B + 1]` int32, where each request's rows start.
      pos: `[L]` int64, positions in the sequence: the counter of the noise.
      idx_mapping: `[B]` int32, each request's state in the arrays of `R`.
      expanded_idx_mapping: `[L]`, not used, since `idx_mapping` says the same.
      expanded_local_pos: `[L]`, not used.
      temperature: `[R]` float32; 0 is greedy.
      seed: `[R]` int64, the key of the noise.
      num_speculative_steps: S.
      synthetic_conditional_rates: goes to vLLM's own function; so do `use_fp64`, `use_block_verification` and
        watermarking.
      use_fp64: see there.
      use_block_verification: see there.
      contexts: of watermarking, and so are the next three.
      watermarking: see there.
      watermarking_skip_mask: see there.
      watermark_key: see there.
      fly_window_size: W; 0 turns FLy off.
      fly_entropy_threshold: nats.
      fly_entropy_top_k: k.

    Returns:
      `sampled` `[B, S + 1]` int64, -1 padded where vLLM leaves what was there, and `num_sampled` `[B]` int32.

    Raises:
      ValueError: FLy together with something it excludes.
    """
    elsewhere = {
        "synthetic_conditional_rates": synthetic_conditional_rates,
        "use_fp64": use_fp64,
        "use_block_verification": use_block_verification,
        "contexts": contexts,
        "watermarking": watermarking,
        "watermarking_skip_mask": watermarking_skip_mask,
        "watermark_key": watermark_key,
    }
    asked: dict[str, Any] = {
        name: value for name, value in elsewhere.items() if value is not None and value is not False
    }
    excluded = asked.keys() & {"synthetic_conditional_rates", "use_block_verification"}
    if fly_window_size > 0 and excluded:
        raise ValueError(f"fly_window_size={fly_window_size} is set together with {excluded.pop()}, which FLy excludes")
    if asked:
        if fly_window_size > 0:
            asked |= {
                "fly_window_size": fly_window_size,
                "fly_entropy_threshold": fly_entropy_threshold,
                "fly_entropy_top_k": fly_entropy_top_k,
            }
        return importlib.import_module(VLLM_MODULE).rejection_sample(
            target_logits,
            draft_logits,
            draft_sampled,
            cu_num_logits,
            pos,
            idx_mapping,
            expanded_idx_mapping,
            expanded_local_pos,
            temperature,
            seed,
            num_speculative_steps,
            **asked,
        )
    config = None
    if fly_window_size > 0:
        # As an array, so that another threshold is not another program.
        config = FlyConfig(fly_window_size, np.float32(fly_entropy_threshold), fly_entropy_top_k)

    num_requests = len(cu_num_logits) - 1
    requests = request_bucket(num_requests)
    rows = row_bucket(len(target_logits), requests * (num_speculative_steps + 1))
    states = idx_mapping.long()
    if draft_logits is not None:
        # One copy of the states in the batch, where vLLM's kernels read through the mapping: the core scores all rows
        # it is given.
        draft_logits = pad(draft_logits[states], requests, 0.0).flatten(0, 1)

    def cross(name: str, tensor: torch.Tensor) -> Array:
        return dlpack.to_jax(tensor, name=name)

    token_ids, num_tokens = program(_verify, target_logits.device)(
        cross("target_logits", pad(target_logits, rows, 0.0)),
        None if draft_logits is None else cross("draft_logits", draft_logits),
        cross("draft_sampled", pad(draft_sampled, rows, -1)),
        # A padding request has no rows, not even a bonus row.
        cross("cu_num_logits", torch.cat([cu_num_logits, cu_num_logits[-1:].expand(requests - num_requests)])),
        cross("pos", _words(pad(pos, rows, 0))),
        cross("temperature", pad(temperature[states], requests, 0.0)),
        cross("seed", _words(pad(seed[states], requests, 0))),
        config,
        num_positions=num_speculative_steps,
    )
    sampled = dlpack.to_torch(token_ids)[:num_requests].to(torch.int64)
    return sampled, dlpack.to_torch(num_tokens)[:num_requests]


def _words(values: torch.Tensor) -> torch.Tensor:
    """`[..., 2]` int32: the low and high words of int64 `values`, which cannot cross without x64."""
    words = values.to(torch.int64).contiguous().view(torch.int32)
    return words.reshape(*values.shape, 2)


def _verify(
    target_logits: Array,
    draft_logits: Array | None,
    draft_sampled: Array,
    cu_num_logits: Array,
    pos: Array,
    temperature: Array,
    seed: Array,
    config: FlyConfig | None,
    *,
    num_positions: int,
) -> tuple[Array, Array]:
    num_rows, num_requests = target_logits.shape[0], temperature.shape[0]
    start, lengths = cu_num_logits[:-1], jnp.diff(cu_num_logits)
    position = jnp.arange(num_positions + 1, dtype=jnp.int32)[None]
    row_index = jnp.where(position < lengths[:, None], start[:, None] + position, num_rows)
    draft_rows: dict[str, Any] = {}
    if draft_logits is not None:
        shape = (num_requests, num_positions)
        draft_rows["draft_row_index"] = jnp.arange(num_requests * num_positions, dtype=jnp.int32).reshape(shape)
        draft_rows["draft_temperature"] = temperature
    last = num_rows - 1
    verification = fly_verify_rows(
        target_logits,
        row_index,
        # A row holds the token before it: the draft that row r scores is the next row's.
        draft_sampled[jnp.minimum(row_index[:, 1:], last)],
        config=config,
        num_draft_tokens=lengths - 1,
        draft_logits=draft_logits,
        # The logits are divided by it already.
        temperature=(temperature != 0).astype(jnp.float32),
        noise=VllmV2Noise(_unsigned(seed), _unsigned(pos)[jnp.minimum(row_index, last)]),
        **draft_rows,
    )
    return verification.token_ids, verification.num_tokens


def _unsigned(words: Array) -> Array:
    return lax.bitcast_convert_type(words, jnp.uint32)
