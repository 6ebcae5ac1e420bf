"""What `fly-jax bench verify` says beside its tables: the machine, what was left out, and one JSON document."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from fly_jax.bench import verify_cases
from fly_jax.bench.growth import Growth
from fly_jax.bench.verify import WITH_OPTIONS, Settings, VerifyBench
from fly_jax.compat import compiler_options


def notes(result: VerifyBench, growth: Growth | None, settings: Settings, left_out: Mapping[str, str]) -> list[str]:
    """The machine, what was left out, and what an interrupt cut off, a line each."""
    lines = [f"machine: {_machine_line()}"]
    lines += [f"left out: {name} ({reason})" for name, reason in left_out.items()]
    if not compiler_options():
        lines.append(f"left out: {WITH_OPTIONS} (compiler_options() has none for this backend)")
    lines += [f"left out: {each}" for each in (growth.left_out if growth is not None else [])]
    lines += [f"{peer.name}: {peer.definition}" for peer in settings.peers if result.cases]
    for each in (result, growth):
        if each is not None and each.interrupted is not None:
            lines.append(
                f"interrupted: the rounds of {each.interrupted} are lost, and what came after was not measured"
            )
    return lines


def document(
    result: VerifyBench, growth: Growth | None, settings: Settings, left_out: Mapping[str, str]
) -> dict[str, Any]:
    """Everything measured, with the machine and the settings, ready for `json.dumps`."""
    return {
        "machine": machine(),
        "clock": settings.clock,
        "rounds": settings.rounds,
        "min_sample_seconds": settings.min_seconds,
        "compiler_options": dict(compiler_options()),
        "num_draft_tokens": verify_cases.NUM_DRAFT_TOKENS,
        "window_size": verify_cases.WINDOW_SIZE,
        "temperature": verify_cases.TEMPERATURE,
        "peers": {peer.name: peer.definition for peer in settings.peers},
        "left_out": dict(left_out),
        **result.fields(),
        "growth": None if growth is None else growth.fields(),
    }


def machine() -> dict[str, Any]:
    """The processor, how many cores this process may use, the device and jax's version."""
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": _processor(),
        "cores": cores,
        "device": f"{device.platform} ({device.device_kind})",
        "jax": jax.__version__,
    }


def title() -> str:
    """One line for a plot."""
    return f"fly_verify over its floor: K={verify_cases.NUM_DRAFT_TOKENS}, float32; {_machine_line()}"


def _machine_line() -> str:
    each = machine()
    device = "" if each["device"].startswith("cpu") else f", {each['device']}"
    return f"{each['processor']}, {each['cores']} cores{device}, jax {each['jax']}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # only Linux has it
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
