"""The edge: everything `fly_verify` is given is checked and brought to one form here, once, at trace time."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fly_jax import noise as noise_lib
from fly_jax.config import SamplingParams
from fly_jax.rule.thresholds import is_greedy

_LOGIT_DTYPES = ("float32", "bfloat16", "float16")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "row_index"], meta_fields=["is_logits"])
@dataclasses.dataclass(frozen=True)
class DraftArray:
    """A draft distribution as it was given: `values` `[M, Vd]`, probabilities or logits, and which row is whose."""

    values: Array
    row_index: Array
    is_logits: bool


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "logits",
        "vocab_size",
        "row_index",
        "live",
        "draft_token_ids",
        "draft_in_vocab",
        "num_draft_tokens",
        "params",
        "greedy",
        "draft",
        "draft_temperature",
        "keys",
        "noise",
        "bonus_token_ids",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of a verification in one form.

    Attributes:
      logits: `[N, V]` float32, bfloat16 or float16.
      vocab_size: int32 scalar, how many columns count; None when all V do.
      row_index: `[B, K + 1]` int32, in range.
      live: `[B, K + 1]` bool: whether that row takes part; not so where the given index was out of range.
      draft_token_ids: `[B, K]` int32, 0 where the id is outside the vocabulary or past the draft.
      draft_in_vocab: `[B, K]` bool: the position is below `num_draft_tokens` and its id inside the vocabulary.
      num_draft_tokens: `[B]` int32 in `[0, K]`.
      params: `[B]` each; `params.temperature` is None when every request is greedy.
      greedy: `[B]` bool.
      draft: the draft distribution, if given and anything samples.
      draft_temperature: `[B]` float32, for draft logits; None when every request is greedy.
      keys: `[B]` keys to draw the noise from, or None.
      noise: the noise if it was given; neither when every request is greedy.
      bonus_token_ids: `[B]` int32 or None.
    """

    logits: Array
    vocab_size: Array | None
    row_index: Array
    live: Array
    draft_token_ids: Array
    draft_in_vocab: Array
    num_draft_tokens: Array
    params: SamplingParams
    greedy: Array
    draft: DraftArray | None
    draft_temperature: Array | None
    keys: Array | None
    noise: noise_lib.VerifyNoise | noise_lib.VllmV2Noise | None
    bonus_token_ids: Array | None


def from_arguments(
    target_logits: Any,
    row_index: Any,
    draft_token_ids: Any,
    *,
    draft_row_index: Any = None,
    bonus_token_ids: Any = None,
    num_draft_tokens: Any = None,
    draft_probs: Any = None,
    draft_logits: Any = None,
    temperature: Any = None,
    draft_temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    key: Any = None,
    noise: Any = None,
    vocab_size: Any = None,
) -> Inputs:
    """Checks the arguments of `fly_verify_rows` and converts them; see there for what they are.

    Raises:
      TypeError: a dtype or kind is wrong.
      ValueError: a shape or static value is wrong, or two arguments exclude each other.
    """
    ids = _integers("draft_token_ids", draft_token_ids, ("B", "K"), {})
    num_requests, num_positions = ids.shape
    sizes = {"B": num_requests, "K": num_positions, "K + 1": num_positions + 1}
    logits = check_logits("target_logits", target_logits, ("N", "V"))
    num_rows, num_columns = logits.shape
    rows = _integers("row_index", row_index, ("B", "K + 1"), sizes)
    if num_rows == 0:
        # Nothing is live: any row will do.
        logits = jnp.full((1, num_columns), -jnp.inf, logits.dtype)
    draft = _draft(draft_probs, draft_logits, draft_row_index, rows, sizes)
    limit = check_vocab_size(vocab_size, num_columns, draft)
    num_drafts = _num_draft_tokens(num_draft_tokens, sizes)
    position = jnp.arange(num_positions + 1, dtype=jnp.int32)[None]
    last_row = num_drafts if bonus_token_ids is None else num_drafts - 1
    in_vocab = (ids >= 0) & (ids < (num_columns if limit is None else limit.astype(ids.dtype)))
    in_vocab &= position[:, :-1] < num_drafts[:, None]
    params = check_sampling_params(temperature, top_k, top_p, min_p, num_requests)
    if params.temperature is None:
        if key is not None or noise is not None:
            raise ValueError("key and noise are for sampling: pass temperature as well, or neither")
        draft = None
    elif (key is None) == (noise is None):
        raise ValueError("temperature needs key= or noise=, and not both")
    if draft_temperature is not None and draft_logits is None:
        raise ValueError("draft_temperature divides draft_logits, which were not given")
    return Inputs(
        logits=logits,
        vocab_size=limit,
        row_index=jnp.clip(rows, 0, max(num_rows - 1, 0)).astype(jnp.int32),
        live=(position <= last_row[:, None]) & (rows >= 0) & (rows < num_rows),
        draft_token_ids=jnp.where(in_vocab, ids, 0).astype(jnp.int32),
        draft_in_vocab=in_vocab,
        num_draft_tokens=num_drafts,
        params=params,
        greedy=jnp.ones((num_requests,), bool) if params.temperature is None else is_greedy(params.temperature),
        draft=draft,
        draft_temperature=_per_request("draft_temperature", draft_temperature, sizes)
        if draft_temperature is not None
        else params.temperature,
        keys=None if key is None else _keys(key, num_requests),
        noise=None if noise is None else _noise(noise, sizes | {"V": num_columns}),
        bonus_token_ids=None
        if bonus_token_ids is None
        else _narrow(_integers("bonus_token_ids", bonus_token_ids, ("B",), sizes)),
    )


def _array(name: str, value: Any, axes: tuple[str, ...], sizes: dict[str, int]) -> Array:
    """`value` as an array, checked to have these axes; each axis with a size in `sizes` must have it."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array [{', '.join(axes)}], got {type(value).__name__}") from error
    wanted = [sizes.get(axis, size) for axis, size in zip(axes, array.shape, strict=False)]
    if array.ndim != len(axes) or list(array.shape) != wanted:
        known = ", ".join(f"{axis} = {sizes[axis]}" for axis in axes if axis in sizes)
        raise ValueError(
            f"{name} must have shape [{', '.join(axes)}]{f' with {known}' if known else ''}, got {list(array.shape)}"
        )
    return array


def _integers(name: str, value: Any, axes: tuple[str, ...], sizes: dict[str, int]) -> Array:
    if isinstance(value, int | list | tuple):
        value = np.asarray(value)
    if (
        isinstance(value, np.ndarray | np.integer)
        and np.issubdtype(value.dtype, np.integer)
        and value.dtype.itemsize > 4
    ):
        # jnp.asarray would wrap 2**32 + 5 to 5 without x64.
        value = np.clip(value, np.iinfo(np.int32).min, np.iinfo(np.int32).max)
    array = _array(name, value, axes, sizes)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be int32 (any integer dtype), got {array.dtype}")
    return array if array.dtype.itemsize >= 4 else array.astype(jnp.int32)


def _narrow(array: Array) -> Array:
    limits = jnp.iinfo(jnp.int32)
    if array.dtype != jnp.int32:
        low = array if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else jnp.maximum(array, limits.min)
        array = jnp.minimum(low, jnp.array(limits.max, array.dtype))
    # Strips a weak type as well, so that a Python int and an array do not compile twice.
    return lax.convert_element_type(array, jnp.int32)


def check_logits(name: str, value: Any, axes: tuple[str, ...]) -> Array:
    """`value` as float32, bfloat16 or float16 with these axes, the last of at least one column."""
    dtype = getattr(value, "dtype", None)
    if dtype is not None and str(dtype) not in _LOGIT_DTYPES:
        raise TypeError(f"{name} must be {', '.join(_LOGIT_DTYPES)}, got {dtype}; convert it with .astype(jnp.float32)")
    array = _array(name, value, axes, {})
    if str(array.dtype) not in _LOGIT_DTYPES:
        raise TypeError(f"{name} must be {', '.join(_LOGIT_DTYPES)}, got {array.dtype}")
    if array.shape[-1] == 0:
        raise ValueError(f"{name} must have a vocabulary of at least 1 column, got shape {list(array.shape)}")
    return array


def _draft(probs: Any, logits: Any, row_index: Any, target_rows: Array, sizes: dict[str, int]) -> DraftArray | None:
    if probs is None and logits is None:
        return None
    if probs is not None and logits is not None:
        raise ValueError("draft_probs and draft_logits exclude each other; pass the one the drafts were sampled from")
    name, value = ("draft_probs", probs) if logits is None else ("draft_logits", logits)
    values = check_logits(name, value, ("M", "Vd"))
    rows = target_rows[:, :-1] if row_index is None else _integers("draft_row_index", row_index, ("B", "K"), sizes)
    if values.shape[0] == 0:
        values = jnp.full((1, values.shape[1]), jnp.nan, values.dtype)
    rows = jnp.clip(rows, 0, values.shape[0] - 1).astype(jnp.int32)
    return DraftArray(values, rows, is_logits=logits is not None)


def check_vocab_size(vocab_size: Any, num_columns: int, draft: DraftArray | None = None) -> Array | None:
    """How many columns count, an int32 scalar; None when that is all of them in every array."""
    draft_columns = num_columns if draft is None else draft.values.shape[1]
    common = min(num_columns, draft_columns)
    if vocab_size is None:
        return None if num_columns == draft_columns else jnp.int32(common)
    if isinstance(vocab_size, bool | float):
        raise TypeError(f"vocab_size must be an int or an int32 scalar, got {vocab_size!r}")
    if isinstance(vocab_size, int | np.integer):
        if not 1 <= vocab_size <= num_columns:
            raise ValueError(f"vocab_size must be in [1, V] = [1, {num_columns}], got {vocab_size}")
        if vocab_size == num_columns == draft_columns:
            return None
    return _narrow(jnp.clip(_integers("vocab_size", vocab_size, (), {}), 0, common))


def _num_draft_tokens(value: Any, sizes: dict[str, int]) -> Array:
    if value is None:
        return jnp.full((sizes["B"],), sizes["K"], jnp.int32)
    return jnp.clip(_integers("num_draft_tokens", value, ("B",), sizes), 0, sizes["K"]).astype(jnp.int32)


def check_sampling_params(temperature: Any, top_k: Any, top_p: Any, min_p: Any, num_requests: int) -> SamplingParams:
    """The sampling parameters of `B` requests, scalars broadcast to `[B]`; see `fly_verify` for what is allowed."""
    sizes = {"B": num_requests}
    if temperature is None:
        for name, value in (("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
            if value is not None:
                raise ValueError(f"{name} is for sampling: pass temperature as well (0 for greedy requests)")
        return SamplingParams()
    if top_k is not None:
        top_k = _narrow(_integers("top_k", _broadcast(top_k, sizes), ("B",), sizes))
    return SamplingParams(
        temperature=_per_request("temperature", temperature, sizes),
        top_k=top_k,
        top_p=_per_request("top_p", top_p, sizes),
        min_p=_per_request("min_p", min_p, sizes),
    )


def _broadcast(value: Any, sizes: dict[str, int]) -> Any:
    """A scalar for all requests, as `[B]`."""
    return jnp.broadcast_to(jnp.asarray(value), (sizes["B"],)) if jnp.ndim(value) == 0 else value


def _per_request(name: str, value: Any, sizes: dict[str, int]) -> Array | None:
    if value is None:
        return None
    array = _array(name, _broadcast(value, sizes), ("B",), sizes)
    if not jnp.issubdtype(array.dtype, jnp.floating) and not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be float32, got {array.dtype}")
    return array.astype(jnp.float32)


def _keys(key: Any, num_requests: int) -> Array:
    if not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(f"key must be a jax.random key, or [B] of them, got {type(key).__name__}")
    return noise_lib.request_keys(jnp.asarray(key), num_requests)


def _noise(noise: Any, sizes: dict[str, int]) -> noise_lib.VerifyNoise | noise_lib.VllmV2Noise:
    if isinstance(noise, noise_lib.VllmV2Noise):
        words = sizes | {"2": 2}
        seed = _words("noise.seed", noise.seed, ("B", "2"), words)
        return noise_lib.VllmV2Noise(seed, _words("noise.position", noise.position, ("B", "K + 1", "2"), words))
    if not isinstance(noise, noise_lib.VerifyNoise):
        raise TypeError(f"noise must be VerifyNoise or VllmV2Noise, got {type(noise).__name__}")
    if (noise.final_uniform is None) == (noise.gumbel is None):
        raise ValueError("noise needs final_uniform [B, 2] or gumbel [B, V], and not both")
    uniform = _floats("noise.uniform", noise.uniform, ("B", "K"), sizes)
    if noise.gumbel is not None:
        return noise_lib.VerifyNoise(uniform, gumbel=_floats("noise.gumbel", noise.gumbel, ("B", "V"), sizes))
    final = _floats("noise.final_uniform", noise.final_uniform, ("B", "2"), sizes | {"2": 2})
    return noise_lib.VerifyNoise(uniform, final_uniform=final)


def _floats(name: str, value: Any, axes: tuple[str, ...], sizes: dict[str, int]) -> Array:
    array = _array(name, value, axes, sizes)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must be float32, got {array.dtype}")
    return array.astype(jnp.float32)


def _words(name: str, value: Any, axes: tuple[str, ...], sizes: dict[str, int]) -> Array:
    array = _array(name, value, axes, sizes)
    if array.dtype != jnp.uint32:
        raise TypeError(f"{name} must be uint32 (low and high words), got {array.dtype}")
    return array
