"""From a checkpoint's named tensors to the decoder's fused float matrices."""

import dataclasses
import logging
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fly_jax.decode.decoder_config import DecoderConfig
from fly_jax.decode.model import DecoderWeights, LayerWeights
from fly_jax.errors import UserError

Progress = Callable[[str, float], None]

logger = logging.getLogger("fly_jax")

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class CheckpointTensors:
    """Tensors on disk under their Hugging Face names, read one at a time.

    Attributes:
        source: what to call the checkpoint in an error.
        shapes: every tensor's name and shape.
        read: name -> the tensor as a float32 numpy array of that shape.
    """

    source: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The Hugging Face names and shapes ([out, in]) of the tensors a checkpoint of this config consists of."""
    hidden, query = config.hidden_size, config.num_heads * config.head_dim
    key_value = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        layer = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (query, hidden),
            "self_attn.k_proj.weight": (key_value, hidden),
            "self_attn.v_proj.weight": (key_value, hidden),
            "self_attn.o_proj.weight": (hidden, query),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (config.intermediate_size, hidden),
            "mlp.up_proj.weight": (config.intermediate_size, hidden),
            "mlp.down_proj.weight": (hidden, config.intermediate_size),
        }
        if config.qkv_bias:
            layer |= {f"self_attn.{name}_proj.bias": (size,) for name, size in _qkv_sizes(query, key_value)}
        if config.qk_norm:
            layer |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def under_expected_names(tensors: CheckpointTensors, config: DecoderConfig) -> CheckpointTensors:
    """The same tensors under the names of `expected_shapes`, where a checkpoint uses another that means the same.

    A checkpoint of the bare model leaves out "model." before each name. One of a tied model stores its one matrix under
    the name of the embedding, of the head, or both: whoever drops the copy may keep either.
    """
    names = {name: name for name in tensors.shapes}
    if not any(name.startswith("model.") for name in names):
        names = {name if name == HEAD else f"model.{name}": name for name in names}
    if config.tie_word_embeddings and EMBEDDING not in names and HEAD in names:
        names[EMBEDDING] = names.pop(HEAD)
    return CheckpointTensors(
        tensors.source,
        {name: tensors.shapes[stored] for name, stored in names.items()},
        lambda name: tensors.read(names[name]),
    )


def with_the_head_there_is(config: DecoderConfig, tensors: CheckpointTensors) -> DecoderConfig:
    """`config`, untied where the checkpoint has a head that is not the embedding: the weights decide.

    Logs a warning where they contradict the config. transformers 5 does the same.

    Raises:
        UserError: when head and embedding are one by the config, and have different shapes.
    """
    if not config.tie_word_embeddings or not {EMBEDDING, HEAD} <= tensors.shapes.keys():
        return config
    if tensors.shapes[EMBEDDING] != tensors.shapes[HEAD]:
        raise UserError(
            f"{tensors.source}: {HEAD} has shape {list(tensors.shapes[HEAD])} and {EMBEDDING} "
            f"{list(tensors.shapes[EMBEDDING])}, but the config says that they are one (tie_word_embeddings)."
        )
    if np.array_equal(tensors.read(EMBEDDING), tensors.read(HEAD)):
        return config
    logger.warning(
        "%s: the config says that the head is the embedding (tie_word_embeddings), but the checkpoint has a head that "
        "differs: it is used.",
        tensors.source,
    )
    return dataclasses.replace(config, tie_word_embeddings=False)


def assemble_weights(
    config: DecoderConfig, tensors: CheckpointTensors, dtype: DTypeLike, progress: Progress | None = None
) -> DecoderWeights:
    """Reads all tensors and fuses them. Matrices get `dtype`; norms and biases stay float32.

    Raises:
        UserError: when tensors are missing, left over or of another shape than the config says.
    """
    _check_names_and_shapes(config, tensors)

    def vector(name: str) -> jax.Array:
        return jnp.asarray(tensors.read(name), jnp.float32)

    def matrix(*names: str) -> jax.Array:
        rows = np.concatenate([tensors.read(name) for name in names])
        return jnp.asarray(np.ascontiguousarray(rows.T), dtype)

    layers = []
    for i in range(config.num_layers):
        if progress is not None:
            progress("reading weights", i / config.num_layers)
        prefix = f"model.layers.{i}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        biases = [tensors.read(f"{attention}{name}_proj.bias") for name in "qkv"] if config.qkv_bias else []
        layers.append(
            LayerWeights(
                attention_norm=vector(prefix + "input_layernorm.weight"),
                qkv=matrix(*(f"{attention}{name}_proj.weight" for name in "qkv")),
                attention_output=matrix(attention + "o_proj.weight"),
                mlp_norm=vector(prefix + "post_attention_layernorm.weight"),
                gate_up=matrix(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
                down=matrix(mlp + "down_proj.weight"),
                qkv_bias=jnp.asarray(np.concatenate(biases), jnp.float32) if biases else None,
                query_norm=vector(attention + "q_norm.weight") if config.qk_norm else None,
                key_norm=vector(attention + "k_norm.weight") if config.qk_norm else None,
            )
        )
    weights = DecoderWeights(
        embedding=matrix(EMBEDDING),
        layers=tuple(layers),
        final_norm=vector("model.norm.weight"),
        head=None if config.tie_word_embeddings else matrix(HEAD),
    )
    if progress is not None:
        progress("reading weights", 1.0)
    return weights


def _qkv_sizes(query: int, key_value: int) -> tuple[tuple[str, int], ...]:
    return (("q", query), ("k", key_value), ("v", key_value))


def _check_names_and_shapes(config: DecoderConfig, tensors: CheckpointTensors) -> None:
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in tensors.shapes]
    if missing:
        raise UserError(f"{tensors.source} lacks {_listing(missing)}: it is incomplete or of another architecture.")
    # Files of tied models may repeat the embedding as a head; old ones store what the config gives, rotary frequencies.
    derivable = {HEAD} if config.tie_word_embeddings else set()
    extra = [
        name
        for name in tensors.shapes
        if name not in expected and name not in derivable and not name.endswith("rotary_emb.inv_freq")
    ]
    if extra:
        raise UserError(f"{tensors.source} has {_listing(extra)}, which this decoder does not use: not supported.")
    for name, shape in expected.items():
        if tensors.shapes[name] != shape:
            raise UserError(
                f"{tensors.source}: {name} has shape {list(tensors.shapes[name])}, "
                f"but the config asks for {list(shape)}."
            )


def _listing(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"
