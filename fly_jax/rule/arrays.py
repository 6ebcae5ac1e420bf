"""What an argument must be to count as an array of integers, floats, words or logits with these axes."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

LOGIT_DTYPES = ("float32", "bfloat16", "float16")


def array_of(name: str, value: ArrayLike, axes: tuple[str, ...], sizes: dict[str, int]) -> Array:
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


def integers(name: str, value: ArrayLike, axes: tuple[str, ...], sizes: dict[str, int]) -> Array:
    """`value` as int32 or wider with these axes; ids beyond int32 stay out of range and are never wrapped into it."""
    if isinstance(value, int | list | tuple):
        value = np.asarray(value)
    if (
        isinstance(value, np.ndarray | np.integer)
        and np.issubdtype(value.dtype, np.integer)
        and value.dtype.itemsize > 4
    ):
        # jnp.asarray would wrap 2**32 + 5 to 5 without x64.
        value = np.clip(value, np.iinfo(np.int32).min, np.iinfo(np.int32).max)
    array = array_of(name, value, axes, sizes)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be int32 (any integer dtype), got {array.dtype}")
    return array if array.dtype.itemsize >= 4 else array.astype(jnp.int32)


def narrow(array: Array) -> Array:
    """Integers of any width as int32, clipped."""
    limits = jnp.iinfo(jnp.int32)
    if array.dtype != jnp.int32:
        low = array if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else jnp.maximum(array, limits.min)
        array = jnp.minimum(low, jnp.array(limits.max, array.dtype))
    # Strips a weak type as well, so that a Python int and an array do not compile twice.
    return lax.convert_element_type(array, jnp.int32)


def logits_of(name: str, value: ArrayLike, axes: tuple[str, ...]) -> Array:
    """`value` as float32, bfloat16 or float16 with these axes, the last of at least one column."""
    dtype = getattr(value, "dtype", None)
    if dtype is not None and str(dtype) not in LOGIT_DTYPES:
        raise TypeError(f"{name} must be {', '.join(LOGIT_DTYPES)}, got {dtype}; convert it with .astype(jnp.float32)")
    array = array_of(name, value, axes, {})
    if str(array.dtype) not in LOGIT_DTYPES:
        raise TypeError(f"{name} must be {', '.join(LOGIT_DTYPES)}, got {array.dtype}")
    if array.shape[-1] == 0:
        raise ValueError(f"{name} must have a vocabulary of at least 1 column, got shape {list(array.shape)}")
    return array


def for_each(value: ArrayLike, sizes: dict[str, int]) -> ArrayLike:
    """A scalar for all requests as `[B]`; anything else as it is."""
    return jnp.broadcast_to(jnp.asarray(value), (sizes["B"],)) if jnp.ndim(value) == 0 else value


def per_request(name: str, value: ArrayLike | None, sizes: dict[str, int]) -> Array | None:
    """A number for all requests, or one for each, as `[B]` float32; None stays None."""
    if value is None:
        return None
    array = array_of(name, for_each(value, sizes), ("B",), sizes)
    if not jnp.issubdtype(array.dtype, jnp.floating) and not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be float32, got {array.dtype}")
    return array.astype(jnp.float32)


def floats(name: str, value: ArrayLike, axes: tuple[str, ...], sizes: dict[str, int]) -> Array:
    """`value` as float32 with these axes."""
    array = array_of(name, value, axes, sizes)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must be float32, got {array.dtype}")
    return array.astype(jnp.float32)


def words(name: str, value: ArrayLike, axes: tuple[str, ...], sizes: dict[str, int]) -> Array:
    """`value` as uint32 with these axes."""
    array = array_of(name, value, axes, sizes)
    if array.dtype != jnp.uint32:
        raise TypeError(f"{name} must be uint32 (low and high words), got {array.dtype}")
    return array


def rank3(name: str, value: ArrayLike, positions: str) -> Array:
    """`value`, of any dtype, if it has three axes."""
    array: Any = value if hasattr(value, "shape") else jnp.asarray(value)
    if array.ndim != 3:
        raise ValueError(f"{name} must be [B, {positions}, V], got shape {list(array.shape)}")
    return array
