"""The GPU that tests marked `gpu` run on; `scripts/gpu_check.sh --rehearse` runs them without one."""

import os

import jax

IS_REHEARSAL = bool(os.environ.get("FLY_JAX_REHEARSE_GPU"))


def gpu_platform():
    """ "cuda" or "rocm"; where there is no GPU, JAX's error."""
    device = jax.devices("gpu")[0]
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
