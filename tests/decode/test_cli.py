"""The command line on tiny random models: no network, no real weights."""

import json
import logging
import math
import subprocess
import sys

import pytest
import tiny_models

from fly_jax import FlyConfig
from fly_jax.cli import app as cli
from fly_jax.cli import generate as command
from fly_jax.cli import options
from fly_jax.config import SamplingParams
from fly_jax.decode.comparison import num_differing, token_pieces
from fly_jax.decode.decoder_config import DecoderConfig
from fly_jax.decode.drafters import DRAFT_SAMPLE_METHODS, LayerSkip
from fly_jax.decode.generate import Generation, Generator
from fly_jax.decode.options import DRAFTERS
from fly_jax.metrics import AcceptanceCounts
from fly_jax.traces.file import load_trace
from fly_jax.traces.replay import num_reproduced

PROMPT = "hello world, hello 123 hello world, hello 123 hello"
TWO_TOKENS = Generation((70, 71), (False, False), AcceptanceCounts.zeros(4), 2, 0.5, 0.5, "length")
MODES = ["target-only", "standard", "fly"]


def write_model(folder, seed=0, **changes):
    config_json = {**tiny_models.CONFIG_JSON, **changes}
    folder.mkdir(parents=True)
    tensors = tiny_models.random_tensors(DecoderConfig.from_hf(config_json), seed)
    tiny_models.write_folder(folder, config_json, tensors)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture
def fly_jax(monkeypatch, capsys):
    """Runs the command line in this process: exit status, stdout, stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fly-jax", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        return exit_info.value.code or 0, *capsys.readouterr()

    return run


def generate(fly_jax, model, *arguments):
    options = ("--max-tokens", 24, "--num-speculative-tokens", 4, "--fly-window-size", 1)
    return fly_jax("generate", "--model", model, "--prompt", PROMPT, *options, *arguments)


def test_json_is_one_document_with_every_figure(fly_jax, model):
    status, out, err = generate(fly_jax, model, "--json", "--fly-entropy-threshold", 0, "--seed", 7)
    assert status == 0
    document = json.loads(out)
    assert set(document) == {"versions", "config", "interrupted", "lossy_modes", "prompts", "totals"}
    assert {"fly-jax", "jax", "jaxlib", "flax", "numpy", "python", "platform"} <= set(document["versions"])
    config = document["config"]
    assert config["model"] == "tiny"
    assert (config["num_speculative_tokens"], config["fly_window_size"], config["seed"]) == (4, 1, 7)
    assert (config["drafter"], config["fly_entropy_threshold"], config["fly_entropy_top_k"]) == ("ngram", 0.0, 3)
    (prompt,) = document["prompts"]
    assert prompt["prompt"] == PROMPT
    results = prompt["results"]
    assert list(results) == list(document["totals"]) == MODES
    assert results["standard"]["token_ids"] == results["target-only"]["token_ids"]
    assert results["standard"]["num_differing"] == 0
    for mode, result in results.items():
        assert len(result["token_ids"]) == len(result["deferred"]) == result["num_tokens"] <= 24
        assert result["num_deferred"] == sum(result["deferred"])
        assert result["total_seconds"] == pytest.approx(result["prefill_seconds"] + result["decode_seconds"])
        assert result["tokens_per_second"] == pytest.approx(result["num_tokens"] / result["decode_seconds"])
        assert result["tokens_per_cycle"] == pytest.approx(result["num_tokens"] / result["num_cycles"])
        assert len(result["acceptance_rate_per_position"]) == (0 if mode == "target-only" else 4)
        assert {"text", "finish_reason", "acceptance_rate", "mean_acceptance_length", "deferral_rate"} <= set(result)
    for label in ("reading", "compile", "generate: prompt 1, fly"):
        assert label in err


def test_the_three_texts_stand_side_by_side(fly_jax, model, caplog, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    with caplog.at_level(logging.WARNING, logger="fly_jax"):
        status, out, _ = generate(fly_jax, model, "--fly-entropy-threshold", 0)
    assert status == 0
    assert [record.message for record in caplog.records].count(
        "FLy is lossy: its text may differ from what the target alone would write."
    ) == 1
    header = next(line for line in out.splitlines() if "target-only" in line)
    assert header.index("target-only") < header.index("standard") < header.index("fly")
    for name in ("tokens/s", "total time", "tokens/cycle", "deferred", "differ", "all prompts", "total time ratio"):
        assert name in out
    row = next(line for line in out.splitlines() if line.strip("│ ").startswith("deferred"))
    num_deferred = int(row.strip("│ ").split("│")[-1])
    assert num_deferred > 0
    assert out.count("«") - out.count("«token»") == num_deferred


@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param(("layer-skip", "--skip-layers", "1"), id="layer-skip", marks=pytest.mark.slow),
        pytest.param(("draft-model", "--draft-model", "itself"), id="draft-model"),
    ],
)
def test_model_drafters_and_a_prompt_file(fly_jax, model, tmp_path, drafter):
    drafter = [model if each == "itself" else each for each in drafter]
    path = tmp_path / "prompt.txt"
    path.write_text("hello hello", encoding="utf-8-sig")
    status, out, _ = generate(fly_jax, model, "--json", "--prompt-file", path, "--raw", "--drafter", *drafter)
    assert status == 0
    assert [prompt["prompt"] for prompt in json.loads(out)["prompts"]] == [PROMPT, "hello hello"]
    results = json.loads(out)["prompts"][1]["results"]
    if drafter[0] == "draft-model":
        assert results["standard"]["token_ids"] == results["target-only"]["token_ids"]
        assert results["standard"]["acceptance_rate"] == 1.0
    else:
        assert results["standard"]["num_draft_tokens"] > 0


@pytest.mark.slow
def test_the_length_ends_at_the_draft_models_context(fly_jax, model, tmp_path):
    draft = write_model(tmp_path / "draft", max_position_embeddings=250)
    drafting = ("--drafter", "draft-model", "--draft-model", draft)
    arguments = ("--raw", "--prompt", "hello " * 30, "--max-tokens", 170, "--json", *drafting)
    status, out, err = fly_jax("generate", "--model", model, *arguments)
    assert status == 0, err
    document = json.loads(out)
    (prompt,) = document["prompts"]
    # Rounded up to 256 it would be more than the draft model holds.
    assert 192 < prompt["num_prompt_tokens"] + 170 <= 250
    assert document["config"]["max_model_len"] == 250
    assert prompt["results"]["standard"]["token_ids"] == prompt["results"]["target-only"]["token_ids"]


def test_interrupt_prints_what_is_finished(fly_jax, model, monkeypatch):
    calls = []

    def generate_or_be_interrupted(self, prompt_token_ids, **arguments):
        calls.append(None)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return TWO_TOKENS

    monkeypatch.setattr(Generator, "warm_up", lambda self, **arguments: None)
    monkeypatch.setattr(Generator, "generate", generate_or_be_interrupted)
    status, out, _ = generate(fly_jax, model, "--prompt", "hello", "--prompt", "123", "--json")
    assert status == 130
    document = json.loads(out)
    assert document["interrupted"]
    assert [list(prompt["results"]) for prompt in document["prompts"]] == [MODES, MODES[:1]]
    assert [each["num_tokens"] for each in document["totals"].values()] == [2, 2, 2]
    calls.clear()
    status, out, _ = generate(fly_jax, model, "--prompt", "hello")
    assert status == 130
    assert out.count("tokens/cycle") == 3  # a table for each prompt, and one for both


def test_options_reach_the_generator(fly_jax, model, monkeypatch):
    seen = []
    monkeypatch.setattr(Generator, "warm_up", lambda self, **arguments: seen.append((self, arguments)))
    monkeypatch.setattr(Generator, "generate", lambda self, prompt, **arguments: seen.append(arguments) or TWO_TOKENS)
    sampling = ("--temperature", 0.5, "--top-k", 7, "--min-p", 0.1, "--seed", 3)
    drafting = ("--drafter", "layer-skip", "--draft-sample-method", "probabilistic")
    status, *_ = generate(fly_jax, model, *sampling, *drafting, "--fly-entropy-threshold", 0.7)
    assert status == 0
    (target_only, _), (standard, _), (fly, warm_up), *runs = seen
    assert target_only._drafter is None
    assert standard is fly
    assert fly._drafter == LayerSkip((1,), 4, "probabilistic")
    assert warm_up["config"] == FlyConfig(1, 0.7, 3)
    assert [run["config"] for run in runs] == [None, None, FlyConfig(1, 0.7, 3)]
    for run in runs:
        # Left out where it is off, because a mask costs passes over the vocabulary.
        assert run["sampling"] == warm_up["sampling"] == SamplingParams(temperature=0.5, top_k=7, min_p=0.1)
        assert run["seed"] == 3
        assert run["max_tokens"] == 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fly-window-size", 16], "fly_window_size must be less than num_speculative_tokens (16), got 16"),
        (["--num-speculative-tokens", 1], "num_speculative_tokens must be at least 2"),
        (["--fly-entropy-threshold", "nan"], "fly_entropy_threshold must be at least 0"),
        (["--fly-entropy-top-k", 0], "fly_entropy_top_k must be at least 1, got 0"),
        (["--draft-sample-method", "probabilistic"], "needs a drafter that samples, got --drafter ngram"),
        (["--drafter", "draft-model"], "--drafter draft-model needs --draft-model PATH"),
        (["--draft-model", "somewhere"], "--draft-model needs --drafter draft-model, got ngram"),
        (["--skip-layers", "1"], "--skip-layers needs --drafter layer-skip, got ngram"),
        (["--drafter", "layer-skip", "--skip-layers", "a"], "--skip-layers must be layer numbers like 12,13,14"),
        (["--drafter", "layer-skip", "--skip-layers", "7"], "skip_layers must be between 0 and 1, got 7"),
        (["--prompt-lookup-min", 4], "prompt_lookup_min must be at least 1 and at most prompt_lookup_max (3), got 4"),
        (["--prompt-file", "missing.txt"], "--prompt-file missing.txt cannot be read"),
        (["--prompt", " "], "The prompt is empty"),
        (["--prompt", "hello " * 300], "shorten it to at most 255"),
        (["--model", "missing.gguf"], "missing.gguf"),
    ],
)
def test_what_a_user_can_fix_is_one_line(fly_jax, model, options, message):
    prompt = [] if "--prompt" in options else ["--prompt", PROMPT]
    status, out, err = fly_jax("generate", "--model", model, *prompt, *options)
    assert status == 2
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.startswith("fly-jax: error: ")]
    assert message in line
    assert err.splitlines()[-1] == line
    assert "Traceback" not in err


def test_a_trace_is_recorded_beside(fly_jax, model, tmp_path):
    path = tmp_path / "trace.npz"
    arguments = ("--fly-entropy-threshold", 0, "--trace", path, "--trace-mode", "fly")
    status, out, err = generate(fly_jax, model, "--json", *arguments)
    assert status == 0
    assert "trace: fly" in err
    (prompt,) = json.loads(out)["prompts"]
    trace, result = load_trace(path), prompt["results"]["fly"]
    assert trace.meta["config"] == {"window_size": 1, "entropy_threshold": 0.0, "entropy_top_k": 3}
    assert (trace.meta["source"], trace.meta["drafter"]) == ("fly-jax generate", "ngram")
    assert len(trace.cycles["cycle"]) == result["num_cycles"]
    assert int(trace.cycles["num_accepted"].sum()) == result["num_accepted"]
    assert int(trace.cycles["num_draft_tokens"].sum()) == result["num_draft_tokens"]
    assert num_reproduced(trace) == len(trace.cycles["cycle"])


@pytest.mark.parametrize("options", [["--temperature", "-1"], ["--top-p", "1.5"], ["--drafter", "oracle"], ["--nope"]])
def test_options_out_of_range_exit_with_2(fly_jax, model, options):
    status, out, err = fly_jax("generate", "--model", model, *options)
    assert status == 2
    assert out == ""
    assert options[0] in err


def test_version_and_help(fly_jax):
    status, out, _ = fly_jax("--version")
    assert status == 0
    assert out.startswith("fly-jax 0.")
    status, out, _ = fly_jax("generate", "--help")
    assert status == 0
    for option in ("--num-speculative-tokens", "--fly-window-size", "--draft-sample-method", "--min-p", "--json"):
        assert option in out


def test_the_command_line_knows_every_drafter():
    # Help must not import what decoding does, so the names stand in both.
    assert tuple(options.DrafterName) == DRAFTERS
    assert tuple(options.DraftSampleMethod) == DRAFT_SAMPLE_METHODS


@pytest.mark.parametrize("missing", ["typer", "rich", "rich.console"])
def test_without_the_demo_extra_it_says_what_to_install(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; import fly_jax.cli.app"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "pip install 'fly-jax[demo]'" in done.stderr


def test_bench_decode_measures_every_ratio(fly_jax, model, monkeypatch):
    monkeypatch.setattr("fly_jax.bench.decode.BUILTIN_PROMPTS", command.prompts_of(["hello"], None))
    monkeypatch.setattr("fly_jax.bench.decode.MAX_MODEL_LEN", 128)
    monkeypatch.setattr("fly_jax.bench.decode.MAX_TOKENS", 8)
    status, out, _ = fly_jax("bench", "decode", "--model", model, "--rounds", 2, "--json")
    assert status == 0
    document = json.loads(out)
    assert [each["goal"] for each in document["ratios"]] == [1.5, 1.8, None, 0.04, 2.0]
    for each in document["ratios"]:
        assert all(math.isfinite(value) for value in each["values"])
        assert each["definition"]
    steps = {"floor", "one", "many", "cycle", "products of one", "products of many"}
    assert set(document["milliseconds"]) == steps


def test_tokens_that_share_a_character_are_shown_by_the_last_of_them():
    text = "a→b"
    tokens = list(text.encode())

    def decode(token_ids):
        return bytes(token_ids).decode("utf-8", errors="replace")

    assert token_pieces(decode, tokens) == ["a", "", "", "→", "b"]
    assert "".join(token_pieces(decode, tokens[:2])) == "a\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [([], [], 0), ([1, 2, 3], [1, 2, 3], 0), ([1, 9, 3], [1, 2, 3], 1), ([1, 2, 3], [1, 3], 1), ([], [1, 2], 2)],
)
def test_num_differing_counts_edits(first, second, expected):
    assert num_differing(first, second) == expected


def test_texts_drawn_at_random_are_not_compared_token_by_token(fly_jax, model, monkeypatch):
    monkeypatch.setattr(Generator, "warm_up", lambda self, **arguments: None)
    monkeypatch.setattr(Generator, "generate", lambda self, prompt, **arguments: TWO_TOKENS)
    status, out, _ = fly_jax(
        "generate", "--model", model, "--prompt", "hello", "--max-tokens", 4, "--temperature", 1, "--json",
        "--fly-entropy-threshold", "inf", "--num-speculative-tokens", 3,
    )  # fmt: skip
    assert status == 0
    document = json.loads(out, parse_constant=pytest.fail)
    assert document["config"]["fly_entropy_threshold"] == "inf"
    assert {each["num_differing"] for each in document["totals"].values()} == {None}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--temperature", "inf"], "--temperature must be a finite number"),
        (["--drafter", "draft-model"], "--drafter draft-model needs --draft-model PATH"),
        (["--prompt-lookup-min", "5"], "prompt_lookup_min must be at least 1 and at most prompt_lookup_max"),
    ],
)
def test_options_are_checked_before_anything_is_loaded(fly_jax, tmp_path, options, words):
    status, _, errors = fly_jax("generate", "--model", tmp_path / "missing.gguf", *options)
    assert status == 2
    assert words in errors


def test_an_interrupt_leaves_at_once_and_says_so(tmp_path):
    code = (
        "import sys, fly_jax.cli.app as cli, fly_jax.cli.generate as command\n"
        "def interrupt(*options, **more): raise KeyboardInterrupt\n"
        "command.generate = interrupt\n"
        "sys.argv = ['fly-jax', 'generate']\n"
        "cli.entry_point()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr.endswith("fly-jax: interrupted\n")
