"""`fly_verify` as one portable artifact: lowered once, for several platforms, and run where there is no source.

The shapes, dtypes and static settings are those of the example arguments; lengths, temperatures, thresholds and keys
stay arguments. What is read back needs this module to be imported, since the results are its types.
"""

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax.typing import ArrayLike

from fly_jax import compat
from fly_jax.config import FlyConfig
from fly_jax.noise import VerifyNoise, VllmV2Noise
from fly_jax.verify import Verification, fly_verify

PLATFORMS = ("cpu", "cuda", "rocm")
"""What `export_verify` lowers for unless told otherwise; "tpu" is possible too."""

Argument: TypeAlias = ArrayLike | jax.ShapeDtypeStruct
"""An example argument: an array, or only its shape and dtype."""

_SUPPORTED = (*PLATFORMS, "tpu")
_MISSING = "Serialised artifacts need the flatbuffers package: pip install 'fly-jax[export]'"


def export_verify(
    target_logits: Argument, draft_token_ids: Argument, *, platforms: Sequence[str] = PLATFORMS, **arguments: Any
) -> jax.export.Exported:
    """Exports `fly_verify` for these arguments, with the Triton kernel for CUDA and ROCm and XLA elsewhere.

    The result is called as `exported.call(target_logits, draft_token_ids, **arguments)` with arguments of the same
    structure, shapes and dtypes, on any of the platforms; `exported.serialize()` gives bytes, `load_verify` reads them.
    Load them with the jaxlib that made them: jax does not promise the kernel's custom call across versions.

    Args:
      target_logits: `[B, K + 1, V]`, an array or a `jax.ShapeDtypeStruct`, as all that follow.
      draft_token_ids: `[B, K]` int32.
      platforms: of "cpu", "cuda", "rocm" and "tpu", at least one; or one name.
      **arguments: those of `fly_verify`. A `FlyConfig` whose threshold is a number takes a number at each call, one
        whose threshold is an array takes an array of that shape.

    Returns:
      The exported function.

    Raises:
      TypeError, ValueError: as `fly_verify`, or an unknown platform.
    """
    platforms = (platforms,) if isinstance(platforms, str) else platforms
    unknown = [platform for platform in platforms if platform not in _SUPPORTED]
    if unknown or not platforms:
        raise ValueError(f"platforms must be some of {list(_SUPPORTED)}, got {list(platforms)}")
    check = jax.export.DisabledSafetyCheck.custom_call(compat.TRITON_CALL)
    export = jax.export.export(jax.jit(fly_verify), platforms=list(platforms), disabled_checks=[check])
    with compat.lowering_without_device(platforms):
        return export(target_logits, draft_token_ids, **arguments)


def load_verify(artifact: bytes | bytearray) -> jax.export.Exported:
    """Reads what `export_verify(...).serialize()` gave.

    Args:
      artifact: the bytes.

    Returns:
      The exported function.

    Raises:
      ImportError: the flatbuffers package is not installed.
      ValueError: the bytes are no such artifact.
    """
    try:
        import flatbuffers  # noqa: F401
    except ImportError as error:
        raise ImportError(_MISSING) from error
    try:
        return jax.export.deserialize(bytearray(artifact))
    except Exception as error:
        raise ValueError(f"not an artifact of export_verify: {error}") from error


def _register() -> None:
    """Lets the package's types stand in a serialised artifact, under their public names."""
    for kind in (FlyConfig, VerifyNoise, VllmV2Noise, Verification):
        jax.export.register_pytree_node_serialization(
            kind,
            serialized_name=f"fly_jax.{kind.__name__}",
            serialize_auxdata=lambda static: json.dumps(static).encode(),
            deserialize_auxdata=lambda data: tuple(json.loads(data)),
        )


_register()
