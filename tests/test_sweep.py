"""The replay of a trace against `fly_verify` itself and against one written out in plain Python; the command."""

import json
import math
import sys

import jax
import numpy as np
import pytest
from test_trace import CONFIG, K, make_call, record, written

from fly_jax import FlyConfig
from fly_jax.cli import app as cli
from fly_jax.traces.file import Trace, TraceWriter, save_trace
from fly_jax.traces.record import DEFERRABLE, DEFERRED, NATIVELY_ACCEPTED
from fly_jax.traces.replay import Settings, num_reproduced, replay, replay_cycles

SETTINGS = Settings.grid((1, 2, 4), (0.2, 0.55, 0.9, math.inf), (1, 3, 8))


def triples(settings):
    return list(zip(*(values.tolist() for values in vars(settings).values()), strict=True))


def synthetic(seed, *, with_q=True, num_cycles=200):
    """A trace of random rows, recorded under `CONFIG` by name."""
    rng = np.random.default_rng(seed)
    lengths = rng.choice([K, K, 3, 0], num_cycles).astype(np.int32)
    num_rows = int(lengths.sum())
    probabilities = np.sort(rng.dirichlet(np.full(20, 0.3), num_rows), axis=1)[:, ::-1]
    logprobs = np.log(np.maximum(probabilities, 1e-30)).astype(np.float32)
    rank = rng.choice(4, num_rows, p=[0.7, 0.15, 0.1, 0.05])
    flags = np.where(rank == 0, NATIVELY_ACCEPTED | DEFERRABLE, np.where(rng.random(num_rows) < 0.9, DEFERRABLE, 0))
    q = rng.random(num_rows).astype(np.float32)
    rows = {
        "draft_token_id": rank.astype(np.int32),
        "argmax_token_id": np.zeros(num_rows, np.int32),
        "draft_logprob": np.take_along_axis(logprobs, rank[:, None], axis=1)[:, 0],
        "top_logprobs": np.ascontiguousarray(logprobs[:, :8]),
        "draft_prob": np.where(with_q & (rng.random(num_rows) < 0.8), q, np.float32(np.nan)),
        "entropy": np.full(num_rows, np.nan, np.float32),
        "flags": flags.astype(np.uint8),
    }
    request, cycle = np.zeros(num_cycles, np.int32), np.arange(num_cycles, dtype=np.int32)
    cycles = {"request": request, "cycle": cycle, "num_draft_tokens": lengths, "num_accepted": np.zeros_like(lengths)}
    return Trace(cycles, rows, {**TraceWriter(CONFIG, num_speculative_tokens=K, source="a test").trace().meta})


def check_against_fly_verify(mode, recorded, settings):
    calls = [make_call(seed, mode) for seed in range(3)]
    trace = written(calls, recorded)
    assert num_reproduced(trace) == len(trace.cycles["request"])
    deferrals = 0
    for window_size, threshold, top_k in settings:
        config = FlyConfig(window_size, threshold, top_k)
        verifications = jax.device_get([record(call, config)[0] for call in calls])
        num_accepted, deferred = replay_cycles(trace, window_size, threshold, top_k)
        np.testing.assert_array_equal(num_accepted, np.concatenate([each.num_accepted for each in verifications]))
        np.testing.assert_array_equal(deferred, np.concatenate([each.deferred for each in verifications]))
        deferrals += deferred.sum()
    assert deferrals > 10


def test_every_threshold_replayed_is_fly_verify():
    check_against_fly_verify("probs", CONFIG, [(1, threshold, 3) for threshold in (0.0, 0.3, 0.55, 0.9, math.inf)])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["greedy", "one-hot", "probs"])
@pytest.mark.parametrize("recorded", [None, CONFIG, FlyConfig(3, 0.1, 8)])
def test_every_setting_replayed_is_fly_verify(mode, recorded):
    check_against_fly_verify(mode, recorded, [(1, 0.2, 1), (1, 0.6, 3), (2, 0.0, 2), (3, 0.3, 5), (4, 0.1, 8)])


def plain_replay(trace, window_size, threshold, top_k, far_below):
    """The sums of a `Replay` of one setting, one row at a time, from the documented file alone."""
    sums = dict.fromkeys(("num_tokens", "num_deferred", "num_stops", "loss", "num_far", "num_known", "overshoot"), 0)
    start = 0
    for n in trace.cycles["num_draft_tokens"]:
        rows = {name: values[start : start + n] for name, values in trace.rows.items()}
        start += n
        native = (rows["flags"] & NATIVELY_ACCEPTED) > 0
        kept = 0
        while kept < n:
            if not native[kept]:
                top = rows["top_logprobs"][kept, :top_k].astype(float)
                entropy = -sum(math.exp(x) * x for x in top if x > -80) if not np.isnan(top).any() else math.nan
                window = native[kept + 1 : kept + 1 + window_size]
                deferrable = rows["flags"][kept] & DEFERRABLE and len(window) == window_size and window.all()
                if not (deferrable and entropy >= threshold):
                    sums["num_stops"] += 1
                    break
                loss = rows["top_logprobs"][kept, 0] - rows["draft_logprob"][kept]
                sums["num_deferred"] += 1
                sums["loss"] += loss
                sums["num_far"] += loss > far_below
                if not np.isnan(rows["draft_prob"][kept]):
                    sums["num_known"] += 1
                    sums["overshoot"] += math.log(rows["draft_prob"][kept]) - rows["draft_logprob"][kept]
            kept += 1
        sums["num_tokens"] += kept + 1
    return sums


@pytest.mark.parametrize("with_q", [True, False])
def test_the_figures_are_those_of_a_plain_replay(with_q, monkeypatch):
    trace = synthetic(1, with_q=with_q)
    monkeypatch.setattr("fly_jax.traces.replay._MOST_ELEMENTS", 36 * K * 70)  # chunks of 70 cycles, the last one short
    result = replay(trace, SETTINGS, far_below=1.5)
    for i, setting in enumerate(triples(SETTINGS)):
        for name, value in plain_replay(trace, *setting, far_below=1.5).items():
            np.testing.assert_allclose(getattr(result, name)[i], value, rtol=1e-5, err_msg=f"{setting}: {name}")
    assert result.num_far.any()
    assert result.num_known.any() == np.isfinite(result.draft_overshoot).any() == with_q
    assert result.tokens_per_cycle.max() > result.tokens_per_cycle[np.isinf(SETTINGS.thresholds)].max()
    assert result.num_cycles == len(trace.cycles["request"])


def test_a_recorded_entropy_decides_where_there_is_one():
    trace = synthetic(2)
    _, deferred = replay_cycles(trace, 1, 0.6, 3)
    assert deferred.any()
    shut = Trace(trace.cycles, {**trace.rows, "entropy": np.zeros_like(trace.rows["entropy"])}, trace.meta)
    assert not replay_cycles(shut, 1, 0.6, 3)[1].any()
    assert replay_cycles(shut, 1, 0.6, 2)[1].any()  # another k has its own


def test_what_another_verifier_decided_is_not_reproduced():
    trace = synthetic(2)
    num_accepted, deferred = replay_cycles(trace, CONFIG.window_size, CONFIG.entropy_threshold, CONFIG.entropy_top_k)
    drafted = np.arange(K) < trace.cycles["num_draft_tokens"][:, None]
    flags = trace.rows["flags"] | np.where(deferred[drafted], DEFERRED, 0).astype(np.uint8)
    same = Trace({**trace.cycles, "num_accepted": num_accepted}, {**trace.rows, "flags": flags}, trace.meta)
    assert num_reproduced(same) == 200
    num_accepted = num_accepted.copy()
    num_accepted[np.argmax(num_accepted)] -= 1
    assert num_reproduced(Trace({**trace.cycles, "num_accepted": num_accepted}, same.rows, trace.meta)) == 199


def test_an_empty_trace_has_figures():
    result = replay(written([], None), SETTINGS)
    assert result.tokens_per_cycle.tolist() == [0.0] * 36
    assert result.deferral_rate.tolist() == [0.0] * 36


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ((0, 0.3, 3), "window sizes must"),
        ((1, math.nan, 3), "thresholds must"),
        ((1, 0.3, 9), r"top ks must be in \[1, 8\]"),
    ],
)
def test_settings_out_of_range_are_refused(setting, words):
    with pytest.raises(ValueError, match=words):
        Settings.from_lists([setting])


@pytest.fixture
def fly_jax(monkeypatch, capsys):
    """Runs the command line in this process: exit status, stdout, stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fly-jax", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        return exit_info.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "trace.npz"
    save_trace(synthetic(3), path)
    return path


def test_the_table_marks_what_was_recorded_and_says_what_a_replay_is(fly_jax, trace_file):
    status, out, _ = fly_jax("sweep", trace_file)
    assert status == 0
    for words in ("standard", "recorded", "tokens", "deferred", "What it cannot", "Left out", "200 cycles"):
        assert words in out


def test_settings_in_json_are_sorted_filtered_and_not_beaten(fly_jax, trace_file):
    def settings(*options):
        status, out, err = fly_jax("sweep", trace_file, "--json", *options)
        assert (status, err) == (0, "")
        document = json.loads(out)
        assert document["trace"]["config"] == {
            "window_size": 1,
            "entropy_threshold": pytest.approx(0.6),
            "entropy_top_k": 3,
        }
        return document["settings"]

    grid = ("--window-sizes", "1,2,3", "--thresholds", "0.2,0.6,0.9", "--top-ks", "2,3")
    everything = settings("--all", *grid)
    assert len(everything) == 3 * 3 * 2 + 1
    assert sum(each["is_recorded"] for each in everything) == sum(each["is_standard"] for each in everything) == 1
    tokens = [each["tokens_per_cycle"] for each in everything]
    assert tokens == sorted(tokens, reverse=True)
    names = ("deferral_rate", "logprob_loss")
    for each in settings(*grid):
        others = [other for other in everything if other["tokens_per_cycle"] > each["tokens_per_cycle"]]
        beaten = any(all(other[name] <= each[name] for name in names) for other in others)
        assert not beaten or each["is_standard"] or each["is_recorded"]
    limits = {"deferral_rate": 0.4, "logprob_loss": 1.5}
    filtered = settings("--all", *grid, "--max-deferral-rate", 0.4, "--max-logprob-loss", 1.5)
    passing = [each for each in everything if all(each[name] <= limit for name, limit in limits.items())]
    assert 1 < len(passing) < len(everything)
    assert [each for each in filtered if not each["is_recorded"]] == [
        each for each in passing if not each["is_recorded"]
    ]
    assert settings("--all", *grid, "--far-below", 0)[0]["far_share"] == 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--window-sizes", "2,x"), "--window-sizes must be integers with commas between them, got '2,x'"),
        (
            ("--window-sizes", "8"),
            "--window-sizes must be at least 1 and below the trace's 8 draft tokens per cycle, got 8",
        ),
        (("--thresholds", "-1"), "--thresholds must be numbers of nats, at least 0, got -1.0"),
        (("--top-ks", "9"), "--top-ks must be between 1 and 8"),
        (("--max-deferral-rate", "-0.1"), "--max-deferral-rate must be a number of at least 0"),
        (("--far-below", "nan"), "--far-below must be a number of at least 0"),
        (("--plot", "plot.pdf"), "--plot must be a .png file in a folder that exists"),
    ],
)
def test_wrong_options_are_one_line(fly_jax, trace_file, options, words):
    status, out, err = fly_jax("sweep", trace_file, *options)
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_files_without_drafts_or_that_are_no_traces_are_one_line(fly_jax, tmp_path):
    TraceWriter(None, num_speculative_tokens=K, source="a test").save(tmp_path / "empty.npz")
    (tmp_path / "text.npz").write_text("no")
    for name, words in (("empty", "holds no draft tokens"), ("text", "is not a trace"), ("none", "No such file")):
        status, _, err = fly_jax("sweep", tmp_path / f"{name}.npz")
        assert status == 2
        assert words in err
        assert err.count("\n") == 1


def test_the_plot_is_a_picture(fly_jax, trace_file, tmp_path):
    pytest.importorskip("matplotlib")
    assert fly_jax("sweep", trace_file, "--plot", tmp_path / "plot.png")[0] == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
