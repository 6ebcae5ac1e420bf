"""torch to JAX and back, for what a sampler passes: without a copy where the layout allows, never a wrong value.

Only the DLPack protocol is used, on the objects themselves (`jax.dlpack.from_dlpack`, `torch.from_dlpack`). It makes
JAX wait for torch's current stream and torch's current stream wait for JAX: call these functions under the stream that
the tensor is computed on, or used on.
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils import dlpack as torch_dlpack

_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)
# XLA's own on the CPU; on GPUs it vectorises on the assumption of 16, which DLPack does not check.
_ALIGNMENT = 64


def to_jax(tensor: torch.Tensor, *, name: str = "tensor", round_up: bool = False) -> jax.Array:
    """A tensor as a JAX array on the same device: the same memory, or one copy made by torch.

    The memory is shared (`shares_memory` tells) if the tensor is contiguous and 64-byte aligned and keeps its dtype.
    A shared array changes when the tensor is written to: write only after `jax.block_until_ready` of all that was
    computed from it, or pass `tensor.clone()`. Do not donate a shared array. The memory lives as long as the array.

    One copy is made of a strided, sliced, transposed, expanded, negated (a view bit), misaligned or pinned tensor, and
    of one that is narrowed because x64 is off: int64 and uint64 to int32, float64 to float32. Narrowing waits for an
    accelerator once to check the values, except under `round_up`.

    Args:
      tensor: any shape; bool, integers, float16, bfloat16, float32 or float64. Gradients are not followed.
      name: what error messages call it.
      round_up: float64 that is narrowed becomes the next float32 at or above it, as uniforms must: `ratio >= u` with a
        float32 ratio then decides the same.

    Raises:
      TypeError: not a dense tensor of one of these dtypes.
      ValueError: without x64, an integer is outside int32 or, unless `round_up`, a float64 is not a float32; or the
        tensor has no memory (meta, fake, freed).
      RuntimeError: JAX cannot use the tensor's device.
    """
    tensor = narrow(tensor, name=name, round_up=round_up).contiguous()
    # DLPack calls pinned memory a GPU's. JAX copies misaligned memory by itself, but after it has returned.
    if tensor.data_ptr() % _ALIGNMENT or (tensor.device.type == "cpu" and tensor.is_pinned()):
        tensor = tensor.clone()
    # torch only exports from its current GPU.
    with torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext():
        return jax.dlpack.from_dlpack(tensor)


def narrow(tensor: torch.Tensor, *, name: str = "tensor", round_up: bool = False) -> torch.Tensor:
    """A tensor without its gradient and in a dtype that JAX keeps: what `to_jax` does to its values, and its errors."""
    _check_tensor(tensor, name)
    tensor = tensor.detach().resolve_neg()
    if jax.dtypes.canonicalize_dtype("int64") == "int32":
        if tensor.dtype in (torch.int64, torch.uint64):
            return _narrow_integers(tensor, name)
        if tensor.dtype == torch.float64:
            return _round_up(tensor) if round_up else _narrow_floats(tensor, name)
    return tensor


def to_torch(array: jax.Array, *, copy: bool = True) -> torch.Tensor:
    """A JAX array as a tensor on the same device.

    By default it is a row-major copy that torch makes once the array is ready: writing to it never reaches JAX, and on
    a GPU this waits for the copy, so that JAX may reuse the array's buffer from then on.

    Args:
      array: any shape; bool, integers, float16, bfloat16, float32 or float64; on one device.
      copy: False to share the memory. Such a tensor is read only, which torch cannot enforce: a write would change the
        array. The array must not be donated, and on a GPU both must be kept until torch has finished with the tensor.

    Raises:
      TypeError: not an array, a tracer, typed PRNG keys, or another dtype.
      ValueError: the array was deleted or donated, or is on several devices.
      RuntimeError: torch cannot use the array's device.
    """
    _check_array(array)
    (device,) = array.devices()
    on_host = device.platform == "cpu" or array.sharding.memory_kind == "pinned_host"
    if on_host:
        # The host has no stream that torch could wait on.
        array.block_until_ready()
    elif device.platform != "gpu" or not torch.cuda.is_available():
        raise RuntimeError(
            f"array is on {device}, which torch {torch.__version__} cannot use; allowed are CPUs, and CUDA or ROCm GPUs"
            " with a torch built for them: install that, or pass jax.device_put(array, jax.devices('cpu')[0])"
        )
    tensor = torch_dlpack.from_dlpack(array)
    if not copy:
        return tensor
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    if tensor.is_cuda:
        # JAX does not know of torch's reads: an array dropped now could have its buffer reused under the copy.
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor


def shares_memory(tensor: torch.Tensor, array: jax.Array) -> bool:
    """Whether both start at the same memory, so that no copy was made; False if either is empty."""
    _check_array(array)
    return tensor.numel() > 0 and array.size > 0 and _pointer(tensor) == array.unsafe_buffer_pointer()


def round_up(tensor: torch.Tensor) -> torch.Tensor:
    """float64 to the next float32 at or above it: `ratio >= u` with a float32 ratio stays what it was.

    Args:
      tensor: float64, any shape; float32 passes unchanged.

    Raises:
      TypeError: another dtype.
    """
    if tensor.dtype == torch.float32:
        return tensor
    if tensor.dtype != torch.float64:
        raise TypeError(f"round_up takes float64 or float32, got {tensor.dtype}; convert it with tensor.double()")
    nearest = tensor.float()
    above = torch.nextafter(nearest, torch.full_like(nearest, torch.inf))
    return torch.where(nearest.double() < tensor, above, nearest)


# to_jax has a flag of that name.
_round_up = round_up


def _check_tensor(tensor: Any, name: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}; pass torch.as_tensor({name})")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise TypeError(f"{name} must be a dense (torch.strided) tensor, got {kind}; convert it, as with .to_dense()")
    if tensor.is_quantized or str(tensor.dtype).removeprefix("torch.") not in _DTYPES:
        raise TypeError(
            f"{name} must be {', '.join(_DTYPES)}, got {tensor.dtype}; convert it, as with .dequantize() or .float()"
        )
    if not tensor.is_meta:
        _check_device(tensor.device, name)
    if tensor.is_meta or (tensor.numel() > 0 and _pointer(tensor) == 0):
        raise ValueError(
            f"{name} must have memory of its own, got a {type(tensor).__name__} on {tensor.device} without any (meta,"
            " fake, freed, or a wrapper); pass the plain tensor that holds the values"
        )


def _check_device(device: torch.device, name: str) -> None:
    platforms = {"cpu": "cpu", "cuda": "rocm" if torch.version.hip else "cuda"}
    if device.type not in platforms:
        raise RuntimeError(
            f"{name} is on torch device {device}, for which JAX has no backend to share memory with; allowed are cpu"
            f" and cuda (CUDA or ROCm): pass {name}.cpu()"
        )
    platform = platforms[device.type]
    try:
        devices = jax.local_devices(backend=platform)
    except RuntimeError:
        devices = []
    if not any(device.type == "cpu" or device.index == other.local_hardware_id for other in devices):
        raise RuntimeError(
            f"{name} is on torch device {device}, but JAX has {devices or 'nothing'} on its backend {platform!r}:"
            f" install jax with that backend (`pip install 'jax[{platform}]'`), let JAX_PLATFORMS and the visible"
            f" devices include it, or pass a tensor on a device that JAX has, as with {name}.cpu()"
        )


def _check_array(array: Any) -> None:
    if not isinstance(array, jax.Array):
        raise TypeError(f"array must be a jax.Array, got {type(array).__name__}; pass jnp.asarray(array)")
    if isinstance(array, jax.core.Tracer):
        raise TypeError(f"array must have values, got the tracer {array}; call this outside jax.jit, vmap and grad")
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(f"array must be {', '.join(_DTYPES)}, got {array.dtype}; pass jax.random.key_data(array)")
    if str(array.dtype) not in _DTYPES:
        raise TypeError(f"array must be {', '.join(_DTYPES)}, got {array.dtype}; convert it with .astype(jnp.float32)")
    if array.is_deleted():
        raise ValueError(f"array {array.dtype}{list(array.shape)} was deleted or donated; pass one that is still alive")
    if len(array.devices()) > 1:
        raise ValueError(
            f"array must be on one device, got {len(array.devices())} ({array.sharding}); pass"
            " jax.device_put(array, jax.devices()[0])"
        )


def _pointer(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # Wrappers without storage, as under torch.func.vmap.
        return 0


def _narrow_integers(tensor: torch.Tensor, name: str) -> torch.Tensor:
    limits = torch.iinfo(torch.int32)
    unsigned = tensor.dtype == torch.uint64
    # torch compares no uint64; as int64, its upper half is negative.
    wide = tensor.view(torch.int64) if unsigned else tensor
    if wide.numel() > 0:
        low, high = torch.stack(torch.aminmax(wide)).tolist()
        if low < (0 if unsigned else limits.min) or high > limits.max:
            value = high if high > limits.max else low % 2**64 if unsigned else low
            raise ValueError(
                f"{name} must be in [{limits.min}, {limits.max}] (int32) while jax_enable_x64 is off, got {value}; mask"
                " such ids before, or turn jax_enable_x64 on"
            )
    return wide.to(torch.int32, memory_format=torch.contiguous_format)


def _narrow_floats(tensor: torch.Tensor, name: str) -> torch.Tensor:
    narrow = tensor.to(torch.float32, memory_format=torch.contiguous_format)
    lost = (narrow.double() != tensor) & ~tensor.isnan()
    if lost.any():
        raise ValueError(
            f"{name} must hold float32 values while jax_enable_x64 is off, got the float64 {tensor[lost][0].item()!r};"
            f" pass round_up=True if these are uniforms, {name}.float() to round to nearest, or turn jax_enable_x64 on"
        )
    return narrow
