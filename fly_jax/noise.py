"""Randomness of a verification: streams per request, given noise, and vLLM V2's own streams.

Drafting and verifying with the same request key stay independent because their keys are folded with different tags.
"""

import dataclasses
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

_VERIFY_TAG = 0x464C5956
_DRAFT_TAG = 0x464C5944
_THREEFRY = "threefry2x32"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VerifyNoise:
    """All the randomness of one verification, given explicitly: the result is then a pure function.

    Attributes:
      uniform: `[B, K]` float32 on (0, 1], compared with the acceptance ratio; a replayed 0 is allowed. float64 is
        rounded up to float32, which changes no decision because the ratio is a float32.
      final_uniform: `[B, 2]` float32 on (0, 1]: the block, and the token in it, of the inverse CDF.
      gumbel: `[B, V]` float32 standard Gumbel noise, instead of `final_uniform`. An exponential race (vLLM V1's
        `argmax(p / q)`) is the same with `gumbel = -log(q)`.
    """

    uniform: ArrayLike
    final_uniform: ArrayLike | None = None
    gumbel: ArrayLike | None = None

    def __post_init__(self) -> None:
        # Here, because jax.jit narrows a NumPy float64 to the nearest float32 before anything is traced.
        uniform = np.asarray(self.uniform) if isinstance(self.uniform, np.generic) else self.uniform
        if isinstance(uniform, jax.Array | np.ndarray) and uniform.dtype == np.float64:
            object.__setattr__(self, "uniform", round_up(uniform))

    def uniforms(self) -> Array:
        """`[B, K]` float32: what the acceptance ratio of each draft token is compared with."""
        return jnp.asarray(self.uniform)

    def gumbel_noise(self, num_accepted: Array, num_columns: int) -> Array | None:
        """`[B, V]` float32 for the token after `num_accepted` `[B]` drafts; None: `final_uniform` draws it."""
        return None if self.gumbel is None else jnp.asarray(self.gumbel)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VllmV2Noise:
    """vLLM 0.33 V2's counter-based streams, from the seed of a request and the positions of its rows.

    Attributes:
      seed: `[B, 2]` uint32, the low and high words of each request's seed.
      position: `[B, K + 1, 2]` uint32, the low and high words of each row's position in the sequence.
    """

    seed: ArrayLike
    position: ArrayLike

    @property
    def final_uniform(self) -> None:
        """None: the token after the accepted prefix is drawn with Gumbel noise."""

    def uniforms(self) -> Array:
        """`[B, K]` float32: what the acceptance ratio of each draft token is compared with."""
        return philox_uniform(jnp.asarray(self.seed), jnp.asarray(self.position)[:, :-1])

    def gumbel_noise(self, num_accepted: Array, num_columns: int) -> Array:
        """`[B, V]` float32 for the token after `num_accepted` `[B]` drafts: of the row that emits, and no other."""
        position = jnp.take_along_axis(jnp.asarray(self.position), num_accepted[:, None, None], axis=1)[:, 0]
        return murmur_gumbel(jnp.asarray(self.seed), position, num_columns)


Noise: TypeAlias = VerifyNoise | VllmV2Noise
"""What a verification draws from; both answer `uniforms`, and `gumbel_noise` or `final_uniform`."""


def round_up(uniform: Array | np.ndarray) -> Array | np.ndarray:
    """A float64 array to the next float32 at or above it: comparisons with a float32 ratio stay what they were."""
    xp = jnp if isinstance(uniform, jax.Array) else np
    nearest = uniform.astype(np.float32)
    return xp.where(nearest.astype(np.float64) < uniform, xp.nextafter(nearest, np.float32(np.inf)), nearest)


def request_keys(key: Array, num_requests: int) -> Array:
    """`[B]` typed keys: the given ones, or one key folded with the index of each request.

    They are keys of JAX's default generator, threefry, made of the given ones where these are of another (`rbg`,
    `unsafe_rbg`): those draw for a whole batch with its first key only, so that a request would depend on its
    neighbours (https://docs.jax.dev/en/latest/jax.random.html).

    Args:
      key: one key, or one a request, of any generator; typed (`jax.random.key`) or raw (`jax.random.PRNGKey`, uint32).
      num_requests: B.

    Raises:
      ValueError: the shape is neither.
    """
    key = _threefry(key)
    if key.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_requests, dtype=jnp.uint32))
    if key.shape != (num_requests,):
        raise ValueError(f"key must be one key or [B] = [{num_requests}] keys, got shape {list(key.shape)}")
    return key


def draft_keys(keys: Array) -> Array:
    """`[B]` keys for drafting, independent of what `fly_verify` draws from the same `[B]` keys (`request_keys`).

    Raises:
      ValueError: these are not `[B]` typed keys.
    """
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or keys.ndim != 1:
        raise ValueError(f"keys must be [B] typed keys, as request_keys gives, got {keys.dtype}{list(keys.shape)}")
    return _fold(_threefry(keys), _DRAFT_TAG)


def verify_noise(keys: Array, num_positions: int) -> VerifyNoise:
    """Draws the noise of `[B]` requests: u at a position depends on the request's key and the position alone."""
    uniform, final_uniform = _draw(keys, num_positions)
    return VerifyNoise(uniform, final_uniform)


def token_uniforms(keys: Array) -> Array:
    """`[B, 2]` float32: the `final_uniform` that `verify_noise` draws from `[B]` keys, whatever K."""
    return _draw(keys, 0)[1]


def _draw(keys: Array, num_positions: int) -> tuple[Array, Array]:
    streams = jnp.arange(num_positions + 1, dtype=jnp.uint32)
    own = _fold(_threefry(keys), _VERIFY_TAG)
    keys = jax.vmap(lambda key: jax.vmap(jax.random.fold_in, (None, 0))(key, streams))(own)
    # Multiples of 2**-23 on (0, 1]; jax.random.uniform is on [0, 1).
    uniform = 1.0 - jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (2,), jnp.float32)))(keys)
    # Stream 0 is for the token after the accepted prefix, so that a longer K leaves the others alone.
    return uniform[:, 1:, 0], uniform[:, 0]


def _threefry(keys: Array) -> Array:
    """A threefry key for each key, typed or raw: itself, or all of its words folded into one."""
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        words = jnp.asarray(keys)
    elif str(jax.random.key_impl(keys)) == _THREEFRY:
        return keys
    else:
        words = jax.random.key_data(keys)
    own = jax.random.wrap_key_data(words[..., :2], impl=_THREEFRY)
    fold = jax.random.fold_in if own.ndim == 0 else jax.vmap(jax.random.fold_in)
    for i in range(2, words.shape[-1]):
        own = fold(own, words[..., i])
    return own


def _fold(keys: Array, tag: int) -> Array:
    return jax.vmap(jax.random.fold_in, (0, None))(keys, jnp.uint32(tag))


def philox_uniform(seed: Array, position: Array) -> Array:
    """vLLM V2's acceptance uniforms: Philox4x32-10 keyed by the seed, counted by the position.

    Args:
      seed: `[B, 2]` uint32.
      position: `[B, T, 2]` uint32.

    Returns:
      `[B, T]` float32 on (0, 1).
    """
    key_low, key_high = seed[:, None, 0], seed[:, None, 1]
    counter = [position[..., 0], position[..., 1], jnp.zeros_like(position[..., 0]), jnp.zeros_like(position[..., 0])]
    for _ in range(10):
        high_0, low_0 = _multiply_wide(0xD2511F53, counter[0])
        high_2, low_2 = _multiply_wide(0xCD9E8D57, counter[2])
        counter = [high_2 ^ counter[1] ^ key_low, low_2, high_0 ^ counter[3] ^ key_high, low_0]
        key_low, key_high = key_low + jnp.uint32(0x9E3779B9), key_high + jnp.uint32(0xBB67AE85)
    word = jax.lax.bitcast_convert_type(counter[0], jnp.int32)
    word = jnp.where(word < 0, ~word, word)
    step = np.float32(4.6566127342e-10)
    return jnp.maximum(word.astype(jnp.float32) * step, step)


def murmur_gumbel(seed: Array, position: Array, num_columns: int) -> Array:
    """vLLM V2's Gumbel noise of one row a request: murmur3 over (seed, position, token id).

    Args:
      seed: `[B, 2]` uint32.
      position: `[B, 2]` uint32, of the row that emits.
      num_columns: V.

    Returns:
      `[B, V]` float32.
    """
    tokens = jnp.arange(num_columns, dtype=jnp.uint32)[None]
    state = jnp.zeros((seed.shape[0], 1), jnp.uint32)
    for word in (seed[:, :1], seed[:, 1:], position[:, :1], tokens):
        word = _rotate_left(word * jnp.uint32(0xCC9E2D51), 15) * jnp.uint32(0x1B873593)
        state = _rotate_left(state ^ word, 13) * jnp.uint32(5) + jnp.uint32(0xE6546B64)
    state = state ^ jnp.uint32(16)
    state = (state ^ (state >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    state = (state ^ (state >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    state = state ^ (state >> jnp.uint32(16))
    high = (state >> jnp.uint32(16)).astype(jnp.float32)
    low = (state & jnp.uint32(0xFFFF)).astype(jnp.float32)
    w = high * np.float32(2**-16) + (low + 0.5) * np.float32(2**-32)
    return -jnp.log(-_log_one_minus(w))


def _log_one_minus(w: Array) -> Array:
    # The series is vLLM's own for small w, so that its tokens are replayed.
    series = jnp.zeros_like(w)
    for denominator in (8, 7, 6, 5, 4, 3, 2, 1):
        series = series * w + np.float32(1 / denominator)
    return jnp.where(w < 0.25, -w * series, jnp.log(jnp.maximum(1.0 - w, np.float32(5.960464477539063e-08))))


def _rotate_left(word: Array, bits: int) -> Array:
    return (word << jnp.uint32(bits)) | (word >> jnp.uint32(32 - bits))


def _multiply_wide(constant: int, word: Array) -> tuple[Array, Array]:
    # 32 x 32 -> 64 bits in 16-bit halves: uint64 would need x64.
    a_high, a_low = jnp.uint32(constant >> 16), jnp.uint32(constant & 0xFFFF)
    b_high, b_low = word >> jnp.uint32(16), word & jnp.uint32(0xFFFF)
    low, middle_1, middle_2 = a_low * b_low, a_high * b_low, a_low * b_high
    middle = (low >> jnp.uint32(16)) + (middle_1 & jnp.uint32(0xFFFF)) + (middle_2 & jnp.uint32(0xFFFF))
    high = a_high * b_high + (middle_1 >> jnp.uint32(16)) + (middle_2 >> jnp.uint32(16)) + (middle >> jnp.uint32(16))
    return high, jnp.uint32(constant) * word
