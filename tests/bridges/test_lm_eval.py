"""The model `fly_jax` inside EleutherAI's lm-evaluation-harness: local tasks, no network."""

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("lm_eval")

# Read when these packages are imported.
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import tiny_models
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from fly_jax.bridges.lm_eval import FlyJaxLM
from fly_jax.bridges.lm_eval.options import GenerationSettings, ModelArgs
from fly_jax.config import SamplingParams
from fly_jax.decode.decoder_config import DecoderConfig
from fly_jax.decode.generate import Generator
from fly_jax.decode.model import KVCache
from fly_jax.errors import UserError

pytestmark = pytest.mark.lm_eval

ROOT = Path(__file__).parents[2]
DOCS = [
    {"question": "hello world, hello 123 hello world, hello", "choices": [" world", " 123", "x"], "answer": 0},
    {"question": "1 2 3 1 2 3 1 2", "choices": [" 3", " hello"], "answer": 0},
    {"question": "hell", "choices": ["o", "hello hello", "o w"], "answer": 2},
    {"question": "the end of the world, the end of the", "choices": [" world", " end"], "answer": 0},
    {"question": "12 hello 12 hello 12", "choices": [" hello", "123"], "answer": 1},
]
TASKS = {
    "local_generate": """
        output_type: generate_until
        doc_to_target: "{{choices[answer]}}"
        generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 20, do_sample: false}
        metric_list: [{metric: exact_match}]
    """,
    "local_choice": """
        output_type: multiple_choice
        doc_to_target: "{{answer}}"
        doc_to_choice: "{{choices}}"
        target_delimiter: ""
        metric_list: [{metric: acc}]
    """,
    "local_perplexity": """
        output_type: loglikelihood_rolling
        doc_to_target: "{{question}}"
        metric_list: [{metric: word_perplexity}]
    """,
}
TINY = {"max_gen_toks": 24, "num_speculative_tokens": 4, "batch_size": 2}
FLY = {"rejection_sample_method": "fly", "fly_window_size": 1, "fly_entropy_threshold": 0.0}


def write_tasks(folder):
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    for name, text in TASKS.items():
        lines = [line.strip() for line in text.strip().splitlines()]
        if not any(line.startswith("doc_to_text") for line in lines):
            lines.append("doc_to_text: " + ('""' if name == "local_perplexity" else '"{{question}}"'))
        head = ["dataset_path: json", "test_split: test", "dataset_kwargs:", "  data_files:"]
        (folder / f"{name}.yaml").write_text(
            "\n".join([f"task: {name}", *head, f"    test: {folder}/docs.jsonl", *lines])
        )
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    config = DecoderConfig.from_hf(tiny_models.CONFIG_JSON)
    tiny_models.write_folder(folder, tiny_models.CONFIG_JSON, tiny_models.random_tensors(config))
    return str(folder)


@pytest.fixture(scope="module")
def lm(model):
    return FlyJaxLM(model=model, **TINY)


@pytest.fixture(autouse=True)
def _datasets_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def evaluate(tasks, names, lm="fly_jax", model_args=None, **arguments):
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return simple_evaluate(lm, model_args, tasks=names, task_manager=manager, bootstrap_iters=0, **arguments)


def texts_of(results, task="local_generate"):
    return [sample["resps"][0][0] for sample in sorted(results["samples"][task], key=lambda sample: sample["doc_id"])]


def generation(context, **kwargs):
    return Instance("generate_until", {}, (context, kwargs), 0)


def test_generation_through_the_harness(model, tasks):
    texts, counters = {}, {}
    for name, options in {
        "target-only": {"drafter": "none"},
        "standard": {},
        "layer-skip": {"drafter": "layer-skip", "skip_layers": [1]},
        "fly": FLY,
    }.items():
        results = evaluate(tasks, ["local_generate"], model_args={"model": model, **TINY, **options})
        texts[name] = texts_of(results)
        counters[name] = results["config"]["fly_jax"]["counters"]
        expected = [text == doc["choices"][doc["answer"]] for text, doc in zip(texts[name], DOCS, strict=True)]
        assert results["results"]["local_generate"]["exact_match,none"] == np.mean(expected)
        assert results["config"]["fly_jax"]["options"]["max_model_len"] == 256
        json.dumps(results["config"]["fly_jax"], allow_nan=False)
    assert texts["standard"] == texts["layer-skip"] == texts["target-only"]
    assert all(texts["standard"])
    assert texts["fly"] != texts["standard"]
    assert counters["target-only"]["tokens_per_cycle"] == 1.0
    assert counters["standard"]["num_deferred"] == counters["target-only"]["num_draft_tokens"] == 0
    assert counters["fly"]["num_deferred"] > 0
    assert counters["fly"]["num_tokens"] == 20 * len(DOCS)
    assert counters["standard"]["tokens_per_cycle"] > 1


def test_scoring_through_the_harness(lm, tasks):
    results = evaluate(tasks, ["local_choice", "local_perplexity"], lm)
    right = []
    for sample in results["samples"]["local_choice"]:
        doc = sample["doc"]
        expected = [reference(lm, doc["question"], choice) for choice in doc["choices"]]
        got = [tuple(each[0]) for each in sample["resps"]]
        np.testing.assert_allclose([value for value, _ in got], [value for value, _ in expected], rtol=1e-4)
        assert [greedy for _, greedy in got] == [greedy for _, greedy in expected]
        right.append(np.argmax([value for value, _ in expected]) == doc["answer"])
    assert results["results"]["local_choice"]["acc,none"] == np.mean(right)
    total = sum(reference(lm, "", doc["question"])[0] for doc in DOCS)
    words = sum(len(doc["question"].split()) for doc in DOCS)
    assert results["results"]["local_perplexity"]["word_perplexity,none"] == pytest.approx(
        np.exp(-total / words), rel=1e-4
    )


@jax.jit
def all_log_probs(decoder, token_ids):
    cache = KVCache.zeros(decoder.config, *token_ids.shape)
    return jax.nn.log_softmax(decoder(token_ids, cache)[0])


def reference(lm, context, continuation):
    """One plain forward pass."""
    start = lm.tok_encode(context) if context else [lm.prefix_token_id]
    rest = lm.tok_encode(context + continuation)[len(start) if context else 0 :]
    token_ids = np.zeros((1, 64), np.int32)
    token_ids[0, : len(start) + len(rest)] = [*start, *rest]
    rows = np.asarray(all_log_probs(lm._loaded.decoder, token_ids), np.float64)[0, len(start) - 1 :][: len(rest)]
    return sum(row[token_id] for row, token_id in zip(rows, rest, strict=True)), rows.argmax(1).tolist() == rest


def test_order_batches_and_seeds(model):
    contexts = ["hello " * n for n in (1, 9, 3, 30, 5)]
    kinds = [
        {"until": ["\n"], "max_gen_toks": 6},
        {"do_sample": True, "temperature": 0.9, "top_k": 20, "max_gen_toks": 9},
    ]
    requests = [generation(context, **kinds[i % 2]) for i, context in enumerate(contexts)]
    lm = FlyJaxLM(model=model, **(TINY | {"batch_size": 4}))
    together = lm.generate_until(requests, disable_tqdm=True)
    options = lm.options
    for i, request in enumerate(requests):
        lm.options = dataclasses.replace(options, seed=i)
        assert lm.generate_until([request], disable_tqdm=True) == together[i : i + 1]
    repeated = lm.generate_until([requests[1]] * 4, disable_tqdm=True)
    assert len(set(repeated)) > 1


def test_shapes_are_compiled_once(lm):
    lm.generate_until([generation("hello " * n, max_gen_toks=5) for n in (1, 8, 20)], disable_tqdm=True)
    (generator,) = (each for each in lm._generators.values() if each._cycle._cache_size())
    compiled = generator._cycle._cache_size(), generator._prefill._cache_size()
    lm.generate_until([generation("hello 123 " * n, max_gen_toks=7, until=["x"]) for n in (2, 5)], disable_tqdm=True)
    assert (generator._cycle._cache_size(), generator._prefill._cache_size()) == compiled


REPETITIVE = "ab ab ab"  # the tiny model answers with letters, and with accepted drafts


def test_texts_end_before_a_stop_string(lm, monkeypatch):
    (whole,) = lm.generate_until([generation(REPETITIVE, max_gen_toks=12)], disable_tqdm=True)
    stop = whole[2:4]
    generations = []
    decode = Generator.generate_batch
    monkeypatch.setattr(Generator, "generate_batch", lambda *a, **k: generations.extend(decode(*a, **k)) or generations)
    (text,) = lm.generate_until([generation(REPETITIVE, max_gen_toks=12, until=[stop, "absent"])], disable_tqdm=True)
    assert text == whole[: whole.index(stop)] != ""
    assert generations[0].finish_reason == "stop"
    assert lm.tokenizer.decode(generations[0].token_ids) == text + stop


def test_a_stop_string_inside_an_accepted_block_ends_the_counts_too(lm, model):
    (whole,) = lm.generate_until([generation(REPETITIVE)], disable_tqdm=True)
    stop, texts, counters = whole[2:4], [], []
    for options in (
        {"drafter": "none"},
        {"drafter": "draft-model", "draft_model": model, "num_speculative_tokens": 8},
    ):
        each = FlyJaxLM(model=model, **{**TINY, **options})
        texts += each.generate_until([generation(REPETITIVE, until=[stop])], disable_tqdm=True)
        counters.append(each.get_model_info()["fly_jax"]["counters"])
    assert texts == [whole[:2]] * 2
    assert [each["num_tokens"] for each in counters] == [4, 4]
    assert [each["num_cycles"] for each in counters] == [4, 2]
    assert (counters[1]["num_accepted"], counters[1]["num_draft_tokens"]) == (3, 3)


def test_special_tokens_end_a_text(lm, monkeypatch):
    seen = []
    decode = Generator.generate_batch
    monkeypatch.setattr(Generator, "generate_batch", lambda *a, **k: seen.append(k["eos_token_ids"]) or decode(*a, **k))
    lm.generate_until([generation("hello", until=["<|im_start|>", "hello"])], disable_tqdm=True)
    ids = [lm.tokenizer.tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>", "<|im_start|>")]
    assert seen == [frozenset(ids)]


def test_long_prompts_lose_their_beginning(model, caplog, monkeypatch):
    lm = FlyJaxLM(model=model, max_model_len=32, **TINY)
    short = "hello world" * 2
    (expected,) = lm.generate_until([generation(short, max_gen_toks=10)], disable_tqdm=True)
    token_ids = lm.tok_encode(short)
    monkeypatch.setattr(logging.getLogger("lm_eval"), "propagate", True)
    caplog.clear()
    text = "x" * 60 + short
    (cut,) = lm.generate_until([generation(text, max_gen_toks=32 - len(token_ids))], disable_tqdm=True)
    assert cut.startswith(expected) or expected.startswith(cut)
    scored = lm._loglikelihood_tokens([(None, [5] * 50 + token_ids, [7, 8])], disable_tqdm=True)
    kept = 33 - 2
    assert scored == lm._loglikelihood_tokens([(None, ([5] * 50 + token_ids)[-kept:], [7, 8])], disable_tqdm=True)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "1 of 1 prompts are cut at their beginning: they do not fit max_model_len=32."
    ] * 2
    with pytest.raises(UserError, match="leaves no room for a prompt in max_model_len=32: raise that by at least 1,"):
        lm.generate_until([generation("hello", max_gen_toks=32)], disable_tqdm=True)


def test_a_text_longer_than_the_context_is_scored_in_pieces(model):
    lm = FlyJaxLM(model=model, max_model_len=16, **TINY)
    token_ids = lm.tok_encode(text := "the quick brown fox jumps over the lazy dog")
    windows = [([lm.prefix_token_id], token_ids[:16])]
    for begin in range(16, len(token_ids), 16):
        end = min(begin + 16, len(token_ids))
        windows.append((token_ids[end - 17 : begin], token_ids[begin:end]))
    expected = sum(value for value, _ in lm._loglikelihood_tokens([(None, *w) for w in windows], disable_tqdm=True))
    request = Instance("loglikelihood_rolling", {}, (text,), 0)
    (got,) = lm.loglikelihood_rolling([request], disable_tqdm=True)
    assert got == pytest.approx(expected, rel=1e-6)


def test_answers_are_cached_for_the_next_run(model, tasks, tmp_path):
    names = ["local_generate", "local_choice", "local_perplexity"]
    arguments = {"model_args": {"model": model, **TINY}, "use_cache": str(tmp_path / "answers")}
    first, second = (evaluate(tasks, names, **arguments) for _ in range(2))
    assert first["results"] == second["results"]
    assert first["config"]["fly_jax"]["counters"]["num_tokens"] > 0
    assert second["config"]["fly_jax"]["counters"] is None


def test_chat_templates(lm, model, tasks):
    messages = [{"role": "user", "content": "hello"}]
    assert lm.apply_chat_template(messages) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    begun = [*messages, {"role": "assistant", "content": "hell"}]
    assert lm.apply_chat_template(begun, add_generation_prompt=False).endswith("<|im_start|>assistant\nhell")
    for words in ("im", "<|im_end|>", "\n", "assistant", "a ", "{{ x }}", "é\t", "hello"):
        begun = [*messages, {"role": "assistant", "content": words}]
        expected = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n" + words
        assert lm.apply_chat_template(begun, add_generation_prompt=False) == expected
    assert lm.chat_template(True) == tiny_models.CHAT_TEMPLATE
    assert lm.tokenizer_name == Path(model).name
    results = evaluate(tasks, ["local_generate"], lm, apply_chat_template=True)
    (sample,) = (sample for sample in results["samples"]["local_generate"] if sample["doc_id"] == 1)
    assert sample["arguments"][0][0] == lm.apply_chat_template([{"role": "user", "content": DOCS[1]["question"]}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 3}, "window is not an option of the model fly_jax; there are model, drafter,"),
        ({"drafter": "oracle"}, "drafter must be one of ngram, draft-model, layer-skip, none, got 'oracle'"),
        ({"rejection_sample_method": "block"}, "rejection_sample_method must be one of standard, fly, got 'block'"),
        ({"drafter": "none", **FLY}, "rejection_sample_method=fly needs draft tokens, got drafter=none"),
        ({"fly_window_size": 3}, "fly_window_size has no effect without rejection_sample_method=fly"),
        ({**FLY, "fly_window_size": 16}, "fly_window_size must be less than num_speculative_tokens (16), got 16"),
        ({"batch_size": "auto"}, "batch_size must be an integer from 1 to 2**32 - 1, got 'auto'"),
        ({"max_gen_toks": 0}, "max_gen_toks must be an integer from 1 to 2**32 - 1, got 0"),
        ({"seed": -1}, "seed must be an integer from 0 to 2**32 - 1, got -1"),
        ({"draft_model": "x"}, "draft_model needs drafter draft-model, got ngram"),
        ({"max_model_len": 257}, "max_model_len must be between 2 and the model's context of 256 tokens, got 257"),
        ({"model": "missing.gguf"}, "missing.gguf"),
    ],
)
def test_options_that_are_refused(model, options, message):
    with pytest.raises(UserError) as error:
        FlyJaxLM(**({"model": model} | options))
    assert message in str(error.value)


def test_options_as_the_harness_parses_them():
    given = ModelArgs.from_harness({"batch_size": "8", "drafter": "layer-skip", "skip_layers": [1, 2]})
    assert (given.requests_together(), given.decode_options().drafter.skip_layers) == (8, (1, 2))
    for layers, expected in ((3, (3,)), ("1,2", (1, 2))):
        given = ModelArgs.from_harness({"drafter": "layer-skip", "skip_layers": layers})
        assert given.decode_options().drafter.skip_layers == expected


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, GenerationSettings((), 7, SamplingParams())),
        ({"until": "\n", "max_new_tokens": 3}, GenerationSettings(("\n",), 3, SamplingParams())),
        ({"until": ["", "x"]}, GenerationSettings(("x",), 7, SamplingParams())),
        ({"temperature": 0.0, "top_p": 0.9}, GenerationSettings((), 7, SamplingParams())),
        ({"do_sample": True}, GenerationSettings((), 7, SamplingParams(temperature=1.0))),
        ({"do_sample": False, "temperature": 0.7}, GenerationSettings((), 7, SamplingParams())),
        (
            {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "num_beams": 1},
            GenerationSettings((), 7, SamplingParams(temperature=0.5, top_p=0.9, top_k=5)),
        ),
    ],
)
def test_settings_of_a_task(kwargs, expected):
    assert GenerationSettings.from_task(kwargs, 7) == expected


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"repetition_penalty": 1.1}, "generation_kwargs has repetition_penalty, which is not available here"),
        ({"num_beams": 4}, "beam search is not available here"),
        ({"do_sample": True, "top_k": "many"}, "generation_kwargs has top_k='many': it must be a number"),
    ],
)
def test_settings_that_are_refused(kwargs, message):
    with pytest.raises(UserError, match=message):
        GenerationSettings.from_task(kwargs, 7)


def command_line(tasks, tmp_path, *arguments):
    environment = os.environ | {"HF_HOME": str(tmp_path / "hf"), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "fly_jax.bridges.lm_eval",
            "--model",
            "fly_jax",
            "--include_path",
            str(tasks),
            *arguments,
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment,
    )


def test_the_command_line(model, tasks, tmp_path):
    options = f"model={model},drafter=layer-skip,skip_layers=[1],num_speculative_tokens=4,rejection_sample_method=fly"
    done = command_line(
        tasks, tmp_path, "--tasks", "local_generate,local_choice", "--model_args", options, "--batch_size", "3"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for row in (r"Tasks\s*\|Version\|Filter", r"local_generate\|.*exact_match", r"local_choice\s*\|.*acc "):
        assert re.search(rf"^\|\s*{row}", done.stdout, re.MULTILINE)
    assert "FLy is lossy" in done.stderr
    assert "tokens/cycle" in done.stderr
    done = command_line(tasks, tmp_path, "--tasks", "local_generate", "--model_args", f"model={model},nope=1")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("fly-jax: error: nope is not an option of the model fly_jax")


def test_the_readmes_task_is_read_from_the_repository_root(lm, monkeypatch):
    monkeypatch.chdir(ROOT)
    results = evaluate("docs/lm_eval", ["repeat"], lm=lm)
    assert results["n-samples"]["repeat"]["effective"] == 12


@pytest.mark.model
def test_the_real_model(tasks):
    texts, results = {}, {}
    for name, options in {"target-only": {"drafter": "none"}, "standard": {}, "fly": FLY}.items():
        model_args = {"num_speculative_tokens": 4, "batch_size": len(DOCS), **options}
        results[name] = evaluate(tasks, ["local_generate"], model_args=model_args)
        texts[name] = texts_of(results[name])
    assert texts["standard"] == texts["target-only"]
    assert texts["standard"][0].startswith(" 123 hello world")
    assert results["fly"]["config"]["fly_jax"]["counters"]["num_deferred"] > 0
    assert "135M" in results["standard"]["config"]["fly_jax"]["options"]["model"]
    choice = evaluate(tasks, ["local_choice"], model_args={"batch_size": 4})
    samples = sorted(choice["samples"]["local_choice"], key=lambda sample: sample["doc_id"])
    chosen = [np.argmax([each[0][0] for each in sample["resps"]]) for sample in samples]
    assert chosen == [1, 0, 0, 0, 0]  # it goes on with what stood there before
