"""`fly-jax generate`: its options read and checked, the run, what it prints."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fly_jax.cli.app import INTERRUPTED
from fly_jax.cli.options import DrafterName, DraftSampleMethod

if TYPE_CHECKING:
    from fly_jax.config import FlyConfig, SamplingParams
    from fly_jax.decode.checkpoints.load import LoadedModel
    from fly_jax.decode.comparison import Comparison, PromptRun
    from fly_jax.decode.drafters import Drafter
    from fly_jax.decode.prompts import Prompt
    from fly_jax.decode.vocab import VocabMapping
    from fly_jax.traces.file import TraceWriter

logger = logging.getLogger("fly_jax")


def generate(options: Mapping[str, Any]) -> None:
    """Runs the command with the options as given; a stopped run prints what it finished and exits with status 130."""
    from fly_jax.cli.tables import LEGEND, document, progress_bars, prompt_table, totals_table
    from fly_jax.decode.comparison import prepare
    from fly_jax.decode.recording import save_trace, trace_writer

    console, out = Console(stderr=True), Console()
    prompts, sampling, config = prompts_of(options), sampling_params(options), fly_config(options)
    check_drafter_options(options)
    logger.warning("FLy is lossy: its text may differ from what the target alone would write.")
    with progress_bars(console) as report:
        loaded = load(options["model"], report)
        drafter = make_drafter(options, loaded, report)
        print_vocabularies(drafter, console)
        comparison = prepare(
            loaded,
            drafter,
            prompts,
            config=config,
            sampling=sampling,
            report=report,
            **{name: options[name] for name in ("max_tokens", "seed", "raw")},
        )
    writer = trace_writer(options, loaded.name, comparison.modes[options["trace_mode"]][1], source="fly-jax generate")
    runs: list[PromptRun] = []
    interrupted = False
    for i in range(len(prompts)):
        with progress_bars(console) as report:
            run, interrupted = comparison.run(i, report)
        if run.generations:
            runs.append(run)
        if run.generations and not options["json_output"]:
            out.print(prompt_table(run))
        if interrupted:
            break
    if options["json_output"]:
        print(
            json.dumps(
                document(runs, config=_settings(options, comparison), interrupted=interrupted),
                indent=2,
                allow_nan=False,
            )
        )
    elif (table := totals_table(runs)) is not None:
        out.print(table)
        out.print(LEGEND, style="dim")
    if writer is not None and not interrupted:
        with progress_bars(console) as report:
            interrupted = not _record(writer, options, comparison, report)
        if not interrupted:
            save_trace(writer, options["trace"], console)
    if interrupted:
        raise SystemExit(INTERRUPTED)


def load(path: str | None, report: Callable[[str, float], None]) -> LoadedModel:
    """The model at `path`, or the default one."""
    from fly_jax.decode.checkpoints.load import load_model

    if path is None:
        from fly_jax.decode.checkpoints.default import default_model_path

        path = str(default_model_path(progress=report))
    return load_model(path, progress=report)


def prompts_of(options: Mapping[str, Any]) -> list[Prompt]:
    """The prompts given as text and as a file, or the built-in ones."""
    from fly_jax.decode.prompts import BUILTIN_PROMPTS, Prompt
    from fly_jax.errors import UserError

    texts = list(options["prompt"] or [])
    if options["prompt_file"] is not None:
        try:
            texts.append(Path(options["prompt_file"]).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--prompt-file {options['prompt_file']} cannot be read: {error}.") from error
    if any(not text.strip() for text in texts):
        raise UserError("The prompt is empty.")
    return [Prompt(f"prompt {i + 1}", text) for i, text in enumerate(texts)] or list(BUILTIN_PROMPTS)


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """How the target samples, from `temperature`, `top_k`, `top_p` and `min_p`."""
    from fly_jax.config import SamplingParams
    from fly_jax.errors import UserError

    if not math.isfinite(options["temperature"]):
        raise UserError(f"--temperature must be a finite number, at least 0, got {options['temperature']}.")
    # What is off is left out: a mask costs passes over the vocabulary also where it keeps everything.
    off = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    given = {name: options[name] for name, value in off.items() if options[name] != value}
    return SamplingParams(**given) if "temperature" in given else SamplingParams()


def fly_config(options: Mapping[str, Any]) -> FlyConfig:
    """FLy's settings, under the names they have in vLLM's `speculative_config`."""
    from fly_jax.config import FlyConfig
    from fly_jax.errors import UserError

    names = ("num_speculative_tokens", "fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k")
    try:
        config = FlyConfig.from_vllm({"rejection_sample_method": "fly", **{name: options[name] for name in names}})
    except (TypeError, ValueError) as error:
        raise UserError(f"{error}.") from error
    assert config is not None
    return config


def check_drafter_options(options: Mapping[str, Any]) -> None:
    """Refuses options that do not go together, before anything is loaded."""
    from fly_jax.decode.drafters import PromptLookup
    from fly_jax.errors import UserError

    name, method = options["drafter"], options["draft_sample_method"]
    for option, needed in (("draft_model", DrafterName.DRAFT_MODEL), ("skip_layers", DrafterName.LAYER_SKIP)):
        if options[option] is not None and name != needed:
            raise UserError(f"--{option.replace('_', '-')} needs --drafter {needed}, got {name}.")
    if name == DrafterName.NGRAM:
        if method != DraftSampleMethod.GREEDY:
            raise UserError(f"--draft-sample-method {method} needs a drafter that samples, got --drafter {name}.")
        PromptLookup(options["num_speculative_tokens"], options["prompt_lookup_max"], options["prompt_lookup_min"])
    if name == DrafterName.DRAFT_MODEL and options["draft_model"] is None:
        raise UserError("--drafter draft-model needs --draft-model PATH.")
    _skip_layers(options["skip_layers"])


def make_drafter(options: Mapping[str, Any], loaded: LoadedModel, report: Callable[[str, float], None]) -> Drafter:
    """The drafter that `check_drafter_options` let pass, its models loaded."""
    from fly_jax.decode.drafters import DraftModel, LayerSkip, PromptLookup, default_skip_layers

    name, k, method = (options[each] for each in ("drafter", "num_speculative_tokens", "draft_sample_method"))
    if name == DrafterName.NGRAM:
        return PromptLookup(k, options["prompt_lookup_max"], options["prompt_lookup_min"])
    if name == DrafterName.LAYER_SKIP:
        layers = _skip_layers(options["skip_layers"]) or default_skip_layers(loaded.config.num_layers)
        return LayerSkip(layers, k, method)
    draft = load(options["draft_model"], report)
    return DraftModel(draft.decoder, k, method, vocab_mapping_of(loaded, draft))


def vocab_mapping_of(target: LoadedModel, draft: LoadedModel) -> VocabMapping | None:
    """Between the two models' vocabularies; None when these are the same, token by token."""
    from fly_jax.decode.vocab import VocabMapping
    from fly_jax.errors import UserError

    ours, theirs = (each.tokenizer.vocabulary(each.config.vocab_size) for each in (target, draft))
    if ours.same_tokens(theirs):
        return None
    try:
        return VocabMapping.between(ours, theirs)
    except ValueError as error:
        raise UserError(f"--draft-model {draft.name}: {error}.") from error


def print_vocabularies(drafter: Drafter, console: Console) -> None:
    """Says how large the intersection is where the draft model has another vocabulary."""
    from fly_jax.decode.drafters import DraftModel

    if isinstance(drafter, DraftModel) and drafter.vocab_mapping is not None:
        mapping = drafter.vocab_mapping
        console.print(
            f"vocabularies: target {mapping.target_vocab_size}, draft {mapping.draft_vocab_size}, "
            f"{mapping.num_common_tokens} tokens in common",
            style="dim",
            highlight=False,
        )


def _record(
    writer: TraceWriter, options: Mapping[str, Any], comparison: Comparison, report: Callable[[str, float], None]
) -> bool:
    """Decodes the prompts once more into the trace; False if the user interrupted it."""
    from fly_jax.decode.recording import record

    generator, config = comparison.modes[options["trace_mode"]]
    count = len(comparison.prompts)
    try:
        record(
            writer,
            generator,
            comparison.prompt_token_ids,
            config=config,
            sampling=comparison.arguments["sampling"],
            max_tokens=[options["max_tokens"]] * count,
            eos_token_ids=comparison.arguments["eos_token_ids"],
            seeds=[options["seed"]] * count,
            batch_size=1,
            report=functools.partial(report, f"trace: {options['trace_mode']}"),
        )
    except KeyboardInterrupt:
        return False
    return True


def _skip_layers(text: str | None) -> tuple[int, ...]:
    from fly_jax.errors import UserError

    if text is None:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--skip-layers must be layer numbers like 12,13,14, got {text!r}.") from None


def _settings(options: Mapping[str, Any], comparison: Comparison) -> dict[str, Any]:
    """The options as given, the model by its own name; JSON has no infinity."""
    given = {name: str(each) if each == math.inf else each for name, each in options.items() if name != "json_output"}
    return {**given, "model": comparison.loaded.name, "max_model_len": comparison.max_model_len}
