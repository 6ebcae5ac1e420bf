"""`fly-jax eval` on a tiny random model: no network, no real weights."""

import importlib.resources
import json
import re
import shutil
import sys

import jax
import pytest
import tiny_models

from fly_jax.cli import app as cli
from fly_jax.cli.evaluate import parse_fly
from fly_jax.decode.checkpoints.load import load_model
from fly_jax.decode.decoder_config import DecoderConfig
from fly_jax.decode.generate import Generation
from fly_jax.decode.options import DecodeOptions
from fly_jax.decode.prepare import Mode
from fly_jax.evaluation import run as evaluation_run
from fly_jax.evaluation.options import EvaluationOptions
from fly_jax.evaluation.tasks import BUILTIN_NAME, load_tasks
from fly_jax.metrics import AcceptanceCounts
from fly_jax.traces.file import load_trace
from fly_jax.traces.replay import num_reproduced

BUILTIN = importlib.resources.files("fly_jax.evaluation") / BUILTIN_NAME
MODES = ["target-only", "standard", "fly W=1 θ=0.0 k=3", "fly W=2 θ=0.3 k=2"]
FLY = ("--fly", "window_size=1,entropy_threshold=0", "--fly", "window_size=2,entropy_top_k=2")
TASKS = [
    {"name": "greet", "family": "words", "prompt": "hello hello hello", "reference": "hello"},
    {"name": "count", "family": "numbers", "prompt": "123 123 123 12", "reference": "3", "scorer": "contains"},
    {"name": "any", "family": "words", "prompt": "hello world hello", "reference": "(?s).*", "scorer": "regex"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    (folder / "tiny").mkdir()
    tensors = tiny_models.random_tensors(DecoderConfig.from_hf(tiny_models.CONFIG_JSON), 0)
    tiny_models.write_folder(folder / "tiny", tiny_models.CONFIG_JSON, tensors)
    lines = [json.dumps({"split": "report", **task}) for task in TASKS]
    (folder / "tasks.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def evaluate(folder, monkeypatch, capsys):
    """Runs the command in this process: exit status, stdout, stderr."""

    def run(output, *arguments):
        given = ("--model", folder / "tiny", "--tasks", folder / "tasks.jsonl", "--output", folder / output)
        sizes = ("--max-tokens", 12, "--num-speculative-tokens", 4)
        monkeypatch.setattr(sys, "argv", ["fly-jax", "eval", *map(str, (*given, *sizes, *arguments))])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        return exit_info.value.code or 0, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_a_stopped_run_reports_and_goes_on(folder, evaluate, monkeypatch):
    whole = evaluation_run.Evaluation.run
    calls = []

    def stopped(self, unit, *arguments):
        calls.append(unit.key)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(self, unit, *arguments)

    arguments = (*FLY, "--batch-sizes", "1,2", "--trace", folder / "trace.npz")
    monkeypatch.setattr(evaluation_run.Evaluation, "run", stopped)
    status, out, err = evaluate("out", *arguments)
    assert status == cli.INTERRUPTED
    assert "2 of 6 batches are done; the same command with --resume goes on" in " ".join(err.split())
    # Lines break where the folder's name makes them.
    assert "Unfinished: 2 of 6 batches" in " ".join(out.split())
    assert json.loads((folder / "out" / "report.json").read_text())["complete"] is False
    assert not (folder / "trace.npz").exists()

    monkeypatch.setattr(evaluation_run.Evaluation, "run", whole)
    status, out, _ = evaluate("out", *arguments, "--resume", "--json")
    assert status == 0
    document = json.loads(out)
    assert document == json.loads((folder / "out" / "report.json").read_text())
    assert (document["complete"], document["lossy_modes"]) == (True, MODES[2:])
    check_document(document)
    check_trace(load_trace(folder / "trace.npz"))
    report = (folder / "out" / "report.md").read_text()
    assert all(f"| {mode} |" in report for mode in MODES)
    assert "Unfinished" not in report


def check_document(document):
    quality = {(each["batch_size"], each["mode"]): each for each in document["quality"]}
    speed = {(each["batch_size"], each["mode"]): each for each in document["speed"]}
    assert set(quality) == set(speed) == {(size, mode) for size in (1, 2) for mode in MODES}
    for size in (1, 2):
        target_only, standard = quality[size, "target-only"], quality[size, "standard"]
        assert standard["accuracy"] == target_only["accuracy"]
        assert (standard["changed"], standard["num_lost"], standard["num_won"]) == (0.0, 0, 0)
        assert target_only["num_by_family"] == {"words": 2, "numbers": 1}
        # The regex takes any text.
        assert target_only["accuracy"]["value"] >= 1 / 3
        assert quality[size, MODES[2]]["deferrals"] > 0
        assert target_only["acceptance_by_position"] == []
        assert len(standard["acceptance_by_position"]) == 4
    # The second batch of two is filled up with the first task, the third holds tasks that are not scored again.
    assert (quality[2, "standard"]["num_tasks"], speed[2, "standard"]["num_batches"]) == (3, 3)
    assert speed[2, "standard"]["num_tokens"] > speed[1, "standard"]["num_tokens"]


def check_trace(trace):
    assert trace.meta["source"] == "fly-jax eval"
    assert trace.config is None
    assert set(trace.cycles["request"].tolist()) == {0, 1, 2}
    assert num_reproduced(trace) == len(trace.cycles["request"])


@pytest.mark.slow
def test_the_pictures_are_drawn(folder):
    pytest.importorskip("matplotlib")
    for name in ("acceptance", "speed", "retention"):
        assert (folder / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_sampling_with_several_seeds(folder, evaluate):
    status, out, _ = evaluate("sampled", "--temperature", 1, "--seeds", "0,1", "--fly", "window_size=1", "--json")
    assert status == 0
    quality = {each["mode"]: each for each in json.loads(out)["quality"]}
    assert quality["standard"]["num_tasks"] == 3
    assert quality["standard"]["changed"] is None
    lines = [json.loads(line) for line in (folder / "sampled" / "results.jsonl").read_text().splitlines()[1:]]
    texts = {tuple(each["unit"]): each["modes"]["target-only"]["texts"][0]["token_ids"] for each in lines}
    assert [texts[1, 0, i] for i in range(3)] != [texts[1, 1, i] for i in range(3)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch-sizes", "1,x"), "--batch-sizes must be whole numbers like 1,4,8, got '1,x'"),
        (("--batch-sizes", "0"), "--batch-sizes must be different numbers from 1 to"),
        (("--seeds", "0,0", "--temperature", "1"), "--seeds must be different numbers"),
        (("--seeds", "0,1"), "at temperature 0 nothing is drawn"),
        (("--fly", "window_size=4"), "fly_window_size must be less than num_speculative_tokens .4., got 4"),
        (("--fly", "window=4"), "'window' must be one of window_size, entropy_threshold, entropy_top_k"),
        (("--fly", "window_size=two"), "window_size must be a number, got 'two'"),
        (("--fly", "window_size=3", "--fly", ""), "is there twice"),
        (("--trace", "."), "--trace . is a folder"),
        (
            ("--max-tokens", "250"),
            "task 'greet' needs .* tokens for its prompt and 250 for its answer, and the context",
        ),
        (("--split", "choose"), "has no task of --split choose"),
        (("--trace", "no/such/folder/trace.npz"), "there is no such folder"),
        (("--fly", "entropy_top_k=9", "--trace", "x.npz", "--trace-mode", "fly"), "entropy_top_k must be at most 8"),
    ],
)
def test_bad_options_are_one_line(evaluate, arguments, message):
    status, out, err = evaluate("never", *arguments)
    assert (status, out) == (2, "")
    (line,) = [line for line in err.splitlines() if line.startswith("fly-jax: error:")]
    assert re.search(message, line), line


def test_settings_have_vllms_defaults():
    assert list(EvaluationOptions(DecodeOptions()).modes) == ["fly W=6 θ=0.3 k=3"]
    given = EvaluationOptions(DecodeOptions(num_speculative_tokens=4), fly=(parse_fly("entropy_threshold=0.5"),))
    assert list(given.modes) == ["fly W=3 θ=0.5 k=3"]


def test_modes_take_turns_in_going_first():
    order = []

    class Recording(evaluation_run.Evaluation):
        def _decode(self, unit, mode, on_tokens):
            order.append(mode.name)

        def _record(self, unit, generations):
            return {}

    modes = [Mode(name, None, None) for name in ("target-only", "standard", "fly")]
    evaluation = Recording(None, [None], [[1]], modes, None, [1])
    for turn in range(3):
        record = evaluation.run(evaluation_run.Unit(1, 0, 0, (0,), 1), turn, lambda fraction: None)
        assert list(record["modes"]) == ["target-only", "standard", "fly"]
    assert order == [
        "target-only",
        "standard",
        "fly",
        "standard",
        "fly",
        "target-only",
        "fly",
        "target-only",
        "standard",
    ]


def test_a_batch_of_repeated_tasks_counts_for_speed_only():
    generation = Generation((70, 71), (False, False), jax.device_get(AcceptanceCounts.zeros(4)), 2, 0.5, 0.25, "length")
    evaluation = evaluation_run.Evaluation(None, [None], [[1]], [], None, [2])
    record = evaluation._record(evaluation_run.Unit(1, 0, 3, (0,), 0), [generation])
    assert (record["num_tokens"], record["decode_seconds"], record["texts"]) == (2, 0.25, [])
    assert record["drafted_per_position"] == record["accepted_per_position"] == [0, 0, 0, 0]


def test_a_model_without_a_chat_template_takes_raw_prompts(folder, evaluate, tmp_path):
    shutil.copytree(folder / "tiny", tmp_path / "plain")
    path = tmp_path / "plain" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["chat_template"]
    path.write_text(json.dumps(settings))
    status, _, err = evaluate("plain", "--model", tmp_path / "plain")
    assert status == 2
    assert "task 'greet': The model has no chat template" in err
    tasks = load_tasks(folder / "tasks.jsonl")
    loaded = load_model(tmp_path / "plain")
    assert loaded.tokenizer.encode_chat(tasks[0].messages, raw=True) == loaded.tokenizer.encode("hello hello hello")


@pytest.mark.model
def test_smollm2_is_above_chance_and_standard_changes_nothing(tmp_path, monkeypatch, capsys):
    tasks = [json.loads(line) for line in BUILTIN.read_text(encoding="utf-8").splitlines()]
    chosen = [task for task in tasks if task["split"] == "report"][:8]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, chosen)), encoding="utf-8")
    arguments = ("--tasks", path, "--output", tmp_path / "out", "--batch-sizes", 8, "--min-batches", 1, "--json")
    monkeypatch.setattr(sys, "argv", ["fly-jax", "eval", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert not exit_info.value.code
    quality = {each["mode"]: each for each in json.loads(capsys.readouterr().out)["quality"]}
    # A guess scores nothing on any of these tasks.
    assert quality["target-only"]["accuracy"]["value"] >= 0.4
    assert len(quality["target-only"]["num_by_family"]) == 8
    assert (quality["standard"]["changed"], quality["standard"]["num_lost"]) == (0.0, 0)
    assert quality["fly W=6 θ=0.3 k=3"]["tokens_per_cycle"] > quality["standard"]["tokens_per_cycle"] > 1.0
