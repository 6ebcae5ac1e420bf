"""`FLY_JAX_VLLM=record` on a stand-in for vLLM: vLLM's tokens and generators are its own, and the trace is right."""

import logging
import shutil
import time

import numpy as np
import pytest
from test_vllm_plugin import spec_config, undecided_step, vllm  # noqa: F401 - a fixture
from test_vllm_replacements import metadata, random_step

torch = pytest.importorskip("torch")

from fly_jax import FlyConfig  # noqa: E402
from fly_jax.bridges.vllm import plugin, programs, recording, v1  # noqa: E402
from fly_jax.traces.file import load_trace  # noqa: E402
from fly_jax.traces.replay import num_reproduced, replay_cycles  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def recorded(vllm, tmp_path):  # noqa: F811
    """`module, finish = recorded(**options)`: a vLLM that verifies by `v1`; `finish()` is the trace."""

    def install(*, verifies=True, **options):
        def change(module):
            if verifies:
                module.rejection_sample = v1.rejection_sample

        module = vllm("record", change=change, version="0.33.0", **options)

        def finish():
            module.rejection_sample.fly_jax_session.recorder.finish()
            (path,) = tmp_path.glob("trace-*.npz")
            return load_trace(path)

        return module, finish

    return install


def steps(count=4, draft_probs=True):
    rng = np.random.default_rng(7)
    return [random_step(rng, [4, 0, 7, 3], draft_probs=draft_probs) for _ in range(count)]


TEMPERATURES = {"greedy": [0.0] * 4, "sampling": [1.0, 0.0, 1.0, 1.0]}
FLY = {"fly_window_size": 2, "fly_entropy_threshold": 0.3, "fly_entropy_top_k": 3}


@pytest.mark.parametrize("fly", [{}, FLY], ids=["standard", "fly"])
@pytest.mark.parametrize("kind", TEMPERATURES)
def test_vllm_decides_as_always_and_the_trace_is_of_its_tokens(recorded, kind, fly):
    module, finish = recorded()
    original = module.rejection_sample.fly_jax_session.original
    sampler = module.RejectionSampler(None, spec_config(method="ngram"), None)
    tokens = {}
    for name, function in (("vllm", original), ("hooked", sampler.forward)):
        torch.manual_seed(9)
        generators = {2: torch.Generator().manual_seed(5)}
        tokens[name] = [
            function(**step, sampling_metadata=metadata(TEMPERATURES[kind], generators), **fly) for step in steps()
        ]
        tokens[name] += [torch.get_rng_state(), generators[2].get_state()]
    for ours, theirs in zip(tokens["hooked"], tokens["vllm"], strict=True):
        assert torch.equal(ours, theirs)
    trace = finish()
    kept = np.concatenate([(each.numpy() >= 0).sum(axis=1) - 1 for each in tokens["vllm"][:4]])
    np.testing.assert_array_equal(trace.cycles["num_accepted"], kept)
    assert trace.cycles["num_draft_tokens"].tolist() == [4, 0, 7, 3] * 4
    assert trace.cycles["cycle"].tolist() == np.repeat(range(4), 4).tolist()
    assert num_reproduced(trace) == 16
    assert trace.config == (FlyConfig(2, 0.3, 3) if fly else None)
    assert (trace.num_speculative_tokens, trace.meta["drafter"], trace.meta["source"]) == (8, "ngram", "vLLM")
    assert np.isnan(trace.rows["draft_prob"]).all() == (kind == "greedy")
    counted = plugin.counters()
    assert (counted["steps"], counted["requests"], counted["draft_tokens"]) == (4, 16, 56)
    assert (counted["trace_rows"], counted["trace_cycles_differing"]) == (60, 0)
    assert counted["accepted"] == kept.sum()
    assert counted["jax_seconds"] + counted["jax_compiling_seconds"] > 0
    assert counted["vllm_seconds"] > 0


def test_a_replay_of_what_vllm_recorded_is_what_fly_would_do(recorded):
    module, finish = recorded()
    step = undecided_step()
    assert module.rejection_sample(**step)[0, :2].tolist() == [0, 0]
    with_fly = module.rejection_sample.fly_jax_session.original(**step, **FLY)
    trace = finish()
    num_accepted, deferred = replay_cycles(trace, 2, 0.3, 3)
    assert num_accepted.tolist() == [(with_fly >= 0).sum() - 1] == [8]
    assert deferred[0].tolist() == [False, True] + [False] * 6


def test_tokens_that_jax_would_not_give_are_vllms_and_counted(recorded):
    module, finish = recorded(verifies=False)  # keeps every draft
    module.rejection_sample(**undecided_step())
    trace = finish()
    assert trace.cycles["num_accepted"].tolist() == [8]
    assert num_reproduced(trace) == 0
    assert plugin.counters()["trace_cycles_differing"] == 1


def test_a_full_trace_costs_nothing_more(recorded, caplog):
    module, finish = recorded(variables={"FLY_JAX_VLLM_RECORD_ROWS": "20"})
    for _ in range(4):
        module.rejection_sample(**undecided_step())
    trace = finish()
    assert trace.cycles["cycle"].tolist() == [0, 1]
    counted = plugin.counters()
    assert (counted["trace_rows"], counted["steps"]) == (16, 3)
    assert caplog.text.count("FLY_JAX_VLLM_RECORD_ROWS=20") == 1


def test_steps_of_another_setting_are_left_out_and_counted(recorded, caplog):
    module, finish = recorded()
    module.rejection_sample(**undecided_step())
    for _ in range(2):
        module.rejection_sample(**undecided_step(), **FLY)
    assert len(finish().cycles["cycle"]) == 1
    assert plugin.counters()["trace_steps_left_out"] == 2
    assert caplog.text.count("leaves out steps of others") == 1


def test_the_file_is_written_while_the_engine_runs_and_failures_are_counted(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "_SECONDS_BETWEEN_WRITES", 0.0)
    module, finish = recorded()
    module.rejection_sample(**undecided_step())
    recorder = module.rejection_sample.fly_jax_session.recorder
    assert wait_until(recorder._path.exists)
    assert len(load_trace(recorder._path).cycles["cycle"]) == 1
    shutil.rmtree(tmp_path)
    module.rejection_sample(**undecided_step())
    assert wait_until(lambda: plugin.counters()["failed_writes"] > 0)
    tmp_path.mkdir()
    assert len(finish().cycles["cycle"]) == 2


def wait_until(condition):
    for _ in range(600):
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_an_error_while_collecting_stops_the_engine(recorded, monkeypatch, caplog):
    module, _ = recorded()

    def broken(*_, **__):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(recording.TraceWriter, "add", broken)
    module.rejection_sample(**undecided_step())
    recorder = module.rejection_sample.fly_jax_session.recorder
    assert wait_until(lambda: recorder._failure is not None)
    with pytest.raises(RuntimeError, match="recording the trace failed"):
        module.rejection_sample(**undecided_step())
    with caplog.at_level(logging.ERROR):
        recorder.finish()
    assert "out of luck" in caplog.text


def test_a_k_that_no_trace_holds_is_refused_before_the_engine_serves(recorded):
    module, _ = recorded()
    with pytest.raises(ValueError, match=r"fly_entropy_top_k must be at most 8 with FLY_JAX_VLLM=record, .* got 9"):
        module.RejectionSampler(None, spec_config(rejection_sample_method="fly", fly_entropy_top_k=9), None)


def test_batches_of_other_sizes_are_few_programs(recorded):
    module, finish = recorded()
    before = programs.num_programs()
    for step in steps(2, draft_probs=False):
        module.rejection_sample(**step, sampling_metadata=metadata(TEMPERATURES["greedy"]))
    assert programs.num_programs() - before <= 1
    finish()
