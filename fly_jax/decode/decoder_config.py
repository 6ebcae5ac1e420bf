"""What a decoder-only transformer of the Llama family is, as read from a Hugging Face `config.json`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fly_jax.errors import UserError

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")


@dataclasses.dataclass(frozen=True)
class LinearRope:
    """Position interpolation: every rotary frequency is divided by `factor`."""

    factor: float

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """Frequencies [head_dim / 2] float64 -> the same, scaled."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's scaling: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """Frequencies [head_dim / 2] float64 -> the same, scaled."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class FactorRope:
    """Frequency i is divided by `factors[i]`: how GGUF files store Llama 3.1's scaling (`rope_freqs.weight`)."""

    factors: tuple[float, ...]

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """Frequencies [head_dim / 2] float64 -> the same, scaled."""
        return frequencies / np.asarray(self.factors)


RopeScaling = LinearRope | Llama3Rope | FactorRope


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of a Llama, Qwen2 or Qwen3 decoder. Hashable: it is static under `jax.jit`.

    `qkv_bias` is Qwen2's bias on the query, key and value projections; `qk_norm` is Qwen3's RMS norm of every query
    and key head; `rope_scaling` None means plain rotary embeddings.

    Raises:
        UserError: when sizes do not fit together.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UserError(f"{field.name} must be a positive integer, got {value!r}: check the model's config.")
            if field.type is float and not (isinstance(value, float) and 0.0 < value < math.inf):
                raise UserError(f"{field.name} must be a positive number, got {value!r}: check the model's config.")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}: "
                "check the model's config."
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim must be even for rotary embeddings, got {self.head_dim}.")
        factors = self.rope_scaling.factors if isinstance(self.rope_scaling, FactorRope) else None
        if factors is not None and len(factors) != self.head_dim // 2:
            raise UserError(f"rope_freqs must have head_dim / 2 = {self.head_dim // 2} factors, got {len(factors)}.")
        with np.errstate(all="ignore"):
            frequencies = self.rope_frequencies()
        if not (np.isfinite(frequencies) & (frequencies > 0)).all():
            raise UserError(f"rope_scaling must give positive, finite frequencies, got {self.rope_scaling}.")

    def rope_frequencies(self) -> np.ndarray:
        """Angle per position of each rotated pair: [head_dim / 2] float32, scaling included."""
        exponents = np.arange(0, self.head_dim, 2) / self.head_dim
        frequencies = self.rope_theta**-exponents
        if self.rope_scaling is not None:
            frequencies = self.rope_scaling.scale(frequencies)
        return frequencies.astype(np.float32)

    @classmethod
    def from_hf(cls, config_json: Mapping[str, Any]) -> "DecoderConfig":
        """Reads a parsed Hugging Face `config.json`, in transformers 4's or 5's spelling.

        Raises:
            UserError: when the architecture is not one this decoder computes exactly, or a field is missing or bad.
        """
        model_type = config_json.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise UserError(
                f"model_type {model_type!r} is not supported: this decoder runs {', '.join(SUPPORTED_MODEL_TYPES)}."
            )
        _reject_unsupported(config_json)
        hidden_size = _integer(config_json, "hidden_size")
        num_heads = _integer(config_json, "num_attention_heads")
        if num_heads < 1:
            raise UserError(f"num_attention_heads must be positive, got {num_heads}: check the model's config.json.")
        rope_theta, rope_scaling = _rope(config_json)
        head_dim = 128 if model_type == "qwen3" else hidden_size // num_heads
        return cls(
            vocab_size=_integer(config_json, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_integer(config_json, "intermediate_size"),
            num_layers=_integer(config_json, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_integer(config_json, "num_key_value_heads", num_heads),
            head_dim=_integer(config_json, "head_dim", head_dim),
            max_position_embeddings=_integer(config_json, "max_position_embeddings"),
            rms_norm_eps=_number(config_json, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            qkv_bias=model_type == "qwen2",
            qk_norm=model_type == "qwen3",
            tie_word_embeddings=bool(config_json.get("tie_word_embeddings", False)),
        )


def _reject_unsupported(config_json: Mapping[str, Any]) -> None:
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config_json.get(name):
            raise UserError(f"{name}={config_json[name]!r} is not supported: this decoder needs it to be false.")
    activation = config_json.get("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"hidden_act={activation!r} is not supported: this decoder computes 'silu' only.")
    layer_types = set(config_json.get("layer_types") or ()) - {"full_attention"}
    if layer_types:
        raise UserError(
            f"layer_types has {', '.join(sorted(layer_types))}: this decoder computes 'full_attention' only."
        )
    if config_json.get("quantization_config"):
        raise UserError(
            "quantization_config is set: quantized Hugging Face folders are not supported; "
            "pass the unquantized folder or a GGUF file."
        )


def _rope(config_json: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    rope = config_json.get("rope_parameters") or config_json.get("rope_scaling") or {}
    theta = _number(rope, "rope_theta", None) if "rope_theta" in rope else _number(config_json, "rope_theta", 10000.0)
    rotated = rope.get("partial_rotary_factor", config_json.get("partial_rotary_factor", 1.0))
    if rotated != 1.0:
        raise UserError(f"partial_rotary_factor={rotated!r} is not supported: this decoder rotates whole heads (1.0).")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearRope(_number(rope, "factor", None))
    if kind == "llama3":
        return theta, Llama3Rope(
            factor=_number(rope, "factor", None),
            low_freq_factor=_number(rope, "low_freq_factor", None),
            high_freq_factor=_number(rope, "high_freq_factor", None),
            original_max_position_embeddings=_integer(rope, "original_max_position_embeddings"),
        )
    raise UserError(f"rope_type {kind!r} is not supported: this decoder computes 'default', 'linear' and 'llama3'.")


def _integer(config_json: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config_json.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{name} must be an integer, got {value!r}: check the model's config.json.")
    return value


def _number(config_json: Mapping[str, Any], name: str, default: float | None) -> float:
    value = config_json.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{name} must be a number, got {value!r}: check the model's config.json.")
    return float(value)
