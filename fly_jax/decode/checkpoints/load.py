"""Loading a model: a GGUF file or a Hugging Face folder -> decoder, tokenizer and config."""

import dataclasses
import logging
from pathlib import Path

import jax.numpy as jnp
from jax.typing import DTypeLike

from fly_jax.decode.checkpoints.default import default_model_path
from fly_jax.decode.checkpoints.gguf import codec_from_gguf, config_from_gguf, open_gguf, tensors_from_gguf
from fly_jax.decode.checkpoints.hf import codec_from_folder, read_json, tensors_from_folder
from fly_jax.decode.checkpoints.text import TextCodec
from fly_jax.decode.checkpoints.weights import (
    CheckpointTensors,
    Progress,
    assemble_weights,
    under_expected_names,
    with_the_head_there_is,
)
from fly_jax.decode.decoder_config import DecoderConfig
from fly_jax.decode.model import Decoder
from fly_jax.errors import UserError

logger = logging.getLogger("fly_jax")


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A decoder with what belongs to it.

    Attributes:
        decoder: the model, its weights in memory.
        tokenizer: text to token ids and back, with the chat template.
        config: sizes and switches; the same object as `decoder.config`.
        name: the model's own name, or the file's or folder's.
    """

    decoder: Decoder
    tokenizer: TextCodec
    config: DecoderConfig
    name: str


def load_model(
    path: str | Path | None, *, dtype: DTypeLike = jnp.float32, progress: Progress | None = None
) -> LoadedModel:
    """Loads a Llama, Qwen2 or Qwen3 model.

    Args:
        path: a `.gguf` file, or a folder with `config.json`, `model.safetensors` (or shards and their index) and
            `tokenizer.json`; None is the default model, downloaded once.
        dtype: of the matrices in memory, float32 or bfloat16; checkpoints in any other precision are converted.
        progress: called with what is being done and the fraction of it that is done.

    Raises:
        UserError: when the model cannot be read in full and exactly.
    """
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise UserError(f"dtype must be float32 or bfloat16, got {jnp.dtype(dtype).name}.")
    path = default_model_path(progress=progress) if path is None else Path(path)
    if path.is_dir():
        return _load_folder(path, dtype, progress)
    if path.suffix != ".gguf":
        raise UserError(f"{path} is neither a .gguf file nor a folder: pass a .gguf file or a Hugging Face folder.")
    return _load_gguf(path, dtype, progress)


def _load_gguf(path: Path, dtype: DTypeLike, progress: Progress | None) -> LoadedModel:
    if progress is not None:
        progress("reading the vocabulary", 0.0)
    stored, fields = open_gguf(path)
    config = config_from_gguf(fields, stored, path)
    tokenizer = codec_from_gguf(fields, path)
    tensors = tensors_from_gguf(stored, config, path)
    return _build(config, tokenizer, tensors, str(fields.get("general.name", path.stem)), dtype, progress)


def _load_folder(path: Path, dtype: DTypeLike, progress: Progress | None) -> LoadedModel:
    config = DecoderConfig.from_hf(read_json(path / "config.json"))
    return _build(config, codec_from_folder(path), tensors_from_folder(path), path.resolve().name, dtype, progress)


def _build(
    config: DecoderConfig,
    tokenizer: TextCodec,
    tensors: CheckpointTensors,
    name: str,
    dtype: DTypeLike,
    progress: Progress | None,
) -> LoadedModel:
    if tokenizer.vocab_size > config.vocab_size:
        # Fine-tuning adds a padding token to the tokenizer and may leave the model as it is.
        logger.warning(
            "%s: the tokenizer has %d tokens but the model %d: a prompt with one of the others will be refused.",
            tensors.source,
            tokenizer.vocab_size,
            config.vocab_size,
        )
    tensors = under_expected_names(tensors, config)
    config = with_the_head_there_is(config, tensors)
    decoder = Decoder(config, assemble_weights(config, tensors, dtype, progress))
    return LoadedModel(decoder, tokenizer, config, name)
