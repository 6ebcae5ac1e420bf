"""Strict numerics for every test, and what the tests set aside, printed at the end of the run."""

import os

# Before jax is imported: tests run on the CPU unless the caller chose otherwise.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

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


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_code():
    """Every compiled shape holds memory maps, and a process may have only 65530 of them."""
    yield
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
