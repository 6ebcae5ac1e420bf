"""Reading a decoder from a Hugging Face folder: config.json and safetensors, without torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from fly_jax.decode.checkpoints.weights import CheckpointTensors
from fly_jax.errors import UserError

_FLOAT_TYPES = ("F32", "F16", "BF16", "F64")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        UserError: when the file is missing or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
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
