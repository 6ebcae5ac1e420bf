"""Reading a Hugging Face folder without torch: config.json, safetensors, tokenizer.json and the chat template."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors import SafetensorError, safe_open

from fly_jax.decode.checkpoints.text import END_OF_TURN_TOKENS, TextCodec
from fly_jax.decode.checkpoints.weights import CheckpointTensors
from fly_jax.errors import UserError

_FLOAT_TYPES = ("F32", "F16", "BF16", "F64")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        UserError: when the file is missing or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: pass a complete Hugging Face folder or a .gguf file.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not readable JSON ({error}): download it again.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, got {type(value).__name__}: download it again.")
    return value


def tensors_from_folder(folder: Path) -> CheckpointTensors:
    """The tensors of model.safetensors, or of the shards model.safetensors.index.json names.

    Raises:
        UserError: when files are missing, damaged or hold anything but floating-point tensors.
    """
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _tensor_files(folder):
        for name, shape in _headers(path):
            if name in files:
                raise UserError(f"{name} is in {files[name].name} and in {path.name}: remove one from {folder}.")
            files[name], shapes[name] = path, shape

    def read(name: str) -> np.ndarray:
        with safe_open(files[name], framework="np") as file:
            return file.get_tensor(name).astype(np.float32)

    return CheckpointTensors(str(folder), shapes, read)


def codec_from_folder(folder: Path) -> TextCodec:
    """Reads tokenizer.json and, where they are there, the files that name special tokens, and the chat template.

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
    special_tokens_map = _optional_json(folder / "special_tokens_map.json")
    special_tokens = _special_tokens(tokenizer_config, special_tokens_map)
    _add_missing_tokens(folder, tokenizer, tokenizer_config, special_tokens)
    chat_template = _chat_template(folder, tokenizer_config)
    eos_token_ids = _eos_token_ids(folder, tokenizer, special_tokens, is_chat=chat_template is not None)
    return TextCodec(tokenizer, eos_token_ids, chat_template, special_tokens)


def _tensor_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise UserError(
            f"{folder} has neither {single.name} nor {index.name}: only safetensors weights are read; "
            "convert others with transformers' save_pretrained."
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no weight_map: download it again.")
    shards = sorted({folder / str(name) for name in weight_map.values()})
    for shard in shards:
        if shard.parent != folder or not shard.is_file():
            raise UserError(f"{shard}, named in {index.name}, is missing: download it again.")
    return shards


def _headers(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    try:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                tensor = file.get_slice(name)
                if tensor.get_dtype() not in _FLOAT_TYPES:
                    raise UserError(
                        f"{path}: {name} is stored as {tensor.get_dtype()}, but must be one of "
                        f"{', '.join(_FLOAT_TYPES)}: quantized folders are not supported."
                    )
                yield name, tuple(tensor.get_shape())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}): download it again.") from error


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _special_tokens(tokenizer_config: Mapping[str, Any], special_tokens_map: Mapping[str, Any]) -> dict[str, str]:
    """Names and texts; templates may refer to any "..._token", those that only this model has among them.

    The map is older, and as in transformers it counts, and then first, where the config does not list added tokens.
    """
    sources = (
        [tokenizer_config] if "added_tokens_decoder" in tokenizer_config else [tokenizer_config, special_tokens_map]
    )
    named = {}
    for source in sources:
        for name, token in source.items():
            text = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(text, str):
                named[name] = text
    return named


def _add_missing_tokens(
    folder: Path,
    tokenizer: tokenizers.Tokenizer,
    tokenizer_config: Mapping[str, Any],
    special_tokens: Mapping[str, str],
) -> None:
    """Adds what the config, or the older added_tokens.json, lists and tokenizer.json lacks, under the ids they give."""
    if "added_tokens_decoder" in tokenizer_config:
        listed = {
            int(token_id): tokenizers.AddedToken(**{"normalized": not token.get("special", False), **token})
            for token_id, token in tokenizer_config["added_tokens_decoder"].items()
        }
    else:
        listed = {
            token_id: tokenizers.AddedToken(text, special=is_special, normalized=not is_special)
            for text, token_id in _optional_json(folder / "added_tokens.json").items()
            for is_special in [text in special_tokens.values()]
        }
    for token_id, token in sorted(listed.items()):
        if tokenizer.token_to_id(token.content) is not None:
            continue
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        if tokenizer.token_to_id(token.content) != token_id:
            raise UserError(
                f"{folder}: the added token {token.content!r} has the id {token_id}, but would get "
                f"{tokenizer.token_to_id(token.content)} in tokenizer.json: save the tokenizer again with transformers."
            )


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8-sig")
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
            f"{folder} names no eos_token in tokenizer_config.json, special_tokens_map.json, generation_config.json or "
            "config.json: "
            "a generation could not end."
        )
    return frozenset(found)
