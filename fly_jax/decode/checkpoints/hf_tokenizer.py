"""The tokenizer and chat template of a Hugging Face folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from fly_jax.decode.checkpoints.hf import read_json
from fly_jax.decode.checkpoints.text import END_OF_TURN_TOKENS, TextCodec
from fly_jax.errors import UserError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def codec_from_folder(folder: Path) -> TextCodec:
    """Reads tokenizer.json and, where they are there, tokenizer_config.json, generation_config.json and the template.

    Raises:
        UserError: when tokenizer.json is missing or unreadable, or nothing names a token that ends a text.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"{path} is missing: only tokenizer.json is read; "
            "convert other tokenizers with transformers' AutoTokenizer.save_pretrained."
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers package raises plain Exception
        raise UserError(f"{path} is not a readable tokenizer ({error}): download it again.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer_config = _optional_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(tokenizer_config)
    chat_template = _chat_template(folder, tokenizer_config)
    eos_token_ids = _eos_token_ids(folder, tokenizer, special_tokens, is_chat=chat_template is not None)
    return TextCodec(tokenizer, eos_token_ids, chat_template, special_tokens)


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for name in _SPECIAL_TOKENS:
        token = tokenizer_config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            named[name] = str(token)
    return named


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise UserError(f"{folder / 'tokenizer_config.json'}: chat_template must be text, got {template!r}.")
    return template


def _eos_token_ids(
    folder: Path, tokenizer: tokenizers.Tokenizer, special_tokens: Mapping[str, str], *, is_chat: bool
) -> frozenset[int]:
    found: set[int] = set()
    for token in [special_tokens.get("eos_token"), *(END_OF_TURN_TOKENS if is_chat else ())]:
        token_id = None if token is None else tokenizer.token_to_id(token)
        if token_id is not None:
            found.add(token_id)
    for name in ("generation_config.json", "config.json"):
        listed = _optional_json(folder / name).get("eos_token_id")
        token_ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
        if not all(isinstance(token_id, int) for token_id in token_ids):
            raise UserError(f"{folder / name}: eos_token_id must be token ids, got {listed!r}.")
        found.update(token_ids)
    if not found:
        raise UserError(
            f"{folder} names no eos_token in tokenizer_config.json, generation_config.json or config.json: "
            "a generation could not end."
        )
    return frozenset(found)
