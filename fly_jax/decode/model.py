"""A decoder-only transformer of the Llama family with a static key/value cache.

In the shapes below `B` is the batch of requests, `T` the new tokens of a step, `L` the cache's maximum length, `D` the
hidden size, `V` the vocabulary. Every request has its own length, so a batch is ragged without any padding on the left.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fly_jax.decode.decoder_config import DecoderConfig
from fly_jax.errors import UserError

__all__ = ["Decoder", "DecoderConfig", "DecoderWeights", "KVCache", "LayerWeights", "random_decoder"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens seen so far. A pytree.

    Attributes:
        keys: one array per layer, [B, num_kv_heads, L, head_dim], rotated.
        values: one array per layer, [B, num_kv_heads, L, head_dim].
        length: [B] int32, how many positions of each request are in the cache. What lies beyond is never attended to.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array

    @classmethod
    def zeros(
        cls, config: DecoderConfig, batch_size: int, max_length: int, dtype: DTypeLike = jnp.float32
    ) -> "KVCache":
        """An empty cache.

        Raises:
            UserError: when `batch_size` or `max_length` is not positive.
        """
        for name, value in (("batch_size", batch_size), ("max_length", max_length)):
            if value < 1:
                raise UserError(f"{name} must be at least 1, got {value}.")
        shape = (batch_size, config.num_kv_heads, max_length, config.head_dim)
        keys = tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))
        values = tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))
        return cls(keys, values, jnp.zeros(batch_size, jnp.int32))

    @property
    def max_length(self) -> int:
        """The number of positions there is room for, `L`."""
        return self.keys[0].shape[2]

    def advance(self, num_tokens: jax.Array) -> "KVCache":
        """The cache with the first `num_tokens` [B] int32 of each request's last step kept."""
        return dataclasses.replace(self, length=self.length + num_tokens)


@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer. Matrices are [in, out], so that a product reads them in order.

    Attributes:
        attention_norm: [D] float32.
        qkv: [D, (num_heads + 2 * num_kv_heads) * head_dim], queries, keys, values side by side.
        attention_output: [num_heads * head_dim, D].
        mlp_norm: [D] float32.
        gate_up: [D, 2 * intermediate_size], gate and up side by side.
        down: [intermediate_size, D].
        qkv_bias: [(num_heads + 2 * num_kv_heads) * head_dim] float32, or None.
        query_norm: [head_dim] float32, or None.
        key_norm: [head_dim] float32, or None.
    """

    attention_norm: jax.Array
    qkv: jax.Array
    attention_output: jax.Array
    mlp_norm: jax.Array
    gate_up: jax.Array
    down: jax.Array
    qkv_bias: jax.Array | None = None
    query_norm: jax.Array | None = None
    key_norm: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class DecoderWeights:
    """All weights of a decoder.

    Attributes:
        embedding: [D, V], one token a column: the layout in which a tied head is fastest, and a gather costs nothing.
        layers: one `LayerWeights` per layer.
        final_norm: [D] float32.
        head: [D, V], or None when the head is the embedding.
    """

    embedding: jax.Array
    layers: tuple[LayerWeights, ...]
    final_norm: jax.Array
    head: jax.Array | None = None


class DecoderLayer(nnx.Module):
    """Attention and gated MLP with their norms and residual connections."""

    def __init__(self, config: DecoderConfig, weights: LayerWeights):
        self.config = config
        self.attention_norm = nnx.Param(weights.attention_norm)
        self.qkv = nnx.Param(weights.qkv)
        self.qkv_bias = _optional_param(weights.qkv_bias)
        self.query_norm = _optional_param(weights.query_norm)
        self.key_norm = _optional_param(weights.key_norm)
        self.attention_output = nnx.Param(weights.attention_output)
        self.mlp_norm = nnx.Param(weights.mlp_norm)
        self.gate_up = nnx.Param(weights.gate_up)
        self.down = nnx.Param(weights.down)

    def __call__(
        self, x: jax.Array, positions: jax.Array, rotation: jax.Array, keys: jax.Array, values: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B, T, D], positions [B, T], rotation [2, B, T, head_dim / 2], one layer's cache -> (x, keys, values)."""
        query, key, value = self._project(x, rotation)
        # Written before it is read, so that it is written in place; the barrier keeps XLA CPU from fusing the write
        # into both readers. Either way around it would copy the whole cache.
        keys = jax.lax.optimization_barrier(_write_rows(keys, key.astype(keys.dtype), positions))
        values = jax.lax.optimization_barrier(_write_rows(values, value.astype(values.dtype), positions))
        x = x + _matmul(_attend(query, keys, values, positions), self.attention_output[...])
        gate_up = _matmul(_rms_norm(x, self.mlp_norm[...], self.config.rms_norm_eps), self.gate_up[...])
        gate, up = jnp.split(gate_up, 2, axis=-1)
        x = x + _matmul(jax.nn.silu(gate) * up, self.down[...])
        return x, keys, values

    def _project(self, x: jax.Array, rotation: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        config = self.config
        projected = _matmul(_rms_norm(x, self.attention_norm[...], config.rms_norm_eps), self.qkv[...])
        if self.qkv_bias is not None:
            projected = projected + self.qkv_bias[...][None, None, :]
        heads = projected.reshape(*x.shape[:2], -1, config.head_dim)
        query, key, value = jnp.split(heads, [config.num_heads, config.num_heads + config.num_kv_heads], axis=2)
        if self.query_norm is not None and self.key_norm is not None:
            query = _rms_norm(query, self.query_norm[...], config.rms_norm_eps)
            key = _rms_norm(key, self.key_norm[...], config.rms_norm_eps)
        return _rotate(query, rotation), _rotate(key, rotation), value


class Decoder(nnx.Module):
    """A Llama, Qwen2 or Qwen3 decoder. Activations are float32; weights have the dtype they are given in."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights):
        self.config = config
        self.embedding = nnx.Param(weights.embedding)
        self.layers = nnx.List([DecoderLayer(config, layer) for layer in weights.layers])
        self.final_norm = nnx.Param(weights.final_norm)
        self.head = _optional_param(weights.head)

    def __call__(
        self, token_ids: jax.Array, cache: KVCache, *, skip_layers: tuple[int, ...] = ()
    ) -> tuple[jax.Array, KVCache]:
        """As `hidden`, then `logits`: (logits [B, T, V] float32, cache)."""
        hidden, cache = self.hidden(token_ids, cache, skip_layers=skip_layers)
        return self.logits(hidden), cache

    def hidden(
        self, token_ids: jax.Array, cache: KVCache, *, skip_layers: tuple[int, ...] = ()
    ) -> tuple[jax.Array, KVCache]:
        """Runs `T` new tokens of every request through the layers.

        Token `t` of request `b` stands at position `cache.length[b] + t`, where its keys and values are written; it
        attends to all positions up to its own. The returned cache has the same `length`: the caller advances it by
        the tokens it keeps, and rejected ones are overwritten later. A position `>= L` is not written, and a token id
        outside the vocabulary serves as padding: what is computed for either means nothing.

        Args:
            token_ids: [B, T] int32.
            cache: of the same batch and config.
            skip_layers: layers to leave out (self-speculative drafting). Their cache is left untouched. Static.

        Returns:
            (the residual stream before the final norm [B, T, D] float32, cache).

        Raises:
            UserError: when shapes, dtypes or layer numbers do not fit.
        """
        _check_step(self.config, token_ids, cache, skip_layers)
        positions = cache.length[:, None] + jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :]
        rotation = _rotation(positions, self.config)
        # A clamped index keeps padding ids finite: NaN in the cache would reach every later token through 0 * NaN.
        x = jnp.take(self.embedding[...], token_ids, axis=1, mode="clip")
        x = jnp.moveaxis(x, 0, -1).astype(jnp.float32)
        keys, values = list(cache.keys), list(cache.values)
        for i, layer in enumerate(self.layers):
            if i not in skip_layers:
                x, keys[i], values[i] = layer(x, positions, rotation, keys[i], values[i])
        return x, dataclasses.replace(cache, keys=tuple(keys), values=tuple(values))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Final norm and head: hidden [B, T, D] float32 -> logits [B, T, V] float32."""
        head = self.embedding if self.head is None else self.head
        return _matmul(_rms_norm(hidden, self.final_norm[...], self.config.rms_norm_eps), head[...])


def random_decoder(config: DecoderConfig, key: jax.Array, *, dtype: DTypeLike = jnp.float32) -> Decoder:
    """A decoder with random weights, for tests and benchmarks. `key` is consumed."""
    keys = iter(jax.random.split(key, 9 * config.num_layers + 3))

    def matrix(num_inputs: int, num_outputs: int) -> jax.Array:
        values = jax.random.normal(next(keys), (num_inputs, num_outputs), jnp.float32)
        return (values * num_inputs**-0.5).astype(dtype)

    def vector(size: int, mean: float) -> jax.Array:
        return mean + 0.1 * jax.random.normal(next(keys), (size,), jnp.float32)

    qkv_size = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layers = tuple(
        LayerWeights(
            attention_norm=vector(config.hidden_size, 1.0),
            qkv=matrix(config.hidden_size, qkv_size),
            attention_output=matrix(config.num_heads * config.head_dim, config.hidden_size),
            mlp_norm=vector(config.hidden_size, 1.0),
            gate_up=matrix(config.hidden_size, 2 * config.intermediate_size),
            down=matrix(config.intermediate_size, config.hidden_size),
            qkv_bias=vector(qkv_size, 0.0) if config.qkv_bias else None,
            query_norm=vector(config.head_dim, 1.0) if config.qk_norm else None,
            key_norm=vector(config.head_dim, 1.0) if config.qk_norm else None,
        )
        for _ in range(config.num_layers)
    )
    return Decoder(
        config,
        DecoderWeights(
            embedding=matrix(config.hidden_size, config.vocab_size),
            layers=layers,
            final_norm=vector(config.hidden_size, 1.0),
            head=None if config.tie_word_embeddings else matrix(config.hidden_size, config.vocab_size),
        ),
    )


def _optional_param(value: jax.Array | None) -> nnx.Param | None:
    return None if value is None else nnx.Param(value)


def _check_step(config: DecoderConfig, token_ids: jax.Array, cache: KVCache, skip_layers: tuple[int, ...]) -> None:
    if token_ids.ndim != 2 or not jnp.issubdtype(token_ids.dtype, jnp.integer):
        raise UserError(f"token_ids must be [B, T] integers, got {token_ids.dtype}{list(token_ids.shape)}.")
    batch_size, num_tokens = token_ids.shape
    expected = (batch_size, config.num_kv_heads, cache.max_length, config.head_dim)
    if len(cache.keys) != config.num_layers or cache.keys[0].shape != expected:
        raise UserError(
            f"cache must have {config.num_layers} layers of {list(expected)} for this model and token_ids, "
            f"got {len(cache.keys)} of {list(cache.keys[0].shape)}: build it with KVCache.zeros."
        )
    if num_tokens > cache.max_length:
        raise UserError(f"token_ids has {num_tokens} tokens a request, but the cache has room for {cache.max_length}.")
    unknown = sorted(i for i in skip_layers if not 0 <= i < config.num_layers)
    if unknown:
        raise UserError(f"skip_layers has {unknown}: layers are numbered from 0 to {config.num_layers - 1}.")


def _matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.matmul(x.astype(weight.dtype), weight, preferred_element_type=jnp.float32)


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return x * scale * jnp.expand_dims(weight, range(x.ndim - 1))


def _rotation(positions: jax.Array, config: DecoderConfig) -> jax.Array:
    """Positions [B, T] -> cosines and sines [2, B, T, head_dim / 2] float32."""
    angles = positions.astype(jnp.float32)[:, :, None] * config.rope_frequencies()[None, None, :]
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def _rotate(x: jax.Array, rotation: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + head_dim / 2) of x [B, T, heads, head_dim]."""
    cos, sin = rotation[0][:, :, None, :], rotation[1][:, :, None, :]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _write_rows(cache: jax.Array, rows: jax.Array, positions: jax.Array) -> jax.Array:
    """Writes rows [B, T, heads, head_dim] at positions [B, T] of one layer's cache [B, heads, L, head_dim]."""
    batch = jnp.arange(cache.shape[0], dtype=jnp.int32)[:, None]
    return cache.at[batch, :, positions].set(rows, mode="drop", unique_indices=True)


def _attend(query: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array) -> jax.Array:
    """Causal grouped-query attention of T new tokens to the cache, in which they are already.

    Args:
        query: [B, T, num_heads, head_dim] float32.
        keys, values: [B, num_kv_heads, L, head_dim].
        positions: [B, T] int32; each attends up to its own.

    Returns:
        [B, T, num_heads * head_dim] float32.
    """
    batch_size, num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, max_length = keys.shape[1:3]
    # Query heads of one key/value head share its matrix product: [B, num_kv_heads, T, group, head_dim].
    query = (query * head_dim**-0.5).astype(keys.dtype)
    query = query.reshape(batch_size, num_tokens, num_kv_heads, -1, head_dim).swapaxes(1, 2)
    visible = jnp.arange(max_length, dtype=jnp.int32)[None, None, :] <= positions[:, :, None]
    scores = _scores(query, keys, visible[:, None, :, None, :])
    # The division of the softmax is left to the end.
    weights = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
    output = _weighted(weights, values) / jnp.sum(weights, -1, keepdims=True)
    return output.swapaxes(1, 2).reshape(batch_size, num_tokens, num_heads * head_dim)


def _scores(query: jax.Array, keys: jax.Array, visible: jax.Array) -> jax.Array:
    scores = jnp.einsum("bktgd,bksd->bktgs", query, keys, preferred_element_type=jnp.float32)
    return jnp.where(visible, scores, -jnp.inf)


def _weighted(weights: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.einsum("bktgs,bksd->bktgd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
