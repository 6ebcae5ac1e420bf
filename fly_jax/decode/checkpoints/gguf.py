"""Reading a decoder from a GGUF file (llama.cpp's format).

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from fly_jax.decode.checkpoints.weights import CheckpointTensors
from fly_jax.decode.decoder_config import SUPPORTED_MODEL_TYPES, DecoderConfig, FactorRope, LinearRope, RopeScaling
from fly_jax.errors import UserError

_ROPE_FACTORS = "rope_freqs.weight"
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def open_gguf(path: Path) -> tuple[gguf.GGUFReader, dict[str, Any]]:
    """Opens a GGUF file and reads its header: (reader, all key/value pairs as Python values).

    Raises:
        UserError: when the file is missing, cut off or not a GGUF file of this byte order.
    """
    if not path.is_file():
        raise UserError(f"{path} is not a file: pass a .gguf file or a Hugging Face folder.")
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OSError, OverflowError) as error:
        raise UserError(f"{path} is not a readable GGUF file ({error}): download it again.") from error
    if reader.byte_order != "I":
        raise UserError(f"{path} has the other byte order than this machine: use a GGUF file made for it.")
    return reader, fields


def config_from_gguf(fields: Mapping[str, Any], reader: gguf.GGUFReader, path: Path) -> DecoderConfig:
    """The decoder's config from the header's metadata and the tensors' names.

    Raises:
        UserError: when the architecture is not supported or a field is missing or bad.
    """
    architecture = fields.get("general.architecture")
    if architecture not in SUPPORTED_MODEL_TYPES:
        raise UserError(
            f"{path} holds the architecture {architecture!r}: this decoder runs {', '.join(SUPPORTED_MODEL_TYPES)}."
        )

    def get(name: str, default: Any = None) -> Any:
        value = fields.get(f"{architecture}.{name}", default)
        if value is None:
            raise UserError(f"{path} lacks the field {architecture}.{name}: the file is incomplete.")
        return value

    def integer(name: str, default: int | None = None) -> int:
        value = get(name, default)
        if not isinstance(value, int):
            raise UserError(f"{path}: {architecture}.{name} must be one integer for all layers, got {value!r}.")
        return value

    _reject_unsupported(get, path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise UserError(f"{path} lacks token_embd.weight: the file is incomplete or not a language model.")
    hidden_size, num_heads = integer("embedding_length"), integer("attention.head_count")
    head_dim = integer("attention.key_length", hidden_size // max(num_heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if get(name, head_dim) != head_dim:
            raise UserError(f"{path}: {name}={get(name)} is not supported: it must equal the head size {head_dim}.")
    return DecoderConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[-1]),
        hidden_size=hidden_size,
        intermediate_size=integer("feed_forward_length"),
        num_layers=integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=integer("context_length"),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_theta=get("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(get, tensors.get(_ROPE_FACTORS), path),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        tie_word_embeddings="output.weight" not in tensors,
    )


def tensors_from_gguf(reader: gguf.GGUFReader, config: DecoderConfig, path: Path) -> CheckpointTensors:
    """The file's tensors under their Hugging Face names, dequantized when read."""
    tensors = {_hugging_face_name(tensor.name): tensor for tensor in reader.tensors if tensor.name != _ROPE_FACTORS}
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()}
    # llama.cpp reorders the rows of query and key heads for its own rotary layout, for this architecture only.
    heads = {"q_proj.weight": config.num_heads, "k_proj.weight": config.num_kv_heads}
    interleaved = not (config.qkv_bias or config.qk_norm)

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            raise UserError(
                f"{path}: {tensor.name} is stored as {tensor.tensor_type.name}, which the gguf package cannot "
                "dequantize: use a file of another quantization."
            ) from error
        values = values.reshape(shapes[name])
        for suffix, num_heads in heads.items():
            if interleaved and name.endswith(suffix):
                values = _undo_interleaving(values, num_heads)
        return values

    return CheckpointTensors(str(path), shapes, read)


def _undo_interleaving(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows [heads * head_dim, in] with rotated pairs side by side -> pairs half a head apart (Hugging Face)."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _hugging_face_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _LAYER_NAMES:
        return name
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _reject_unsupported(get: Any, path: Path) -> None:
    neutral = {
        "expert_count": 0,
        "attention.sliding_window": 0,
        "rope.scaling.attn_factor": 1.0,
        "rope.scale_linear": 1.0,
        "logit_scale": 1.0,
    }
    for name, value in neutral.items():
        if get(name, value) != value:
            raise UserError(f"{path}: {name}={get(name)!r} is not supported: this decoder needs {value}.")


def _rope_scaling(get: Any, factors: Any, path: Path) -> RopeScaling | None:
    kind = get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise UserError(f"{path}: rope.scaling.type={kind!r} is not supported: this decoder computes none and linear.")
    if factors is not None:
        if kind != "none":
            raise UserError(f"{path} has both {_ROPE_FACTORS} and rope.scaling.type={kind!r}: only one is supported.")
        return FactorRope(tuple(float(factor) for factor in factors.data))
    return LinearRope(get("rope.scaling.factor")) if kind == "linear" else None
