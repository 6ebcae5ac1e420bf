"""FLy verification for speculative decoding, as one pure JAX function."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fly_jax.compat import compiler_options
    from fly_jax.config import FlyConfig
    from fly_jax.logprobs import emitted_logprobs
    from fly_jax.noise import VerifyNoise, VllmV2Noise
    from fly_jax.verify import Verification, fly_verify, fly_verify_rows

__all__ = [
    "FlyConfig",
    "Verification",
    "VerifyNoise",
    "VllmV2Noise",
    "compiler_options",
    "emitted_logprobs",
    "fly_verify",
    "fly_verify_rows",
]

# Looked up on first use: the vLLM plugin is imported in every process of an engine, and JAX must not be.
_MODULES = {
    "FlyConfig": "config",
    "Verification": "verify",
    "VerifyNoise": "noise",
    "VllmV2Noise": "noise",
    "compiler_options": "compat",
    "emitted_logprobs": "logprobs",
    "fly_verify": "verify",
    "fly_verify_rows": "verify",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
