"""The edge: everything the public functions are given is checked and brought to one form here, once, at trace time."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from fly_jax.config import FlyConfig
from fly_jax.noise import Noise, VerifyNoise, VllmV2Noise, request_keys
from fly_jax.rule import arrays
from fly_jax.rule.thresholds import RowParams, is_greedy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftArray:
    """A draft distribution as it was given.

    Attributes:
      values: `[M, Vd]`, probabilities or logits.
      row_index: `[B, K]` int32, in range.
      temperature: `[B]` float32, what logits are divided by; None where the values are probabilities.
    """

    values: Array
    row_index: Array
    temperature: Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """What only a batch has in which a request may sample.

    Attributes:
      params: `[B]` each.
      draft: the draft distribution; None where drafts are one-hot.
      keys: `[B]` keys to draw the noise from, or None.
      noise: the noise if it was given.
    """

    params: RowParams
    draft: DraftArray | None
    keys: Array | None = None
    noise: Noise | None = None

    @property
    def greedy(self) -> Array:
        """`[B]` bool: the request is greedy although others may sample."""
        return is_greedy(self.params.temperature)


@jax.tree_util.register_dataclass
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
      bonus_token_ids: `[B]` int32 or None.
      sampling: None when every request is greedy: the one place that says so.
    """

    logits: Array
    vocab_size: Array | None
    row_index: Array
    live: Array
    draft_token_ids: Array
    draft_in_vocab: Array
    num_draft_tokens: Array
    bonus_token_ids: Array | None
    sampling: Sampling | None

    @property
    def draft_rows(self) -> Array:
        """`[B, K]` int32: the target's row of each draft token."""
        return self.row_index[:, :-1]


class FlatRows(NamedTuple):
    """`[B, K + 1, V]` and `[B, K, Vd]` as rows, nothing copied, and which row is whose."""

    target_logits: Array
    row_index: Array
    draft_row_index: Array
    draft_probs: Array | None
    draft_logits: Array | None


def flatten(
    target_logits: ArrayLike,
    draft_token_ids: ArrayLike,
    *,
    draft_probs: ArrayLike | None = None,
    draft_logits: ArrayLike | None = None,
) -> FlatRows:
    """The arguments of `fly_verify` as those of `fly_verify_rows`.

    Raises:
      ValueError: the shapes do not fit each other.
    """
    logits = arrays.rank3("target_logits", target_logits, "K + 1")
    ids = np.shape(draft_token_ids)
    if len(ids) != 2 or logits.shape[:2] != (ids[0], ids[1] + 1):
        raise ValueError(
            f"target_logits must be [B, K + 1, V] and draft_token_ids [B, K], got {list(logits.shape)} and {list(ids)}"
        )
    num_requests, num_positions = ids

    def flat(name: str, value: ArrayLike | None) -> Array | None:
        if value is None:
            return None
        array = arrays.rank3(name, value, "K")
        if array.shape[:2] != (num_requests, num_positions):
            raise ValueError(
                f"{name} must be [B, K, Vd] with B = {num_requests}, K = {num_positions}, got {list(array.shape)}"
            )
        return array.reshape(num_requests * num_positions, array.shape[2])

    def rows(length: int) -> Array:
        return jnp.arange(num_requests * length, dtype=jnp.int32).reshape(num_requests, length)

    return FlatRows(
        logits.reshape(num_requests * (num_positions + 1), logits.shape[2]),
        rows(num_positions + 1),
        rows(num_positions),
        flat("draft_probs", draft_probs),
        flat("draft_logits", draft_logits),
    )


def inputs_of(
    target_logits: ArrayLike,
    row_index: ArrayLike,
    draft_token_ids: ArrayLike,
    *,
    draft_row_index: ArrayLike | None = None,
    bonus_token_ids: ArrayLike | None = None,
    num_draft_tokens: ArrayLike | None = None,
    draft_probs: ArrayLike | None = None,
    draft_logits: ArrayLike | None = None,
    temperature: ArrayLike | None = None,
    draft_temperature: ArrayLike | None = None,
    top_k: ArrayLike | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    vocab_size: ArrayLike | None = None,
) -> Inputs:
    """Checks the arguments of `fly_verify_rows` but its randomness, and converts them; see there for what they are.

    Raises:
      TypeError: a dtype or kind is wrong.
      ValueError: a shape or static value is wrong, or two arguments exclude each other.
    """
    ids = arrays.integers("draft_token_ids", draft_token_ids, ("B", "K"), {})
    num_requests, num_positions = ids.shape
    sizes = {"B": num_requests, "K": num_positions, "K + 1": num_positions + 1}
    logits = arrays.logits_of("target_logits", target_logits, ("N", "V"))
    num_rows, num_columns = logits.shape
    rows = arrays.integers("row_index", row_index, ("B", "K + 1"), sizes)
    if num_rows == 0:
        # Nothing is live: any row will do.
        logits = jnp.full((1, num_columns), -jnp.inf, logits.dtype)
    draft = _draft(draft_probs, draft_logits, draft_row_index, rows, sizes)
    limit = check_vocab_size(vocab_size, num_columns, num_columns if draft is None else draft.values.shape[1])
    num_drafts = _num_draft_tokens(num_draft_tokens, sizes)
    position = jnp.arange(num_positions + 1, dtype=jnp.int32)[None]
    last_row = num_drafts if bonus_token_ids is None else num_drafts - 1
    in_vocab = (ids >= 0) & (ids < (num_columns if limit is None else limit.astype(ids.dtype)))
    in_vocab &= position[:, :-1] < num_drafts[:, None]
    bonus = None if bonus_token_ids is None else arrays.integers("bonus_token_ids", bonus_token_ids, ("B",), sizes)
    params = check_sampling_params(temperature, top_k, top_p, min_p, num_requests)
    if draft_temperature is not None and draft_logits is None:
        raise ValueError("draft_temperature divides draft_logits, which were not given")
    given = arrays.per_request("draft_temperature", draft_temperature, sizes)
    if draft is not None and draft_logits is not None and params is not None:
        draft = dataclasses.replace(draft, temperature=params.temperature if given is None else given)
    return Inputs(
        logits=logits,
        vocab_size=limit,
        row_index=jnp.clip(rows, 0, max(num_rows - 1, 0)).astype(jnp.int32),
        live=(position <= last_row[:, None]) & (rows >= 0) & (rows < num_rows),
        draft_token_ids=jnp.where(in_vocab, ids, 0).astype(jnp.int32),
        draft_in_vocab=in_vocab,
        num_draft_tokens=num_drafts,
        bonus_token_ids=None if bonus is None else arrays.narrow(bonus),
        sampling=None if params is None else Sampling(params, draft),
    )


def with_randomness(inputs: Inputs, key: Array | None, noise: Noise | None) -> Inputs:
    """The inputs with what they draw from.

    Raises:
      TypeError: the key or the noise is of another kind or dtype.
      ValueError: of a shape that does not fit, missing, both there, or there though nothing samples.
    """
    if inputs.sampling is None:
        if key is not None or noise is not None:
            raise ValueError("key and noise are for sampling: pass temperature as well, or neither")
        return inputs
    if (key is None) == (noise is None):
        raise ValueError("temperature needs key= or noise=, and not both")
    num_requests, num_positions = inputs.draft_token_ids.shape
    sizes = {"B": num_requests, "K": num_positions, "K + 1": num_positions + 1, "V": inputs.logits.shape[1], "2": 2}
    sampling = dataclasses.replace(
        inputs.sampling,
        keys=None if key is None else _keys(key, num_requests),
        noise=None if noise is None else _noise(noise, sizes),
    )
    return dataclasses.replace(inputs, sampling=sampling)


def check_kind(config: FlyConfig | None) -> None:
    """Refuses what are no settings of FLy.

    Raises:
      TypeError: it is neither a `FlyConfig` nor None.
    """
    if config is not None and not isinstance(config, FlyConfig):
        raise TypeError(f"config must be a FlyConfig, or None for standard verification, got {type(config).__name__}")


def check_threshold(config: FlyConfig | None, num_requests: int) -> None:
    """Checks FLy's threshold against the batch it is for.

    Raises:
      TypeError: its dtype is wrong.
      ValueError: its shape is wrong.
    """
    if config is None:
        return
    threshold = config.entropy_threshold
    if isinstance(threshold, float):
        return
    dtype, shape = getattr(threshold, "dtype", None), getattr(threshold, "shape", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        given = threshold if dtype is None else dtype
        raise TypeError(f"entropy_threshold must be a number of nats or a [B] float array, got {given}")
    if shape not in ((), (num_requests,)):
        raise ValueError(f"entropy_threshold must be a number or [B] = [{num_requests}], got shape {list(shape or ())}")


def check_positions(target_logits: ArrayLike, shape: tuple[int, ...]) -> Array:
    """`target_logits` `[B, K + 1, V]`, of the `[B, K + 1]` of a verification's tokens."""
    given = jnp.shape(target_logits)
    if len(given) != 3 or given[:2] != shape:
        raise ValueError(f"target_logits must be [B, K + 1, V] with [B, K + 1] = {list(shape)}, got {list(given)}")
    return arrays.logits_of("target_logits", target_logits, ("B", "K + 1", "V"))


def _draft(
    probs: ArrayLike | None,
    logits: ArrayLike | None,
    row_index: ArrayLike | None,
    target_rows: Array,
    sizes: dict[str, int],
) -> DraftArray | None:
    if probs is not None and logits is not None:
        raise ValueError("draft_probs and draft_logits exclude each other; pass the one the drafts were sampled from")
    name, value = ("draft_probs", probs) if logits is None else ("draft_logits", logits)
    if value is None:
        return None
    values = arrays.logits_of(name, value, ("M", "Vd"))
    rows = (
        target_rows[:, :-1] if row_index is None else arrays.integers("draft_row_index", row_index, ("B", "K"), sizes)
    )
    if values.shape[0] == 0:
        values = jnp.full((1, values.shape[1]), jnp.nan, values.dtype)
    return DraftArray(values, jnp.clip(rows, 0, values.shape[0] - 1).astype(jnp.int32), None)


def check_vocab_size(vocab_size: ArrayLike | None, num_columns: int, draft_columns: int) -> Array | None:
    """How many columns count, an int32 scalar; None when that is all of them in the target's and the draft's rows."""
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
    return arrays.narrow(jnp.clip(arrays.integers("vocab_size", vocab_size, (), {}), 0, common))


def _num_draft_tokens(value: ArrayLike | None, sizes: dict[str, int]) -> Array:
    if value is None:
        return jnp.full((sizes["B"],), sizes["K"], jnp.int32)
    return jnp.clip(arrays.integers("num_draft_tokens", value, ("B",), sizes), 0, sizes["K"]).astype(jnp.int32)


def check_sampling_params(
    temperature: ArrayLike | None,
    top_k: ArrayLike | None,
    top_p: ArrayLike | None,
    min_p: ArrayLike | None,
    num_requests: int,
) -> RowParams | None:
    """The sampling parameters of `B` requests, scalars broadcast to `[B]`; None without a temperature: all are greedy.

    See `fly_verify` for what is allowed.
    """
    sizes = {"B": num_requests}
    per_request = arrays.per_request("temperature", temperature, sizes)
    if per_request is None:
        for name, value in (("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
            if value is not None:
                raise ValueError(f"{name} is for sampling: pass temperature as well (0 for greedy requests)")
        return None
    return RowParams(
        temperature=per_request,
        top_k=None if top_k is None else _top_k(top_k, sizes),
        top_p=arrays.per_request("top_p", top_p, sizes),
        min_p=arrays.per_request("min_p", min_p, sizes),
    )


def _top_k(top_k: ArrayLike, sizes: dict[str, int]) -> Array:
    return arrays.narrow(arrays.integers("top_k", arrays.for_each(top_k, sizes), ("B",), sizes))


def _keys(key: Array, num_requests: int) -> Array:
    if not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(f"key must be a jax.random key, or [B] of them, got {type(key).__name__}")
    return request_keys(jnp.asarray(key), num_requests)


def _noise(noise: Noise, sizes: dict[str, int]) -> Noise:
    if isinstance(noise, VllmV2Noise):
        seed = arrays.words("noise.seed", noise.seed, ("B", "2"), sizes)
        return VllmV2Noise(seed, arrays.words("noise.position", noise.position, ("B", "K + 1", "2"), sizes))
    if not isinstance(noise, VerifyNoise):
        raise TypeError(f"noise must be VerifyNoise or VllmV2Noise, got {type(noise).__name__}")
    if (noise.final_uniform is None) == (noise.gumbel is None):
        raise ValueError("noise needs final_uniform [B, 2] or gumbel [B, V], and not both")
    uniform = arrays.floats("noise.uniform", noise.uniform, ("B", "K"), sizes)
    final_uniform, gumbel = noise.final_uniform, noise.gumbel
    if final_uniform is not None:
        final_uniform = arrays.floats("noise.final_uniform", final_uniform, ("B", "2"), sizes)
    if gumbel is not None:
        gumbel = arrays.floats("noise.gumbel", gumbel, ("B", "V"), sizes)
    return VerifyNoise(uniform, final_uniform, gumbel)
