"""Checks fly_jax on the GPU of this machine, step by step, and writes what was found to one JSON file.

Each step is a process with a time limit of its own, so that neither a failure nor a hang stops the next. Nothing is
installed or downloaded: a step whose packages are missing is reported as not run, and then not all is right.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOTAL_SECONDS = 465  # of the 8 minutes; the rest is for Python to start and for a step to be ended
ALL_RIGHT, FELL_SHORT, CANNOT_RUN = 0, 1, 2
REHEARSAL = "FLY_JAX_REHEARSE_GPU"  # read by tests/on_gpu.py

PROBE = """
import importlib.util, json, jax, jaxlib
gpus = [each for each in jax.devices() if each.platform == "gpu"]
version = jax.devices()[0].client.platform_version
names = ("pytest", "hypothesis", "chex", "flax", "torch")
print(json.dumps({
    "jax": jax.__version__,
    "jaxlib": jaxlib.__version__,
    "gpus": [each.device_kind for each in gpus],
    "platform": ("rocm" if "rocm" in version.lower() else "cuda") if gpus else "cpu",
    "platform_version": version,
    "missing": [name for name in names if importlib.util.find_spec(name) is None],
}))
"""

# Only the tests count here: neither which plugins pytest finds on the machine, nor what other packages warn of there.
PYTEST = ("-m", "pytest", "-v", "-ra", "-o", "addopts=", "-o", "filterwarnings=default", "-p", "no:cacheprovider")
PYTEST_NEEDS = ("pytest", "hypothesis", "chex")


@dataclasses.dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
      name: for people and for --only.
      seconds: its limit.
      needs: modules that must be there.
      tests: what pytest is given; empty where this file measures.
      rehearsed: what pytest is given in a rehearsal: less of the same files.
    """

    name: str
    seconds: int
    needs: tuple[str, ...]
    tests: tuple[str, ...] = ()
    rehearsed: tuple[str, ...] = ()


# What a benchmark has not measured when its time is over it leaves out; a test would be lost. So these come first.
STEPS = (
    Step(
        "dlpack",
        60,
        (*PYTEST_NEEDS, "torch"),
        ("-m", "gpu", "tests/bridges/test_dlpack.py"),
        ("-m", "gpu", "tests/bridges/test_dlpack.py"),
    ),
    Step(
        "kernels",
        140,
        PYTEST_NEEDS,
        ("-m", "gpu", "tests/test_kernels_triton.py"),
        ("-m", "gpu", "-k", "no_rows or large_values or row_before or vmap", "tests/test_kernels_triton.py"),
    ),
    Step(
        "operations",
        90,
        PYTEST_NEEDS,
        ("-m", "not slow", "tests/test_kernels.py"),
        ("-m", "not slow", "-k", "division or zeros_of_both_signs", "tests/test_kernels.py"),
    ),
    Step(
        "golden",
        150,
        PYTEST_NEEDS,
        ("-m", "not slow", "tests/test_golden.py"),
        ("-m", "not slow", "-k", "reference_matches or bonus_token", "tests/test_golden.py"),
    ),
    Step("bench kernels", 110, ("flax",)),
    Step("bench verify", 90, ("flax",)),
)


def main() -> int:
    """Runs the steps and returns the exit status."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="the same steps on the CPU, with little in each")
    parser.add_argument("--only", action="append", choices=[each.name for each in STEPS], help="may be repeated")
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"), help="what is written (%(default)s)")
    parser.add_argument("--seconds", type=int, default=TOTAL_SECONDS, help="for all of it (%(default)s)")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.output, options.seconds, rehearse=options.rehearse)
        return ALL_RIGHT
    begin = time.monotonic()
    try:
        machine = probe(rehearse=options.rehearse)
    except RuntimeError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return CANNOT_RUN
    print(
        f"{', '.join(machine['gpus']) or 'a rehearsal without a GPU'}; Python {machine['python']}, jax {machine['jax']}"
    )
    steps = []
    for step in STEPS:
        if options.only and step.name not in options.only:
            continue
        left = options.seconds - (time.monotonic() - begin)
        result = run_step(step, machine, min(step.seconds, left), rehearse=options.rehearse)
        print(f"{result['status']:9} {step.name}: {result['seconds']:.0f} s{summary(result)}", flush=True)
        steps.append(result)
    fell_short = [f"{each['name']}: {line}" for each in steps for line in each["fell_short"]]
    write_whole(
        options.output,
        {
            "rehearsal": options.rehearse,
            "machine": machine,
            "seconds": round(time.monotonic() - begin, 1),
            "all_right": not fell_short,
            "fell_short": fell_short,
            "steps": steps,
        },
    )
    for line in fell_short:
        print(f"fell short: {line}")
    print(f"{'all right' if not fell_short else f'{len(fell_short)} fell short'}; written to {options.output}")
    return FELL_SHORT if fell_short else ALL_RIGHT


def probe(*, rehearse: bool) -> dict[str, Any]:
    """What there is, asked of another process, since JAX takes a GPU for as long as a process lives.

    Raises:
      RuntimeError: the checks cannot run, and why.
    """
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment.pop("JAX_PLATFORMS", None)  # a machine's choice of the CPU would hide its GPU
    if rehearse:
        environment["JAX_PLATFORMS"] = "cpu"
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=90, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError("JAX did not start within 90 s") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"JAX does not start with {sys.executable}: {last}; set PYTHON to one that has jax")
    machine: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not machine["gpus"] and not rehearse:
        raise RuntimeError(
            f"there is no GPU that jax {machine['jax']} of {sys.executable} can use; --rehearse takes the CPU instead"
        )
    return {"python": platform.python_version(), "platform_release": platform.platform(), **machine}


def run_step(step: Step, machine: Mapping[str, Any], seconds: float, *, rehearse: bool) -> dict[str, Any]:
    """Runs one step: `status` is passed, failed, timed out or not run, and `fell_short` says why in lines."""
    result: dict[str, Any] = {"name": step.name, "status": "not run", "seconds": 0.0, "fell_short": []}
    if missing := [name for name in step.needs if name in machine["missing"]]:
        return {**result, "fell_short": [f"not run: {' and '.join(missing)} is missing"]}
    if seconds < 10:
        return {**result, "fell_short": ["not run: the time for all steps is over"]}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / ("found.xml" if step.tests else "found.json")
        if step.tests:
            command = [*PYTEST, f"--junit-xml={file}", *(step.rehearsed if rehearse else step.tests)]
        else:
            command = [str(Path(__file__)), "--measure", step.name, "--output", str(file)]
            command += ["--seconds", str(int(seconds)), *(["--rehearse"] if rehearse else [])]
        begin = time.monotonic()
        status, log = run([sys.executable, *command], step_environment(machine, rehearse=rehearse), seconds)
        result |= {"seconds": round(time.monotonic() - begin, 1), "limit": int(seconds), "log": log[-6000:]}
        last = (log.strip().splitlines() or ["nothing printed"])[-1][:300]
        if file.exists():
            result |= from_tests(file) if step.tests else json.loads(file.read_text())
        if status is None:
            result["fell_short"] = [f"over its {seconds:.0f} s, at: {last}", *result["fell_short"]]
        elif not file.exists() or (status != 0 and not result["fell_short"]):
            result["fell_short"] = [f"ended with status {status}, at: {last}", *result["fell_short"]]
        result["status"] = "timed out" if status is None else "failed" if result["fell_short"] else "passed"
    return result


def step_environment(machine: Mapping[str, Any], *, rehearse: bool) -> dict[str, str]:
    """The environment of a step: this tree's fly_jax, the GPU with the CPU beside it, memory left for torch."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_PLATFORMS": "cpu" if rehearse else f"{machine['platform']},cpu",
    }
    environment.pop("PYTEST_ADDOPTS", None)
    environment.pop(REHEARSAL, None)
    return {**environment, REHEARSAL: "1"} if rehearse else environment


def run(command: list[str], environment: dict[str, str], seconds: float) -> tuple[int | None, str]:
    """Exit status, None if the time was over, and all that was printed; nothing that the process started stays."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return status, log.read()


def from_tests(file: Path) -> dict[str, Any]:
    """Counts, and a line for each test that did not pass; none at all is a failure as well, and so is a skipped one."""
    cases = list(ET.parse(file).getroot().iter("testcase"))
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    fell_short = [] if cases else ["no test ran"]
    for case in cases:
        problems = [each for each in case if each.tag in ("failure", "error", "skipped")]
        counts["skipped" if problems and problems[0].tag == "skipped" else "failed" if problems else "passed"] += 1
        for each in problems[:1]:
            message = (each.get("message") or each.text or "no message").strip().splitlines()[0]
            fell_short.append(f"{case.get('name')} {each.tag}: {message[:300]}")
    return {"tests": counts, "fell_short": fell_short}


def summary(result: Mapping[str, Any]) -> str:
    """What a step found, for its line."""
    if "tests" in result:
        return "; " + ", ".join(f"{number} {name}" for name, number in result["tests"].items() if number)
    if "cases" in result:
        return f"; {len(result['cases'])} cases" + "".join(f"\n          {line}" for line in result["lines"])
    return ""


def measure(name: str, output: Path, seconds: float, *, rehearse: bool) -> None:
    """Measures case by case and writes what there is after each, as long as there is time."""
    begin = time.monotonic()
    cases: dict[str, Any] = {}
    names, measured = MEASURES[name](rehearse)
    for case_name, fields, line, fell_short in measured:
        cases[case_name] = {**fields, "line": line, "fell_short": fell_short}
        left_out = [each for each in names if each not in cases]
        lines = [each["line"] for each in cases.values()]
        short = [each["fell_short"] for each in cases.values() if each["fell_short"]]
        short += [f"{each} was not measured" for each in left_out]
        write_whole(output, {"cases": cases, "lines": lines, "fell_short": short})
        print(line, flush=True)
        if time.monotonic() - begin > 0.8 * seconds:
            return


Measured = tuple[list[str], Iterator[tuple[str, dict[str, Any], str, str | None]]]


def measure_kernels(rehearse: bool) -> Measured:
    """The kernel beside a copy, XLA and torch; in a rehearsal XLA is in the kernel's place, on rows of no size."""
    from fly_jax.bench import kernels as bench

    order = sorted(bench.CASES, key=lambda case: (not case.has_goal, case.num_rows < 64, -case.num_bytes))
    cases = [bench.Case(3, 300, "float32"), bench.Case(2, 257, "bfloat16", has_goal=False)] if rehearse else order

    def each() -> Iterator[tuple[str, dict[str, Any], str, str | None]]:
        small = {"cold_bytes": 10_000, "min_seconds": 0.0} if rehearse else {}
        for case in cases:
            results, left_out = bench.measure(
                [case],
                rounds=2 if rehearse else 5,
                implementation="xla" if rehearse else "triton",
                progress=lambda what, fraction: None,
                **small,
            )
            ratios = {name: ratio.quartiles[1] for name, ratio in results[0].ratios.items()}
            text = ", ".join(f"{name} {value:.2f}" for name, value in ratios.items())
            line = f"{case.name}: {results[0].gigabytes_per_second:.0f} GB/s; of {text}"
            missed = not rehearse and results[0].ratios["copy"].is_met is False
            short = f"{case.name}: {ratios['copy']:.2f} of a copy, the goal is {bench.GOAL}" if missed else None
            yield case.name, {**results[0].fields(), "left_out": left_out}, line, short

    return [case.name for case in cases], each()


VERIFY_CASES = ("greedy", "target-only", "greedy-bf16", "draft-probs", "top-p", "top-k")


def measure_verify(rehearse: bool) -> Measured:
    """`fly_verify` over its floor. The goals of the cases were set on CPUs, so that none counts here."""
    from fly_jax.bench import verify, verify_cases

    chosen = [case for case in verify_cases.CASES if case.name in VERIFY_CASES]
    cases = sorted(chosen, key=lambda case: VERIFY_CASES.index(case.name))
    if rehearse:
        cases = [dataclasses.replace(case, vocab_size=300) for case in cases[:2]]

    def each() -> Iterator[tuple[str, dict[str, Any], str, str | None]]:
        settings = verify.Settings(2 if rehearse else 5, "wall", min_seconds=0.0 if rehearse else 0.03)
        for case in cases:
            result = verify.measure_case(case, settings, lambda what, fraction: None)
            ratio = result.over_floor[verify.DEFAULT].quartiles[1]
            line = f"{case.name}: {result.milliseconds[verify.DEFAULT]:.3f} ms, {ratio:.2f} times its floor"
            yield case.name, result.fields(), line, None

    return [case.name for case in cases], each()


MEASURES = {"bench kernels": measure_kernels, "bench verify": measure_verify}


def write_whole(path: Path, document: Mapping[str, Any]) -> None:
    """Writes JSON to a file that is there whole or not at all."""
    path = path.resolve()
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            json.dump(document, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


if __name__ == "__main__":
    sys.exit(main())
