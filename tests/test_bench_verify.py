"""`fly-jax bench verify` on small vocabularies: what it measures and says, never how long anything takes."""

import dataclasses
import io
import json
import math
import sys

import jax
import numpy as np
import pytest
import rich.console

from fly_jax import fly_verify
from fly_jax.bench import growth, peers, timing, verify, verify_cases, verify_report
from fly_jax.bench.verify_cases import CASES, CONFIG, Case, Draft
from fly_jax.cli import app as cli
from fly_jax.cli import bench_tables, output

SMALL = tuple(dataclasses.replace(case, vocab_size=300) for case in CASES)
BY_NAME = {case.name: case for case in SMALL}
OPTIONS = {"xla_cpu_enable_fast_math": True}


def settings(*, rounds=1, some_peers=()):
    return verify.Settings(rounds, "cpu", some_peers, min_seconds=0.0)


def silent(label, fraction):
    assert 0 <= fraction <= 1


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # put back: the command sets it where it is not set
    monkeypatch.setattr(verify_cases, "CASES", SMALL)
    monkeypatch.setattr(verify_cases, "ODD_SIZES", (257, 256))
    monkeypatch.setattr(verify_cases, "ODD_CASES", (Case("greedy"),))
    for module in (verify, verify_report):
        monkeypatch.setattr(module, "compiler_options", lambda: OPTIONS)


@pytest.fixture
def bench_verify(monkeypatch, capsys):
    """Runs `fly-jax bench verify` in this process: exit status, stdout, stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fly-jax", "bench", "verify", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        return exit_info.value.code or 0, *capsys.readouterr()

    return run


QUICK = ("greedy",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in BY_NAME]
)
def test_a_case_holds_the_share_it_claims(name):
    case = BY_NAME[name]
    data = verify_cases.make_data(case)
    arguments = verify_cases.verify_arguments(case, data)
    result = fly_verify(**arguments, config=CONFIG)
    expected = {0.0: 0, verify_cases.TYPICAL_SHARE: 2, 1.0: 8}[case.share] if case.num_requests == 8 else 1
    assert verify_cases.check(case, data, result) == case.num_candidates == expected
    assert np.isfinite(result.entropy).sum() == expected
    assert np.asarray(result.deferred).sum() == (expected + 1) // 2
    assert arguments["target_logits"].dtype == case.dtype
    wrong = dataclasses.replace(case, share=0.5 if case.num_requests > 1 else 0.0)
    with pytest.raises(RuntimeError, match=f"case {name} does not hold what it claims: {expected} of"):
        verify_cases.check(wrong, data, result)


def test_the_goals_are_those_agreed():
    goals = {case.name: tuple(dataclasses.asdict(case.goals).values()) for case in CASES}
    assert goals == {
        "greedy": (1.8, None, 14, None, 1),
        "greedy-none": (1.8, None, 14, None, 1),
        "greedy-all": (1.8, None, 14, None, 1),
        "greedy-bf16": (3.2, None, 20, None, 1),
        "greedy-b1": (3.5, None, 3, None, 1),
        "target-only": (7, 3, 6, 12, 3),
        "target-only-bf16": (12, 5, 10, None, 3),
        "target-only-b1": (9, None, 4, None, 3),
        "draft-probs": (4.5, 2, 8, 16, 3),
        "draft-logits": (7, 4, None, None, 3),
        "draft-logits-b1": (None, None, None, None, 3),
        "top-p": (40, None, 15, None, None),
        "top-k": (40, None, 15, None, None),
    }
    assert {(case.vocab_size, verify_cases.NUM_DRAFT_TOKENS, verify_cases.WINDOW_SIZE) for case in CASES} == {
        (151936, 8, 6)
    }


@pytest.mark.slow
def test_ratios_are_of_one_round_and_have_their_goals(monkeypatch):
    seconds = {
        "default": [4.0, 9.0],
        "with options": [2.0, 6.0],
        "standard, default": [4.0, 6.0],
        "standard, with options": [1.0, 2.0],
        "floor, max": [1.0, 5.0],
        "floor, sum": [2.0, 3.0],
        "torch": [40.0, 90.0],
    }
    measured = []
    monkeypatch.setattr(verify, "run", lambda calls, settings, progress: measured.append(list(calls)) or seconds)
    torch = peers.Peer(peers.TORCH, "something", lambda case, data: lambda: None)
    absent = peers.Peer("absent", "does not apply", lambda case, data: None)
    result = verify.measure_case(BY_NAME["greedy"], settings(rounds=2, some_peers=(torch, absent)), silent)
    assert set(measured[0]) == set(seconds)
    default, with_options = result.over_floor["default"], result.over_floor["with options"]
    assert (default.values, default.goal, default.at_most, default.is_met) == ((4.0, 3.0), 1.8, True, False)
    assert (with_options.values, with_options.goal, with_options.is_met) == ((2.0, 2.0), None, None)
    standard = result.over_standard
    assert [standard[name].values for name in ("default", "with options")] == [(1.0, 1.5), (2.0, 3.0)]
    assert {each.goal for each in standard.values()} == {1.15}
    assert list(result.against) == ["torch"]
    against = result.against["torch"]["default"]
    assert (against.values, against.goal, against.at_most, against.is_met) == ((10.0, 10.0), 14, False, False)
    assert result.against["torch"]["with options"].goal is None
    assert all(each is None or each > 0 for each in result.temporaries.values())
    assert dataclasses.replace(result, temporaries={"default": 1.0, "with options": 1.2}).temporaries_met is False
    assert dataclasses.replace(result, temporaries={"default": 1.0, "with options": None}).temporaries_met is True


@pytest.mark.parametrize("name", list(BY_NAME))
def test_the_floor_reads_the_logits_of_the_case_once(name, monkeypatch):
    case = BY_NAME[name]
    arrays = verify_cases.floor_arrays(verify_cases.verify_arguments(case, verify_cases.make_data(case)))
    rows = [9, 8] if case.draft == Draft.LOGITS else [9]
    assert [each.shape for each in arrays] == [(case.num_requests, each, 300) for each in rows]
    calls = verify.floor_calls(arrays)
    for call, read in zip(calls.values(), (np.max, np.sum), strict=True):
        for got, array in zip(call(), arrays, strict=True):
            wanted = read(np.asarray(array, np.float32).reshape(-1, 300), axis=1)
            np.testing.assert_allclose(np.asarray(got, np.float32), wanted, rtol=2e-2, atol=0.5)


def test_interleaving_turns_around_and_calls_at_least_once():
    order = []
    alternatives = {name: (lambda name=name: order.append(name)) for name in "abc"}
    seconds = timing.interleave(
        alternatives, rounds=3, clock=lambda: float(len(order)), min_seconds=0.0, progress=lambda fraction: None
    )
    assert "".join(order) == "abc" + "abc" + "cba" + "abc"
    assert seconds == {name: [1.0, 1.0, 1.0] for name in "abc"}


@pytest.mark.slow
def test_json_is_one_document_with_every_figure(bench_verify):
    status, out, err = bench_verify("--cases", "greedy-b1,odd-vocabulary", "--rounds", 2, "--json")
    assert status == 0
    document = json.loads(out)
    assert set(document) == {
        "versions", "machine", "clock", "rounds", "min_sample_seconds", "compiler_options", "num_draft_tokens",
        "window_size", "temperature", "peers", "left_out", "cases", "odd_vocabulary", "interrupted", "growth",
    }  # fmt: skip
    assert (document["clock"], document["rounds"], document["growth"]) == ("cpu", 2, None)
    assert document["compiler_options"] == OPTIONS
    assert set(document["machine"]) == {"processor", "cores", "device", "jax"}
    (case,) = document["cases"]
    assert (case["name"], case["draft"], case["num_candidates"]) == ("greedy-b1", "one-hot", 1)
    assert set(case["over_floor"]) == {"default", "with options"}
    assert case["over_standard"] == {}
    assert set(case["against"]["naive JAX"]) == {"default", "with options"}
    assert case["temporaries"]["goal"] == 1
    assert {"default", "with options", "floor, max", "floor, sum", "naive JAX"} <= set(case["milliseconds"])
    assert [each["goal"] for each in document["odd_vocabulary"]] == [1.3, 1.3]
    for each in (*case["over_floor"].values(), *document["odd_vocabulary"]):
        assert len(each["values"]) == 2
        assert all(math.isfinite(value) for value in each["values"])
        assert len(each["quartiles"]) == 3
    assert "measure greedy-b1" in err


@pytest.mark.slow
def test_a_missing_peer_is_said_and_the_tables_fit(bench_verify, monkeypatch):
    for name in ("torch", "tpu_inference"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = bench_verify("--cases", "greedy", "--rounds", 1)
    assert status == 0
    for name in ("torch", "transformers", "tpu-inference"):
        assert f"left out: {name} (ModuleNotFoundError: " in out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    for words in ("time over the floor", "temporaries", "times as fast", "other ratios", "machine: ", "2 of 8"):
        assert words in out


def test_nothing_is_cut_off_at_80_columns():
    def ratios(value, goal):
        ratio = verify.ratio("name", "definition", goal, [value], [1.0])
        return dict.fromkeys((verify.DEFAULT, verify.WITH_OPTIONS), ratio)

    cases = [
        verify.CaseResult(
            case, case.num_candidates, ratios(value, 40), ratios(value, 1.15),
            {name: ratios(value, 15) for name in ("torch", "torch, topk", "transformers", "tpu-inference")},
            {verify.DEFAULT: value, verify.WITH_OPTIONS: None}, {},
        )
        for case, value in zip(SMALL, [1.234, 12.34, 123.4, 1234.0] * 4, strict=False)
    ]  # fmt: skip
    odd = [verify.ratio("V=50257 / V=50304, target-only, with options", "", 1.3, [1.0], [1.0])]
    curve = growth.Curve("target-only", "requests", 151936, (1, 65536), (odd[0], odd[0]))
    result, curves = verify.VerifyBench(cases, odd), growth.Growth([curve])
    out = rich.console.Console(width=80, record=True, file=io.StringIO())
    for table in bench_tables.verify_tables(result, curves, settings()):
        out.print(table)
    text = out.export_text()
    assert "…" not in text
    for words in (*BY_NAME, "1234 (1234-1234)", "1.23x", "64k:\N{NO-BREAK SPACE}1.00", "<= 40 MISSED", "2 of 8"):
        assert words in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cases", "greedy,nonsense"], "--cases has no 'nonsense'; it takes all, none (with --growth), or greedy, "),
        (["--cases", "none"], "--cases has no 'none'"),
        (["--plot", "curves.svg"], "--plot must be a .png file in a folder that exists, got curves.svg"),
        (["--plot", "missing/curves.png"], "--plot must be a .png file in a folder that exists"),
        (["--plot", "curves.png"], "--plot needs matplotlib; install the bench extra: pip install 'fly-jax[bench]'"),
    ],
)
def test_what_a_user_can_fix_is_one_line(bench_verify, monkeypatch, options, message):
    monkeypatch.setattr(output, "has_matplotlib", lambda: False)
    status, out, err = bench_verify(*options)
    assert (status, out) == (2, "")
    assert err.startswith(f"fly-jax: error: {message}")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_an_interrupt_prints_what_is_done_and_says_what_is_lost(bench_verify, monkeypatch):
    done = verify.measure_case(BY_NAME["greedy-b1"], settings(), silent)
    results = iter([done])

    def measure_case(case, settings, progress):
        try:
            return next(results)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(verify, "measure_case", measure_case)
    status, out, _ = bench_verify("--cases", "greedy-b1,top-p,top-k", "--growth")
    assert status == 130
    assert "1 of 1" in out
    assert "interrupted: the rounds of top-p are lost" in " ".join(out.split())


@pytest.fixture
def small_growth(monkeypatch):
    monkeypatch.setattr(growth, "NUM_REQUESTS", (1, 2))
    monkeypatch.setattr(growth, "VOCAB_SIZES", (256, 300))
    monkeypatch.setattr(growth, "SMALL_VOCAB_SIZE", 256)
    monkeypatch.setattr(growth, "VOCAB_SIZE", 512)
    monkeypatch.setattr(growth, "CASES", (Case("greedy", share=1.0, num_requests=2),))


@pytest.mark.slow
def test_growth_reports_the_spread_of_every_curve(small_growth, monkeypatch):
    (case,) = growth.CASES
    real = growth._measure(dataclasses.replace(case, vocab_size=256), settings())
    assert real.name == "greedy / floor, B=2, V=256"
    assert real.quartiles[1] > 0

    def measure(case, settings):
        return dataclasses.replace(real, values=(case.num_requests * case.vocab_size / 100,))

    monkeypatch.setattr(growth, "_measure", measure)
    curves = growth.measure_growth(settings(), silent)
    assert [(each.axis, each.fixed, each.sizes) for each in curves.curves] == [
        ("requests", 256, (1, 2)),
        ("requests", 512, (1, 2)),
        ("vocabulary", 2, (256, 300)),
    ]
    fields = curves.fields()["curves"]
    assert [each["spread"] for each in fields] == pytest.approx([2.0, 2.0, 300 / 256])
    assert [each["is_met"] for each in fields] == [False, False, True]
    assert {each["goal"] for each in fields} == {1.3}

    monkeypatch.setattr(growth, "_fits", lambda case: case.num_requests < 2)
    curves = growth.measure_growth(settings(), silent)
    assert [each.sizes for each in curves.curves] == [(1,), (1,)]
    assert len(curves.left_out) == 4
    assert curves.left_out[0] == "greedy: B=2, V=256 does not fit in memory"


@pytest.mark.slow
@pytest.mark.usefixtures("small_growth")
def test_the_plot_is_drawn(bench_verify, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "growth.png"
    status, out, _ = bench_verify("--cases", "none", "--rounds", 1, "--plot", path)
    assert status == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "max / min" in out


def test_naive_jax_computes_what_the_gate_needs():
    case = BY_NAME["target-only"]
    data = verify_cases.make_data(case)
    (naive, *_), _ = peers.installed_peers("wall")
    assert naive.name == "naive JAX"
    values, argmax = naive.prepare(case, data)()
    probability = jax.nn.softmax(data.target_logits / verify_cases.TEMPERATURE, axis=-1)
    np.testing.assert_allclose(values, -np.sort(-np.asarray(probability))[..., :3], rtol=1e-4)
    np.testing.assert_array_equal(argmax, data.target_logits.argmax(-1))
    assert naive.prepare(BY_NAME["top-p"], data) is None


@pytest.mark.torch
@pytest.mark.parametrize("name", list(BY_NAME))
def test_the_torch_path_verifies(name):
    pytest.importorskip("torch")
    case = BY_NAME[name]
    data = verify_cases.make_data(case)
    result = fly_verify(**verify_cases.verify_arguments(case, data), config=CONFIG)
    found, left_out = peers.installed_peers("wall")
    assert peers.TORCH not in left_out
    for peer in found:
        call = peer.prepare(case, data)
        if call is None or not peer.name.startswith(peers.TORCH):
            continue
        tokens = call().numpy()
        if case.sampling:  # its uniforms are its own: only what it keeps of a draft has to be the draft
            kept = (tokens >= 0).sum(1) - 1
            for b in range(case.num_requests):
                np.testing.assert_array_equal(tokens[b, : kept[b]], data.draft_token_ids[b, : kept[b]])
                assert (tokens[b, kept[b] + 1 :] == -1).all()
        else:
            np.testing.assert_array_equal(tokens, result.token_ids)
