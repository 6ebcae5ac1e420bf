"""The public operations, and which implementation each platform gets.

The choice is made when the function is lowered: one jaxpr, and one exported artifact, serve every platform.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from fly_jax import compat
from fly_jax.kernels import triton, xla
from fly_jax.kernels.statistics import RowOperands, RowStatistics

GPU_PLATFORMS = ("cuda", "rocm")
IMPLEMENTATIONS = ("xla", "triton")


@functools.partial(jax.jit, static_argnames=("k", "implementation", "interpret"))
def row_statistics(
    logits: Array,
    token_ids: Array | None = None,
    *,
    scale: Array | None = None,
    threshold: Array | None = None,
    vocab_size: Array | None = None,
    k: int = 3,
    implementation: str | None = None,
    interpret: bool = False,
) -> RowStatistics:
    """Argmax, maximum, softmax mass, largest values, entropy and a token's logit of each row of logits.

    On GPUs one kernel reads each logit once. Elsewhere XLA computes what is used of the result and nothing else.

    Args:
      logits: `[N, V]` float32, bfloat16 or float16.
      token_ids: `[N]` int32, the token of each row whose logit is wanted; clipped into the row.
      scale: `[N]` float32, one over the temperature, positive and finite; None is 1.
      threshold: `[N]` float32, at most the row's maximum: logits below it count as -inf, but are still looked at for
        NaN. None keeps all.
      vocab_size: int32 scalar or `[N]`: columns at or beyond it are not there. None is V.
      k: how many largest values the entropy is taken of, at least 1.
      implementation: None chooses by platform: "triton" on CUDA and ROCm for k up to 8, otherwise "xla".
      interpret: runs the Triton kernel as plain JAX on any platform, for tests.

    Returns:
      The statistics.

    Raises:
      TypeError: the logits are of another dtype.
      ValueError: shapes, k, or the implementation: unknown, or unable to do what is asked.
    """
    _check(logits, k, implementation, interpret)
    operands = _operands(logits, scale, threshold, vocab_size, token_ids)
    if implementation == "xla" or (implementation is None and k > triton.MAX_TOP_K):
        return xla.row_statistics(logits, operands, k=k)
    if interpret:
        return triton.row_statistics(logits, operands, k=k, platform="cuda", interpret=True)
    operation = _statistics if implementation is None else _triton_statistics
    return operation((logits, operands), k=k)


@functools.partial(jax.jit, static_argnames=("k",))
def entropies_at(
    statistics: RowStatistics,
    logits: Array,
    rows: Array,
    wanted: Array,
    *,
    scale: Array | None = None,
    threshold: Array | None = None,
    vocab_size: Array | None = None,
    k: int = 3,
) -> Array:
    """`statistics.entropy[rows]` where wanted, NaN elsewhere.

    Where the kernel has computed all of them these are looked up. Elsewhere each wanted one is computed here: few rows
    can be deferred, and without a scale (where nothing samples) the masses of the others are not needed.

    Args:
      statistics: of `logits`, under the same scale, threshold and vocab_size.
      logits: `[N, V]`.
      rows: `[R]` int32, in range.
      wanted: `[R]` bool.
      scale: `[N]` float32.
      threshold: `[N]` float32.
      vocab_size: int32 scalar or `[N]`.
      k: as for `statistics`.

    Returns:
      `[R]` float32, nats.
    """
    operands = _operands(logits, scale, threshold, vocab_size)
    # Where something samples, the mass of every row is needed anyway.
    log_mass = None if scale is None else statistics.log_mass
    if k > triton.MAX_TOP_K:
        return xla.entropies_at(logits, operands, rows, wanted, log_mass, k=k)
    return _entropies((statistics.entropy, logits, operands, rows, wanted, log_mass), k=k)


def _operands(
    logits: Array,
    scale: Array | None,
    threshold: Array | None,
    vocab_size: Array | None,
    token_ids: Array | None = None,
) -> RowOperands:
    num_rows = logits.shape[0]
    if vocab_size is not None:
        vocab_size = jnp.broadcast_to(vocab_size, (num_rows,))
    operands = RowOperands(token_ids, scale, threshold, vocab_size)
    for name, value in vars(operands).items():
        if value is not None and value.shape != (num_rows,):
            raise ValueError(f"{name} must be [N] = [{num_rows}], got shape {list(value.shape)}")
    return operands


def _check(logits: Array, k: int, implementation: str | None, interpret: bool) -> None:
    if logits.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"logits must be float32, bfloat16 or float16, got {logits.dtype}: convert them")
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits must be [N, V] with V at least 1, got shape {list(logits.shape)}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation must be None, 'xla' or 'triton', got {implementation!r}")
    if implementation == "triton" and k > triton.MAX_TOP_K:
        raise ValueError(
            f"implementation 'triton' holds at most {triton.MAX_TOP_K} largest values, got k = {k}: "
            "use implementation 'xla', or None to have it chosen"
        )
    if interpret and implementation != "triton":
        raise ValueError(f"interpret is for implementation 'triton', got {implementation!r}")


def _per_platform(
    name: str,
    default: Callable[..., Any],
    gpu: Callable[..., Any],
    flatten_batch: Callable[[Any, int], Any],
    *,
    elsewhere: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """An operation that is `gpu(*arguments, platform=)` on GPUs, and elsewhere `elsewhere`, which is `default` if None.

    `lax.platform_dependent` would do, but for exports to a GPU and the CPU together: it lowers every branch for every
    platform.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def on_leaves(function: Callable[..., Any], *leaves: Any, structure: Any, **params: Any) -> list[Array]:
        return jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves), **params))

    plain = functools.partial(on_leaves, default)
    lowered_elsewhere = functools.partial(on_leaves, elsewhere or default)
    primitive.def_impl(lowered_elsewhere)
    primitive.def_abstract_eval(lambda *avals, **params: compat.output_avals(functools.partial(plain, **params), avals))
    mlir.register_lowering(primitive, mlir.lower_fun(lowered_elsewhere, multiple_results=True))
    for platform in GPU_PLATFORMS:
        rule = functools.partial(on_leaves, functools.partial(gpu, platform=platform))
        mlir.register_lowering(primitive, mlir.lower_fun(rule, multiple_results=True), platform=platform)

    def batch(leaves: Sequence[Array], axes: Sequence[Any], *, structure: Any, k: int) -> tuple[list[Array], list[int]]:
        pairs = list(zip(leaves, axes, strict=True))
        size = next(leaf.shape[axis] for leaf, axis in pairs if axis is not None)
        stacked = [
            jnp.broadcast_to(leaf, (size, *leaf.shape)) if axis is None else jnp.moveaxis(leaf, axis, 0)
            for leaf, axis in pairs
        ]
        arguments = flatten_batch(jax.tree.unflatten(structure, stacked), size)
        results = primitive.bind(*jax.tree.leaves(arguments), structure=structure, k=k)
        return [each.reshape(size, -1, *each.shape[1:]) for each in results], [0] * len(results)

    batching.primitive_batchers[primitive] = batch

    def operation(arguments: Any, *, k: int) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        outputs = jax.tree.structure(jax.eval_shape(functools.partial(default, k=k), *arguments))
        return jax.tree.unflatten(outputs, primitive.bind(*leaves, structure=structure, k=k))

    return operation


def _more_rows(arguments: Any, size: int) -> Any:
    return jax.tree.map(lambda values: values.reshape(-1, *values.shape[2:]), arguments)


def _more_rows_and_indices(arguments: Any, size: int) -> Any:
    entropy, logits, operands, rows, *others = arguments
    first_row = jnp.arange(size, dtype=rows.dtype)[:, None] * logits.shape[1]
    return _more_rows((entropy, logits, operands, rows + first_row, *others), size)


def _refuse(logits: Array, operands: RowOperands, *, k: int) -> RowStatistics:
    raise ValueError(
        "implementation 'triton' runs on CUDA and ROCm, and this function is compiled for another platform: "
        "use implementation 'xla', None to have it chosen by platform, or interpret=True in tests"
    )


def _xla_entropies(entropy: Array, *others: Any, k: int) -> Array:
    return xla.entropies_at(*others, k=k)


def _gpu_entropies(
    entropy: Array, logits: Array, operands: RowOperands, rows: Array, wanted: Array, *others: Any, **params: Any
) -> Array:
    return jnp.where(wanted, entropy[rows], jnp.nan)


_statistics = _per_platform("fly_jax_row_statistics", xla.row_statistics, triton.row_statistics, _more_rows)
_triton_statistics = _per_platform(
    "fly_jax_triton_row_statistics", xla.row_statistics, triton.row_statistics, _more_rows, elsewhere=_refuse
)
_entropies = _per_platform("fly_jax_entropies_at", _xla_entropies, _gpu_entropies, _more_rows_and_indices)
