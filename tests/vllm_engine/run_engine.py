"""Generates with a vLLM engine: `python run_engine.py SETTINGS.json RESULT.json`.

Settings (* required):
    model*: folder of the target.
    prompts*: texts or lists of token ids.
    sampling*: arguments of `SamplingParams`, for all prompts, or a list with those of each.
    speculative_config: as vLLM takes it, or null.
    in_process: true for the engine in this process, false (default) for vLLM's own processes.
    engine: more arguments of `LLM`, which replace those below.

    record: a folder for every verified step (in process, FLY_JAX_VLLM=replace), as the cross-check writes them.

    mend: true to mend vLLM's sampling on a CPU (in process), as FLY_JAX_VLLM=replace does by itself.

Result: `outputs`, per prompt `tokens` and `text`; `metrics` of the speculation; `import_s`, `start_s` (with the import)
and `generate_s`; `versions`; and in process `counters` of the plugin, if it is loaded.
"""

import json
import os
import sys
import time
from importlib.metadata import version


def main(settings_path, result_path):
    with open(settings_path) as file:
        settings = json.load(file)
    in_process = settings.get("in_process", False)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads on a busy machine wait for each other: ten times slower
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # where the workers' errors are, too
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    begin = time.perf_counter()
    from vllm import LLM, SamplingParams  # reads the environment

    imported = time.perf_counter()
    arguments = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 1 << 28,  # given, it saves the warm-up that finds out how much fits
        "enforce_eager": True,  # else torch.compile runs
        "disable_log_stats": False,  # else there are no metrics
        **settings.get("engine", {}),
    }
    llm = LLM(settings["model"], speculative_config=settings.get("speculative_config"), **arguments)
    started = time.perf_counter()

    if settings.get("mend"):
        from fly_jax.bridges.vllm import V1_MODULE, cpu_repairs

        cpu_repairs.install(sys.modules[V1_MODULE])
    if settings.get("record"):
        _record_steps(settings["record"])
    prompts = [each if isinstance(each, str) else {"prompt_token_ids": each} for each in settings["prompts"]]
    sampling = settings["sampling"]
    each_own = isinstance(sampling, list)
    sampling = [SamplingParams(**one) for one in sampling] if each_own else SamplingParams(**sampling)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    ended = time.perf_counter()

    result = {
        "outputs": [{"tokens": list(each.outputs[0].token_ids), "text": each.outputs[0].text} for each in outputs],
        "metrics": _metrics(llm),
        "import_s": imported - begin,
        "start_s": started - begin,
        "generate_s": ended - started,
        "versions": {"python": sys.version.split()[0], "vllm": _vllm_version(), "torch": version("torch")},
    }
    plugin = sys.modules.get("fly_jax.bridges.vllm.plugin")
    if in_process and plugin is not None:
        result["counters"] = plugin.counters()
    with open(result_path, "w") as file:
        json.dump(result, file)


def _record_steps(folder):
    from pathlib import Path

    from fly_jax.bridges.vllm import crosscheck, v1

    verify = v1.verify

    def recorded(step):
        verification, totals = verify(step)
        tokens = v1.emitted(verification, len(step.num_draft_tokens), max(step.num_draft_tokens, default=0))
        crosscheck.save(Path(folder), step, tokens, tokens, [])
        return verification, totals

    v1.verify = recorded


def _metrics(llm):
    prefix = "vllm:spec_decode_num_"
    found = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(prefix):
            found[metric.name.removeprefix(prefix)] = metric.values if hasattr(metric, "values") else metric.value
    return found


def _vllm_version():
    import vllm

    return vllm.__version__


if __name__ == "__main__":  # vLLM's processes import this file
    main(*sys.argv[1:])
