"""FLy verification for speculative decoding, as one pure JAX function."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fly_jax.compat import compiler_options as compiler_options
    from fly_jax.config import FlyConfig as FlyConfig
    from fly_jax.config import SamplingParams as SamplingParams
    from fly_jax.decode.sampling import draft_token as draft_token
    from fly_jax.logprobs import emitted_logprobs as emitted_logprobs
    from fly_jax.metrics import AcceptanceCounts as AcceptanceCounts
    from fly_jax.noise import VerifyNoise as VerifyNoise
    from fly_jax.noise import VllmV2Noise as VllmV2Noise
    from fly_jax.noise import draft_keys as draft_keys
    from fly_jax.noise import request_keys as request_keys
    from fly_jax.verify import Verification as Verification
    from fly_jax.verify import fly_verify as fly_verify
    from fly_jax.verify import fly_verify_rows as fly_verify_rows

    __version__: str

# Looked up on first use: the vLLM plugin is imported in every process of an engine, and JAX must not be.
_MODULES = {
    "AcceptanceCounts": "metrics",
    "FlyConfig": "config",
    "SamplingParams": "config",
    "Verification": "verify",
    "VerifyNoise": "noise",
    "VllmV2Noise": "noise",
    "compiler_options": "compat",
    "draft_keys": "noise",
    "draft_token": "decode.sampling",
    "emitted_logprobs": "logprobs",
    "fly_verify": "verify",
    "fly_verify_rows": "verify",
    "request_keys": "noise",
}

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # Here: reading it takes time that only who asks should spend.
        from importlib.metadata import PackageNotFoundError, version

        try:
            value: Any = version("fly-jax")
        except PackageNotFoundError:
            value = "unknown"  # run from a folder that was never installed
    elif name in _MODULES:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
