"""The plugin's environment variables, read and checked in one place; imports neither torch nor JAX."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MODES = ("replace", "crosscheck", "record")
DEFAULT_FOLDER = "fly_jax_vllm"
DEFAULT_RECORDS = 8
DEFAULT_RECORD_ROWS = 1_000_000

# FLy before vLLM 0.33, which has fields of the same names in its speculative_config. They are those of
# `FlyConfig.vllm_names`, spelled again since that imports JAX; a test compares them.
_FLY_FIELDS: dict[str, Callable[[str], Any]] = {
    "rejection_sample_method": str,
    "fly_window_size": int,
    "fly_entropy_threshold": float,
    "fly_entropy_top_k": int,
}
_PREFIX = "FLY_JAX_"
_OWN = ("FLY_JAX_VLLM", "FLY_JAX_VLLM_FOLDER", "FLY_JAX_VLLM_RECORDS", "FLY_JAX_VLLM_RECORD_ROWS")
_OTHERS = ("FLY_JAX_CACHE", "FLY_JAX_TEST", "FLY_JAX_VLLM_SOURCE")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the plugin was told.

    Attributes:
      mode: "replace", "crosscheck" or "record".
      fly: the fields of vLLM 0.33's `speculative_config` that were given as variables, for a vLLM that has none.
      folder: where counters and recorded mismatches go.
      records: how many steps with a mismatch are written, at most.
      record_rows: how many draft tokens are recorded, at most.
    """

    mode: str
    fly: Mapping[str, Any]
    folder: Path
    records: int
    record_rows: int


def from_environment(environment: Mapping[str, str]) -> Settings | None:
    """The settings, or None where `FLY_JAX_VLLM` is not set, or empty: the plugin is off.

    Raises:
      ValueError: a variable has a value that is not allowed, has no effect, or is one of ours misspelt.
    """
    variables = {_PREFIX + name.upper(): name for name in _FLY_FIELDS}
    known = {*_OWN, *variables}
    for name in environment:
        if name.startswith(_PREFIX) and not name.startswith(_OTHERS) and name not in known:
            raise ValueError(f"{name} is not a variable of fly_jax's plugin; there are {', '.join(sorted(known))}")
    mode = environment.get("FLY_JAX_VLLM", "")
    if not mode:
        given = next((name for name in variables if environment.get(name)), None)
        if given is not None:
            raise ValueError(f"{given} has no effect without FLY_JAX_VLLM=replace: set that as well, or unset it")
        return None
    if mode not in MODES:
        modes = f"{', '.join(MODES[:-1])} or {MODES[-1]}"
        raise ValueError(f"FLY_JAX_VLLM must be {modes}, or not set to leave vLLM alone, got {mode!r}")
    fly = {
        name: _parse(variable, environment[variable], _FLY_FIELDS[name])
        for variable, name in variables.items()
        if environment.get(variable)
    }
    if fly and "rejection_sample_method" not in fly:
        variable = next(each for each, name in variables.items() if name in fly)
        raise ValueError(f"{variable} has no effect without FLY_JAX_REJECTION_SAMPLE_METHOD=fly: set that as well")
    records = _count(environment, "FLY_JAX_VLLM_RECORDS", DEFAULT_RECORDS, least=0)
    record_rows = _count(environment, "FLY_JAX_VLLM_RECORD_ROWS", DEFAULT_RECORD_ROWS, least=1)
    folder = Path(environment.get("FLY_JAX_VLLM_FOLDER") or DEFAULT_FOLDER).absolute()
    return Settings(mode, fly, folder, records, record_rows)


def _count(environment: Mapping[str, str], variable: str, default: int, *, least: int) -> int:
    value = _parse(variable, environment.get(variable) or str(default), int)
    if value < least:
        raise ValueError(f"{variable} must be at least {least}, got {value}")
    return value


def _parse(variable: str, text: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(text)
    except ValueError:
        wanted = {int: "an integer", float: "a number"}.get(kind, "text")  # type: ignore[call-overload]
        raise ValueError(f"{variable} must be {wanted}, got {text!r}") from None
