"""A byte-level BPE tokenizer rebuilt from a GGUF file's metadata."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from fly_jax.decode.checkpoints.text import END_OF_TURN_TOKENS, TextCodec
from fly_jax.errors import UserError

_SPECIAL_TOKENS = {
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
    for name, key in _SPECIAL_TOKENS.items():
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
