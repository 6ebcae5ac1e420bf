"""FLy verification for speculative decoding, as one pure JAX function."""

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
