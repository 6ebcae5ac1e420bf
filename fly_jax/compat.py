"""The only place that knows jax's versions and private names."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])


def shape_like(array: Any, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An output's shape and dtype that varies over the mesh axes `array` varies over (inside `jax.shard_map`)."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(array).manual_axis_type)


def output_avals(function: Callable[..., Any], avals: Sequence[Any]) -> list[Any]:
    """The abstract values of what `function` returns for `avals`: shapes, dtypes and the mesh axes they vary over."""
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=aval.sharding, manual_axis_type=aval.manual_axis_type)
        for aval in avals
    ]
    return list(jax.make_jaxpr(function)(*arguments).out_avals)


TRITON_CALL = "__gpu$xla.gpu.triton"
"""The custom call a Pallas kernel becomes on GPUs."""


@contextlib.contextmanager
def lowering_without_device(platforms: Sequence[str]) -> Iterator[None]:
    """Inside, functions with GPU kernels can be lowered for `platforms` on a machine without a GPU.

    Since jax 0.11 Pallas asks for the device it is lowered for; an abstract one will do.
    """
    if JAX_VERSION < (0, 11) or not {"cuda", "rocm"} & set(platforms):
        yield
        return
    kind = "NVIDIA H100" if "cuda" in platforms else "gfx942"
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        yield


def lowered_quietly(name: str, function: Callable[..., Sequence[Any]]) -> Callable[..., list[Any]]:
    """`function` as a primitive whose lowering does not warn that Pallas's Triton lowering is deprecated.

    jax 0.11 and later warn each time such a kernel is lowered. There is nothing to migrate to: Mosaic GPU, which the
    warning names, neither serves ROCm nor any NVIDIA GPU before Hopper. The upper bound on jax is what protects users.

    Args:
      name: of the primitive.
      function: of arrays, with hashable keywords, to a sequence of arrays.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *avals, **params: output_avals(functools.partial(function, **params), avals))
    loud = mlir.lower_fun(function, multiple_results=True)

    def lower(*arguments: Any, **params: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
            return loud(*arguments, **params)

    mlir.register_lowering(primitive, lower)
    return primitive.bind


def triton_calls(lowered: jax.stages.Lowered) -> list[tuple[str, dict[str, Any]]]:
    """The Triton kernels that a lowered function calls: of each the IR as text, and the launch parameters."""
    from jax._src.pallas.triton.lowering import _new_ir_context
    from jaxlib.mlir import ir

    configs: list[dict[str, Any]] = []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            attributes = operation.attributes
            if attributes["call_target_name"].value == TRITON_CALL:
                configs.append({each.name: each.attr for each in attributes["mhlo.backend_config"]})
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir("stablehlo")
    module.operation.walk(visit)
    calls = []
    for config in configs:
        kernel = config.pop("ir")
        with _new_ir_context(), ir.Location.unknown():
            parsed = ir.Module.parse(getattr(kernel, "value_bytes", None) or kernel.value)
            text = str(parsed.operation.get_asm())
        calls.append((text, {name: each.value for name, each in config.items()}))
    return calls


def compiler_options(backend: str | None = None) -> dict[str, bool | int | str]:
    """Options for `jax.jit(fly_verify, compiler_options=...)` that make it faster on a backend.

    On CPU: vectors of 512 bits instead of 256, where the processor has them. Fast-math options were tried as well and
    gain nothing more. Options do not nest: they count on the outermost `jax.jit`.

    Args:
      backend: "cpu", "gpu" or "tpu" as `jax.default_backend()` names it, which is the default.

    Returns:
      The options; none where there is nothing to gain.
    """
    if (backend or jax.default_backend()) != "cpu":
        return {}
    return {"xla_cpu_prefer_vector_width": 512}


def num_programs(jitted: Any) -> int:
    """How many programs a function made by `jax.jit` has been compiled to."""
    return jitted._cache_size()


def gpu_is_initialised() -> bool:
    """Whether JAX has started a GPU in this process, so that its memory settings are taken; starts nothing."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized() and jax.default_backend() == "gpu"
