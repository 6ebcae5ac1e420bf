"""The vLLM plugin (entry point `vllm.general_plugins`): off unless `FLY_JAX_VLLM` is set.

vLLM runs `register` in every process of an engine, several times if it likes; JAX is imported only where a batch is
verified. An unknown version or a missing hook is an error that stops vLLM: a run that was asked to use JAX must not go
on without it.
"""

import importlib.metadata
import logging
import multiprocessing
import os
import sys
from typing import Any

from fly_jax.bridges.vllm import V1_MODULE, counting
from fly_jax.bridges.vllm import settings as settings_lib

# A child of vLLM's own logger, which is the only one that vLLM configures.
logger = logging.getLogger("vllm.fly_jax")

KNOWN_VERSIONS = ((0, 32), (0, 33))
"""Releases whose functions were compared with what is hooked here."""

FLY_SINCE = (0, 33)
"""From here on vLLM has FLy in its `speculative_config`."""


def register() -> None:
    """Hooks vLLM as `FLY_JAX_VLLM` says; does nothing where it is not set, or where it was done already.

    Raises:
      ValueError: a variable of the plugin is wrong.
      RuntimeError: this vLLM is not known, or lacks what is to be hooked.
    """
    settings = settings_lib.from_environment(os.environ)
    if settings is None:
        return
    version, text = _vllm_version()
    _check_fly_variables(settings, version, text)
    _share_the_gpu()
    _reach_ray_workers()
    # Here and not at the top: it imports torch, and the plugin is imported where it is not asked for, too.
    from fly_jax.bridges.vllm import hooks

    hooked = hooks.install(settings)
    # vLLM runs this in every process; one line is enough.
    if hooked and multiprocessing.parent_process() is None:
        what = {
            "replace": "decides in JAX",
            "crosscheck": "decides as always, JAX runs beside it",
            "record": "decides as always, a trace is recorded",
        }[settings.mode]
        logger.warning(
            "fly_jax %s: speculative verification of vLLM %s %s (hooked: %s). FLy itself is %s; it is lossy: where it "
            "is on, texts may differ from what the target alone would write.",
            importlib.metadata.version("fly-jax"),
            text,
            what,
            ", ".join(hooked),
            _fly_source(settings, version),
        )


def counters() -> dict[str, Any]:
    """What was verified so far in this process; in an engine of several processes it is the worker that counts.

    The same is written to `counters-PID.json` in `FLY_JAX_VLLM_FOLDER` every few seconds and at the end.
    """
    session = getattr(getattr(sys.modules.get(V1_MODULE), "rejection_sample", None), "fly_jax_session", None)
    counters = counting.Counters() if session is None else session.counters
    return counters.as_dict()


def _vllm_version() -> tuple[tuple[int, int], str]:
    import vllm  # here, since only an engine has it

    text = vllm.__version__
    parts = text.split(".")
    version = (int(parts[0]), int(parts[1])) if len(parts) > 1 and (parts[0] + parts[1]).isdigit() else (0, 0)
    if version not in KNOWN_VERSIONS:
        known = " and ".join(f"{major}.{minor}" for major, minor in KNOWN_VERSIONS)
        raise RuntimeError(
            f"FLY_JAX_VLLM is set, but fly_jax knows vLLM {known} only, and this is {text}: install one of those, or "
            "unset FLY_JAX_VLLM"
        )
    return version, text


def _check_fly_variables(settings: settings_lib.Settings, version: tuple[int, int], text: str) -> None:
    if not settings.fly:
        return
    name = next(iter(settings.fly))
    variable = f"FLY_JAX_{name.upper()}"
    if version >= FLY_SINCE:
        raise ValueError(f"{variable} is for vLLM before 0.33; vLLM {text} reads {name} from its speculative_config")
    if settings.mode != "replace":
        raise ValueError(
            f"{variable} needs FLY_JAX_VLLM=replace: with {settings.mode} vLLM decides, and vLLM {text} has no FLy"
        )


def _fly_source(settings: settings_lib.Settings, version: tuple[int, int]) -> str:
    if version >= FLY_SINCE:
        return "as the speculative_config says"
    return "on" if settings.fly.get("rejection_sample_method") == "fly" else "off"


def _reach_ray_workers() -> None:
    """vLLM copies to Ray's workers only variables that it knows, and those with these prefixes."""
    name, prefix = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", "FLY_JAX_"
    prefixes = [each for each in os.environ.get(name, "").split(",") if each]
    if prefix not in prefixes:
        os.environ[name] = ",".join([*prefixes, prefix])


def _share_the_gpu() -> None:
    """Keeps JAX from taking three quarters of a GPU's memory, which vLLM has taken already or is about to."""
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    given = os.environ.setdefault(name, "false")
    if given.lower() not in ("false", "0"):
        logger.warning("%s=%s lets JAX take most of a GPU's memory beside vLLM; set it to false", name, given)
    elif "jax" in sys.modules:
        from fly_jax import compat  # here, since it imports JAX

        if compat.gpu_is_initialised():
            logger.warning("JAX started before %s=false could be set: it may hold most of the GPU's memory", name)
