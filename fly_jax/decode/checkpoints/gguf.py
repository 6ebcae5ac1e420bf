"""Reading a decoder, its tokenizer and its chat template from a GGUF file (llama.cpp's format).

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from fly_jax.decode.checkpoints.text import END_OF_TURN_TOKENS, TextCodec
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

_SPECIAL_TOKEN_FIELDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_CONTRACTIONS_AND_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclasses.dataclass(frozen=True)
class _PreTokenizer:
    """How a family of models cuts text before BPE; `tokenizer.ggml.pre` names the family.

    Attributes:
        digits: regular expression of the digits that stay together; None for GPT-2's own rule.
        single_digits: cut every digit off first.
        nfc: normalize to NFC first.
        ignore_merges: a piece that is a token is that token, whatever the merges say.
        add_bos: llama.cpp begins texts with the bos token when the file does not say.
    """

    digits: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA3 = _PreTokenizer(digits=r"\p{N}{1,3}", ignore_merges=True, add_bos=True)
_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(),
    "smollm": _PreTokenizer(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _PreTokenizer(digits=r"\p{N}", nfc=True),
}


def open_gguf(path: Path) -> tuple[list[gguf.ReaderTensor], dict[str, Any]]:
    """Opens a GGUF file and reads its header: (its tensors, not read yet, all key/value pairs as Python values).

    Of a model that is split into files any part stands for all, which lie beside it under llama.cpp's names.

    Raises:
        UserError: when a file is missing, cut off or not a GGUF file of this byte order.
    """
    reader, fields = _open(path)
    count = fields.get("split.count", 1)
    if count <= 1:
        return list(reader.tensors), fields
    opened = [_open(part) for part in _parts(path, count)]
    tensors = [tensor for reader, _ in opened for tensor in reader.tensors]
    listed = fields.get("split.tensors.count", len(tensors))
    if listed != len(tensors):
        raise UserError(f"The {count} parts of {path} hold {len(tensors)} tensors, not {listed}: download them again.")
    return tensors, opened[0][1]  # the first part says what the others leave out


def _parts(path: Path, count: int) -> list[Path]:
    match = re.fullmatch(r"(.+)-\d{5}-of-\d{5}\.gguf", path.name)
    if match is None:
        raise UserError(
            f"{path} is one of {count} parts of a model, whose names must end in -00001-of-{count:05d}.gguf and so on: "
            "rename them, or merge them with llama-gguf-split --merge."
        )
    parts = [path.with_name(f"{match[1]}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise UserError(f"{path} is one of {count} parts of a model: {', '.join(missing)} must lie beside it.")
    return parts


def _open(path: Path) -> tuple[gguf.GGUFReader, dict[str, Any]]:
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


def config_from_gguf(fields: Mapping[str, Any], tensors: Sequence[gguf.ReaderTensor], path: Path) -> DecoderConfig:
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
    named = {tensor.name: tensor for tensor in tensors}
    if "token_embd.weight" not in named:
        raise UserError(f"{path} lacks token_embd.weight: the file is incomplete or not a language model.")
    hidden_size, num_heads = integer("embedding_length"), integer("attention.head_count")
    head_dim = integer("attention.key_length", hidden_size // max(num_heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if get(name, head_dim) != head_dim:
            raise UserError(f"{path}: {name}={get(name)} is not supported: it must equal the head size {head_dim}.")
    return DecoderConfig(
        vocab_size=int(named["token_embd.weight"].shape[-1]),
        hidden_size=hidden_size,
        intermediate_size=integer("feed_forward_length"),
        num_layers=integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=integer("context_length"),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_theta=get("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(get, named.get(_ROPE_FACTORS), path),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        tie_word_embeddings="output.weight" not in named,
    )


def tensors_from_gguf(tensors: Sequence[gguf.ReaderTensor], config: DecoderConfig, path: Path) -> CheckpointTensors:
    """The file's tensors under their Hugging Face names, dequantized when read."""
    named = {_hugging_face_name(tensor.name): tensor for tensor in tensors if tensor.name != _ROPE_FACTORS}
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in named.items()}
    # llama.cpp reorders the rows of query and key heads for its own rotary layout, for this architecture only.
    heads = {"q_proj.weight": config.num_heads, "k_proj.weight": config.num_kv_heads}
    interleaved = not (config.qkv_bias or config.qk_norm)

    def read(name: str) -> np.ndarray:
        tensor = named[name]
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


def codec_from_gguf(fields: Mapping[str, Any], path: Path) -> TextCodec:
    """The tokenizer and chat template of a GGUF file's metadata.

    Raises:
        UserError: when the tokenizer is not byte-level BPE of a known family, or is incomplete.
    """
    pre_tokenizer = _pre_tokenizer(fields, path)
    tokens = _field(fields, "tokens", path)
    merges = [tuple(merge.split(" ", 1)) for merge in _field(fields, "merges", path)]
    try:
        model = models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre_tokenizer.ignore_merges,
        )
    except Exception as error:  # the tokenizers package raises plain Exception
        raise UserError(f"{path} holds an inconsistent vocabulary ({error}): download it again.") from error
    token_types = _field(fields, "token_type", path)
    if len(token_types) != len(tokens):
        raise UserError(f"{path} has {len(tokens)} tokens but {len(token_types)} token types: download it again.")
    tokenizer = tokenizers.Tokenizer(model)
    if pre_tokenizer.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _build(pre_tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, token_types)
    special_tokens = _special_tokens(fields, tokens, path)
    _add_post_processor(tokenizer, fields, special_tokens, pre_tokenizer.add_bos, path)
    chat_template = fields.get("tokenizer.chat_template")
    return TextCodec(tokenizer, _eos_token_ids(fields, tokenizer, path), chat_template, special_tokens)


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


def _pre_tokenizer(fields: Mapping[str, Any], path: Path) -> _PreTokenizer:
    model = fields.get("tokenizer.ggml.model")
    kind = fields.get("tokenizer.ggml.pre")
    if model != "gpt2" or kind not in _PRE_TOKENIZERS:
        raise UserError(
            f"{path} has a tokenizer of model {model!r} and pre-tokenizer {kind!r}: only 'gpt2' with "
            f"{', '.join(map(repr, _PRE_TOKENIZERS))} is rebuilt from a GGUF file. "
            "Pass the model's Hugging Face folder (with tokenizer.json) instead."
        )
    return _PRE_TOKENIZERS[kind]


def _build(pre_tokenizer: _PreTokenizer) -> pre_tokenizers.PreTokenizer:
    if pre_tokenizer.digits is not None:
        pattern = "|".join((_CONTRACTIONS_AND_WORDS, pre_tokenizer.digits, _PUNCTUATION_AND_SPACE))
        steps = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        if pre_tokenizer.single_digits:
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    return pre_tokenizers.Sequence(steps)


def _add_tokens(tokenizer: tokenizers.Tokenizer, tokens: list[str], token_types: list[int]) -> None:
    control, user_defined = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
    typed = list(zip(tokens, token_types, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in typed if kind == control]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token, kind in typed if kind == user_defined]
    )


def _special_tokens(fields: Mapping[str, Any], tokens: list[str], path: Path) -> dict[str, str]:
    named = {}
    for name, key in _SPECIAL_TOKEN_FIELDS.items():
        token_id = fields.get(f"tokenizer.ggml.{key}")
        if token_id is not None:
            if token_id >= len(tokens):
                raise UserError(f"{path}: tokenizer.ggml.{key}={token_id} is not below {len(tokens)} tokens.")
            named[name] = tokens[token_id]
    return named


def _add_post_processor(
    tokenizer: tokenizers.Tokenizer,
    fields: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    add_bos_default: bool,
    path: Path,
) -> None:
    wanted = {
        "bos_token": fields.get("tokenizer.ggml.add_bos_token", add_bos_default),
        "eos_token": fields.get("tokenizer.ggml.add_eos_token", False),
    }
    missing = [name for name, is_added in wanted.items() if is_added and name not in special_tokens]
    if missing:
        raise UserError(f"{path} asks to add its {missing[0]} to every text but does not name it.")
    first, last = ([special_tokens[name]] if is_added else [] for name, is_added in wanted.items())
    if first or last:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in first + last],
        )


def _eos_token_ids(fields: Mapping[str, Any], tokenizer: tokenizers.Tokenizer, path: Path) -> frozenset[int]:
    named = [fields.get(f"tokenizer.ggml.{key}") for key in ("eos_token_id", "eot_token_id")]
    ids = {token_id for token_id in named if token_id is not None}
    if fields.get("tokenizer.chat_template") is not None:
        ids |= {tokenizer.token_to_id(token) for token in END_OF_TURN_TOKENS} - {None}
    if not ids:
        raise UserError(f"{path} names no eos_token_id: a generation could not end.")
    return frozenset(ids)


def _field(fields: Mapping[str, Any], name: str, path: Path) -> Any:
    value = fields.get(f"tokenizer.ggml.{name}")
    if value is None:
        raise UserError(f"{path} lacks the field tokenizer.ggml.{name}: pass the model's Hugging Face folder instead.")
    return value
