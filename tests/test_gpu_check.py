"""`scripts/gpu_check.sh` without a GPU: what it says, and that nothing which goes wrong looks right.

CI rehearses all of its steps.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MACHINE = {"platform": "cpu", "missing": [], "python": "3", "gpus": [], "jax": "0"}


def load():
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


gpu_check = load()


def shell(*arguments, **environment):
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", *arguments],
        env={**os.environ, **hidden, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_gpu_it_says_so(tmp_path):
    done = shell("--output", str(tmp_path / "found.json"))
    assert done.returncode == gpu_check.CANNOT_RUN
    assert "there is no GPU that jax" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("python", "message"), [("no-such-python", "is not on PATH"), ("/bin/false", "")], ids=["missing", "broken"]
)
def test_without_a_python_it_is_no_success(python, message):
    done = shell(PYTHON=python)
    assert done.returncode != gpu_check.ALL_RIGHT
    assert message in done.stderr


def test_without_jax_it_cannot_run(tmp_path, monkeypatch):
    (tmp_path / "jax.py").write_text("raise ImportError('jax is broken here')")
    done = shell(PYTHONPATH=str(tmp_path))
    assert done.returncode == gpu_check.CANNOT_RUN
    assert "jax is broken here" in done.stderr


def written(tmp_path, body):
    path = tmp_path / "found.xml"
    path.write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>")
    return path


PASSED = '<testcase name="a"/>'


@pytest.mark.parametrize(
    ("body", "counts", "lines"),
    [
        (PASSED, (1, 0, 0), []),
        ("", (0, 0, 0), ["no test ran"]),
        (
            f'{PASSED}<testcase name="b"><failure message="1 != 2&#10;more"/></testcase>',
            (1, 1, 0),
            ["b failure: 1 != 2"],
        ),
        ('<testcase name="b"><skipped message="no GPU"/></testcase>', (0, 0, 1), ["b skipped: no GPU"]),
        ('<testcase name="b"><error message="x"/><error message="y"/></testcase>', (0, 1, 0), ["b error: x"]),
    ],
)
def test_every_test_has_to_pass(tmp_path, body, counts, lines):
    found = gpu_check.from_tests(written(tmp_path, body))
    assert tuple(found["tests"].values()) == counts
    assert found["fell_short"] == lines


def step(*arguments, seconds=30, needs=()):
    """A step whose pytest is asked for `arguments`."""
    return gpu_check.Step("a step", seconds, needs, arguments or ("--version",), arguments or ("--version",))


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (("-m", "gpu", "tests/test_noise.py"), "failed", "no test ran"),
        (("tests/no_such_file.py",), "failed", "no test ran"),
        (("--no-such-option",), "failed", "ended with status 4"),
    ],
)
def test_pytest_that_runs_nothing_falls_short(arguments, status, line):
    result = gpu_check.run_step(step(*arguments), MACHINE, 60, rehearse=True)
    assert result["status"] == status
    assert result["fell_short"][0].startswith(line)


def test_what_is_missing_is_named():
    result = gpu_check.run_step(step(needs=("chex", "torch")), {**MACHINE, "missing": ["torch"]}, 30, rehearse=True)
    assert (result["status"], result["fell_short"]) == ("not run", ["not run: torch is missing"])
    assert gpu_check.run_step(step(), MACHINE, 3, rehearse=True)["status"] == "not run"


def is_running(argument):
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if argument.encode() in path.read_bytes().split(b"\0"):
                return True
    return False


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_a_step_that_hangs_is_ended_with_what_it_started():
    argument = f"77.{os.getpid()}"  # seconds, and no other process's
    code = f"import subprocess; print('started', flush=True); subprocess.run(['sleep', '{argument}'])"
    begin = time.monotonic()
    status, log = gpu_check.run([sys.executable, "-c", code], dict(os.environ), 2)
    assert status is None
    assert log == "started\n"
    while is_running(argument):  # until the kernel has ended it
        assert time.monotonic() - begin < 30
        time.sleep(0.1)


def test_a_failing_step_does_not_stop_the_next(tmp_path, monkeypatch, capsys):
    results = {"first": ["broken"], "second": []}

    def run_step(step, machine, seconds, *, rehearse):
        return {"name": step.name, "status": "failed", "seconds": 1.0, "fell_short": results[step.name]}

    monkeypatch.setattr(gpu_check, "STEPS", [gpu_check.Step(name, 10, ()) for name in results])
    monkeypatch.setattr(gpu_check, "probe", lambda rehearse: MACHINE)
    monkeypatch.setattr(gpu_check, "run_step", run_step)
    output = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--output", str(output)])
    assert gpu_check.main() == gpu_check.FELL_SHORT
    assert json.loads(output.read_text())["fell_short"] == ["first: broken"]
    assert "fell short: first: broken" in capsys.readouterr().out
    results["first"] = []
    assert gpu_check.main() == gpu_check.ALL_RIGHT
    assert json.loads(output.read_text())["all_right"]


@pytest.mark.parametrize("seconds", [100, 0])
def test_what_was_not_measured_is_named(tmp_path, monkeypatch, seconds):
    def each():
        yield "one", {"value": 1}, "one: 1", None
        yield "two", {"value": 2}, "two: 2", "two: too little"

    monkeypatch.setitem(gpu_check.MEASURES, "bench kernels", lambda rehearse: (["one", "two"], each()))
    output = tmp_path / "found.json"
    gpu_check.measure("bench kernels", output, seconds, rehearse=True)
    found = json.loads(output.read_text())
    assert found["fell_short"] == (["two: too little"] if seconds else ["two was not measured"])
    assert list(found["cases"]) == (["one", "two"] if seconds else ["one"])


def test_the_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "found.json"
    gpu_check.write_whole(path, {"a": 1})
    with pytest.raises(TypeError):
        gpu_check.write_whole(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_all_steps_fit_into_eight_minutes():
    assert gpu_check.TOTAL_SECONDS < 8 * 60
    assert len({each.name for each in gpu_check.STEPS}) == len(gpu_check.STEPS) == 6
