"""Starts a real vLLM engine on a CPU, with the plugin or without."""

import functools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import drafts
import model
import torch

from fly_jax.decode.checkpoints import default as default_model

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
FEW_TOKENS = 45
GREEDY_FEW = {**GREEDY, "max_tokens": FEW_TOKENS}


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
