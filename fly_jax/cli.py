"""The command line: `fly-jax generate` and `fly-jax bench ...`.

jax and the model code are imported when a command runs, so that `--help` is quick.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

INSTALL_HINT = "install the demo extra: pip install 'fly-jax[demo]', or -e '.[demo]' in the repository"

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as error:
    raise SystemExit(f"fly-jax: {error.name} is not installed; {INSTALL_HINT}") from None

if TYPE_CHECKING:
    from fly_jax.config import FlyConfig
    from fly_jax.decode.checkpoint import LoadedModel
    from fly_jax.decode.comparison import Comparison, PromptRun
    from fly_jax.decode.drafters import Drafter
    from fly_jax.decode.prompts import Prompt
    from fly_jax.processing import SamplingParams

logger = logging.getLogger("fly_jax")
app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
bench_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure ratios on this machine.")
app.add_typer(bench_app, name="bench")


class DrafterName(enum.StrEnum):
    """Where draft tokens come from."""

    NGRAM = "ngram"
    DRAFT_MODEL = "draft-model"
    LAYER_SKIP = "layer-skip"


class DraftSampleMethod(enum.StrEnum):
    """How a model drafts."""

    GREEDY = "greedy"
    PROBABILISTIC = "probabilistic"


ModelOption = Annotated[
    Path | None,
    typer.Option(help="A GGUF file or a Hugging Face folder. Default: SmolLM2-135M-Instruct, downloaded once."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


class Clock(enum.StrEnum):
    """What a benchmark counts."""

    CPU = "cpu"
    WALL = "wall"


def main() -> None:
    """Runs the command line; problems that a user can fix are one line and exit status 2."""
    from fly_jax.decode.errors import ModelError

    # A model may emit any character; a terminal may not have it.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        app()
    except ModelError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("gguf", "jinja2", "safetensors", "tokenizers"):
            raise
        _fail(f"{error.name} is not installed; {INSTALL_HINT}")


def entry_point() -> None:
    """`main`, for a process of its own: after an interrupt it leaves at once.

    An orderly exit while XLA compiles in another thread crashes the interpreter.
    """
    try:
        main()
    except SystemExit as error:
        if error.code != INTERRUPTED:
            raise
        print("fly-jax: interrupted", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _fail(message: str) -> None:
    print(f"fly-jax: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def _print_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        print(f"fly-jax {version('fly-jax')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """FLy verification for speculative decoding, in JAX."""


@app.command()
def generate(
    model: ModelOption = None,
    drafter: Annotated[DrafterName, typer.Option(help="Where draft tokens come from.")] = DrafterName.NGRAM,
    draft_model: Annotated[Path | None, typer.Option(help="With --drafter draft-model: its file or folder.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated. Default: built-in ones.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file with one prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give the model the prompt as it is, not as a chat.")] = False,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens to generate for a prompt; each step costs time for all.")
    ] = 128,
    num_speculative_tokens: Annotated[int, typer.Option(min=1, help="K: draft tokens a cycle.")] = 16,
    fly_window_size: Annotated[
        int | None,
        typer.Option(help="W: tokens after a deferral that must be accepted. Default: 6, or K - 1 if that is less."),
    ] = None,
    fly_entropy_threshold: Annotated[float, typer.Option(help="Nats from which a mismatch may be deferred.")] = 0.3,
    fly_entropy_top_k: Annotated[int, typer.Option(help="Probabilities the entropy is summed over.")] = 3,
    draft_sample_method: Annotated[
        DraftSampleMethod, typer.Option(help="How a model drafts; n-grams are always greedy.")
    ] = DraftSampleMethod.GREEDY,
    prompt_lookup_max: Annotated[int, typer.Option(min=1, help="Longest n-gram looked up.")] = 3,
    prompt_lookup_min: Annotated[int, typer.Option(min=1, help="Shortest n-gram looked up.")] = 1,
    skip_layers: Annotated[
        str | None, typer.Option(help="With --drafter layer-skip: layers left out, like 12,13,14.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 is off.")] = 0,
    min_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="0 is off.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of all drawing.")] = 0,
    json_output: JsonOption = False,
) -> None:
    """Decode prompts target-only, with standard verification and with FLy, side by side."""
    parameters = dict(locals())
    with _interruptible():
        _generate(
            {name: str(each) if isinstance(each, Path | enum.Enum) else each for name, each in parameters.items()}
        )


@bench_app.command("decode")
def bench_decode(
    model: ModelOption = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 15,
    json_output: JsonOption = False,
) -> None:
    """Decoding steps against their floors: ratios of one interleaved run."""
    with _interruptible():
        from fly_jax.bench.decode import bench_table, measure
        from fly_jax.decode.report import progress_bars, versions

        with progress_bars(Console(stderr=True)) as report:
            loaded = _load(None if model is None else str(model), report)
            result = measure(loaded, rounds=rounds, progress=report)
        if json_output:
            print(json.dumps({"versions": versions(), "model": loaded.name, **result.fields()}, indent=2))
        else:
            Console().print(bench_table(result))


@bench_app.command("verify")
def bench_verify(
    cases: Annotated[
        str, typer.Option(help="Names with commas between them, all, or none (with --growth); a wrong name lists them.")
    ] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 15,
    clock: Annotated[
        Clock,
        typer.Option(
            help="cpu: CPU time of this process over all its threads, which other work on the machine and a lucky "
            "spread over cores hardly change; wall: what a caller waits, which is what counts on an accelerator."
        ),
    ] = Clock.CPU,
    growth: Annotated[bool, typer.Option("--growth", help="Also measure along the batch and the vocabulary.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw --growth into this PNG file (extra: bench).")] = None,
    json_output: JsonOption = False,
) -> None:
    """fly_verify against reading the logits once, and beside other verifiers: ratios of one interleaved run."""
    with _interruptible():
        from fly_jax.bench.verify_command import bench_verify as run

        if not run(
            cases,
            rounds=rounds,
            clock=str(clock),
            growth=growth or plot is not None,
            plot=plot,
            json_output=json_output,
        ):
            raise SystemExit(INTERRUPTED)


@bench_app.command("kernels")
def bench_kernels(
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Compile for every GPU instead, without one (extra: triton).")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 15,
    json_output: JsonOption = False,
) -> None:
    """The GPU kernel against a copy of the logits, XLA and torch; or what it takes, compiled for each GPU."""
    with _interruptible():
        from fly_jax.bench.kernels import bench_kernels as run

        run(compile_only=compile_only, rounds=rounds, json_output=json_output)


def _generate(options: Mapping[str, Any]) -> None:
    from fly_jax.decode.comparison import prepare
    from fly_jax.decode.report import LEGEND, document, progress_bars, prompt_table, totals_table

    console, out = Console(stderr=True), Console()
    prompts, sampling, config = _prompts(options), _sampling(options), _fly_config(options)
    _check_drafter_options(options)
    logger.warning("FLy is lossy: its text may differ from what the target alone would write.")
    with progress_bars(console) as report:
        loaded = _load(options["model"], report)
        comparison = prepare(
            loaded,
            _drafter(options, loaded, report),
            prompts,
            config=config,
            sampling=sampling,
            report=report,
            **{name: options[name] for name in ("max_tokens", "seed", "raw")},
        )
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
    if interrupted:
        raise SystemExit(INTERRUPTED)


def _load(path: str | None, report: Callable[[str, float], None]) -> LoadedModel:
    from fly_jax.decode.checkpoint import load_model

    if path is None:
        from fly_jax.decode.default_model import default_model_path

        path = str(default_model_path(progress=report))
    return load_model(path, progress=report)


def _prompts(options: Mapping[str, Any]) -> list[Prompt]:
    from fly_jax.decode.errors import ModelError
    from fly_jax.decode.prompts import BUILTIN_PROMPTS, Prompt

    texts = list(options["prompt"] or [])
    if options["prompt_file"] is not None:
        try:
            texts.append(Path(options["prompt_file"]).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"--prompt-file {options['prompt_file']} cannot be read: {error}.") from error
    if any(not text.strip() for text in texts):
        raise ModelError("The prompt is empty.")
    return [Prompt(f"prompt {i + 1}", text) for i, text in enumerate(texts)] or list(BUILTIN_PROMPTS)


def _sampling(options: Mapping[str, Any]) -> SamplingParams:
    from fly_jax.decode.errors import ModelError
    from fly_jax.processing import SamplingParams

    if not math.isfinite(options["temperature"]):
        raise ModelError(f"--temperature must be a finite number, at least 0, got {options['temperature']}.")
    # What is off is left out: a mask costs passes over the vocabulary also where it keeps everything.
    off = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    given = {name: options[name] for name, value in off.items() if options[name] != value}
    return SamplingParams(**given) if "temperature" in given else SamplingParams()


def _fly_config(options: Mapping[str, Any]) -> FlyConfig:
    from fly_jax.config import FlyConfig
    from fly_jax.decode.errors import ModelError

    names = ("num_speculative_tokens", "fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k")
    try:
        config = FlyConfig.from_vllm({"rejection_sample_method": "fly", **{name: options[name] for name in names}})
    except (TypeError, ValueError) as error:
        raise ModelError(f"{error}.") from error
    assert config is not None
    return config


def _check_drafter_options(options: Mapping[str, Any]) -> None:
    """Refuses options that do not go together, before anything is loaded."""
    from fly_jax.decode.drafters import PromptLookup
    from fly_jax.decode.errors import ModelError

    name, method = options["drafter"], options["draft_sample_method"]
    for option, needed in (("draft_model", DrafterName.DRAFT_MODEL), ("skip_layers", DrafterName.LAYER_SKIP)):
        if options[option] is not None and name != needed:
            raise ModelError(f"--{option.replace('_', '-')} needs --drafter {needed}, got {name}.")
    if name == DrafterName.NGRAM:
        if method != DraftSampleMethod.GREEDY:
            raise ModelError(f"--draft-sample-method {method} needs a drafter that samples, got --drafter {name}.")
        PromptLookup(options["num_speculative_tokens"], options["prompt_lookup_max"], options["prompt_lookup_min"])
    if name == DrafterName.DRAFT_MODEL and options["draft_model"] is None:
        raise ModelError("--drafter draft-model needs --draft-model PATH.")
    _skip_layers(options["skip_layers"])


def _drafter(options: Mapping[str, Any], loaded: LoadedModel, report: Callable[[str, float], None]) -> Drafter:
    from fly_jax.decode.drafters import DraftModel, LayerSkip, PromptLookup, default_skip_layers

    name, k, method = (options[each] for each in ("drafter", "num_speculative_tokens", "draft_sample_method"))
    if name == DrafterName.NGRAM:
        return PromptLookup(k, options["prompt_lookup_max"], options["prompt_lookup_min"])
    if name == DrafterName.LAYER_SKIP:
        layers = _skip_layers(options["skip_layers"]) or default_skip_layers(loaded.config.num_layers)
        return LayerSkip(layers, k, method)
    return DraftModel(_load(options["draft_model"], report).decoder, k, method)


def _skip_layers(text: str | None) -> tuple[int, ...]:
    from fly_jax.decode.errors import ModelError

    if text is None:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ModelError(f"--skip-layers must be layer numbers like 12,13,14, got {text!r}.") from None


def _settings(options: Mapping[str, Any], comparison: Comparison) -> dict[str, Any]:
    """The options as given, the model by its own name; JSON has no infinity."""
    given = {name: str(each) if each == math.inf else each for name, each in options.items() if name != "json_output"}
    return {**given, "model": comparison.loaded.name, "max_model_len": comparison.max_model_len}
