"""Strict numerics for every test, one compilation cache for a run, and what the tests set aside, printed at its end."""

import atexit
import importlib.metadata
import os
import pathlib
import shutil
import tempfile

# All of this before jax is imported, and in the environment, so that the workers and the subprocesses have it too.
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # unless the caller chose otherwise

# Compiling is most of the time that tests take, so it is done quickly unless FLY_JAX_TESTS_FULL is set: then the
# compiler optimises as it does for users.
# One part of a program after the other: cut into many to compile them side by side, it takes more processor time.
QUICK_COMPILATION = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
if tuple(map(int, importlib.metadata.version("jax").split(".")[:2])) < (0, 11):
    QUICK_COMPILATION["xla_cpu_use_fusion_emitters"] = False
# For the few tests of what the compiler itself gets wrong, or of what it keeps in memory.
FULL_COMPILATION = {"xla_backend_optimization_level": 3}
if "xla_cpu_use_fusion_emitters" in QUICK_COMPILATION:
    FULL_COMPILATION["xla_cpu_use_fusion_emitters"] = True
if os.environ["JAX_PLATFORMS"] != "cpu":  # a GPU has a compiler of its own
    QUICK_COMPILATION, FULL_COMPILATION = {}, {}
if QUICK_COMPILATION and not os.environ.get("FLY_JAX_TESTS_FULL") and "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK_COMPILATION.items())

# What one process has compiled the others of the run read from its folder. It is gone when the run ends; a caller that
# wants one for several runs gives (and removes) a folder of its own.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    folder = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="fly-jax-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis
import jax
import pytest
from hypothesis.internal.conjecture import providers

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 2)  # for shard_map

hypothesis.settings.register_profile(
    "fly",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("fly")

# Hypothesis mixes in constants from whichever local modules happen to be imported, so that its examples would depend on
# what else ran in the process and on how the tests are spread. It has no public switch for this.
if not callable(getattr(providers, "_get_local_constants", None)):
    raise RuntimeError("hypothesis has renamed what collects local constants: examples are no longer reproducible")
providers._get_local_constants = lambda: providers.Constants()


def pytest_addoption(parser):
    parser.addoption("--fresh", action="store_true", help="new random cases instead of the fixed ones")


MOST_MEMORY_MAPS = 20_000  # of the 65530 that Linux allows a process; a compiled program holds a few


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_code():
    """Hundreds of compiled programs exhaust a process's memory maps; what is forgotten is read from the cache again."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > MOST_MEMORY_MAPS:
        jax.clear_caches()


@pytest.fixture
def count_traces():
    """`jitted, traces = count_traces(function)`: `len(traces)` is how often `function` was traced."""

    def counted(function, **jit_options):
        traces = []

        def traced(*args, **kwargs):
            traces.append(None)
            return function(*args, **kwargs)

        return jax.jit(traced, **jit_options), traces

    return counted


@pytest.fixture
def report(record_property):
    """`report(text)` prints a line after the run, whatever the verbosity and in parallel runs too."""
    return lambda text: record_property("report", text)


def pytest_terminal_summary(terminalreporter):
    lines = [
        f"{result.nodeid}: {value}"
        for outcome in ("passed", "failed")
        for result in terminalreporter.stats.get(outcome, [])
        for name, value in result.user_properties
        if name == "report" and result.when == "call"
    ]
    if lines:
        terminalreporter.section("set aside, and measured")
        for line in lines:
            terminalreporter.write_line(line)
