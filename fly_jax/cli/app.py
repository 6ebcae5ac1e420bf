"""The command line: `fly-jax generate`, `eval`, `sweep`, `bench ...` and `crosscheck`.

jax and the model code are imported when a command runs, so that `--help` is quick.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

INSTALL_HINT = "install the demo extra: pip install 'fly-jax[demo]', or -e '.[demo]' in the repository"

try:
    import typer
    from rich.console import Console

    from fly_jax.cli import options
except ModuleNotFoundError as error:
    raise SystemExit(f"fly-jax: {error.name} is not installed; {INSTALL_HINT}") from None

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
bench_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure ratios on this machine.")
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Runs the command line; problems that a user can fix are one line and exit status 2."""
    from fly_jax.errors import UserError

    # A model may emit any character; a terminal may not have it.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        app()
    except UserError as error:
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


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The options as a command was given them, ready for JSON."""
    return {name: str(each) if isinstance(each, Path | enum.Enum) else each for name, each in parameters.items()}


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
    model: options.Model = None,
    drafter: options.Drafter = options.DrafterName.NGRAM,
    draft_model: options.DraftModel = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated. Default: built-in ones.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file with one prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give the model the prompt as it is, not as a chat.")] = False,
    max_tokens: options.MaxTokens = 128,
    num_speculative_tokens: options.NumSpeculativeTokens = 16,
    fly_window_size: Annotated[
        int | None,
        typer.Option(help="W: tokens after a deferral that must be accepted. Default: 6, or K - 1 if that is less."),
    ] = None,
    fly_entropy_threshold: Annotated[float, typer.Option(help="Nats from which a mismatch may be deferred.")] = 0.3,
    fly_entropy_top_k: Annotated[int, typer.Option(help="Probabilities the entropy is summed over.")] = 3,
    draft_sample_method: options.DraftSampling = options.DraftSampleMethod.GREEDY,
    prompt_lookup_max: options.PromptLookupMax = 3,
    prompt_lookup_min: options.PromptLookupMin = 1,
    skip_layers: options.SkipLayers = None,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    trace: options.TraceFile = None,
    trace_mode: options.TraceModeOption = options.TraceMode.STANDARD,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of all drawing.")] = 0,
    json_output: options.Json = False,
) -> None:
    """Decode prompts target-only, with standard verification and with FLy, side by side."""
    parameters = _plain(locals())
    with _interruptible():
        from fly_jax.cli import generate as command

        command.generate(parameters)


@app.command("eval")
def evaluate(
    tasks: Annotated[
        Path | None, typer.Option(help="JSON lines, see README. Default: the built-in tasks, which repeat a source.")
    ] = None,
    split: Annotated[
        options.Split, typer.Option(help="choose settings on one half, report on the other.")
    ] = options.Split.REPORT,
    output: Annotated[Path, typer.Option(help="Folder for results, report and pictures.")] = Path("fly_jax_eval"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what --output holds.")] = False,
    model: options.Model = None,
    drafter: options.Drafter = options.DrafterName.NGRAM,
    draft_model: options.DraftModel = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give the model a task's prompt as it is, not as a chat.")] = False,
    batch_sizes: Annotated[str, typer.Option(help="Requests decoded together, like 1,4,8.")] = "1",
    min_batches: Annotated[
        int, typer.Option(min=1, help="Batches of each size, at least: tasks come again, for speed only.")
    ] = 3,
    max_tokens: options.MaxTokens = 128,
    num_speculative_tokens: options.NumSpeculativeTokens = 16,
    fly: Annotated[
        list[str] | None,
        typer.Option(
            help="FLy's settings, like window_size=6,entropy_threshold=0.3,entropy_top_k=3; what is left out has its "
            "default. May be repeated: each is a mode of its own. Default: one mode with the defaults."
        ),
    ] = None,
    draft_sample_method: options.DraftSampling = options.DraftSampleMethod.GREEDY,
    prompt_lookup_max: options.PromptLookupMax = 3,
    prompt_lookup_min: options.PromptLookupMin = 1,
    skip_layers: options.SkipLayers = None,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seeds: Annotated[str, typer.Option(help="Of all drawing, like 0,1,2: every task is decoded with each.")] = "0",
    trace: options.TraceFile = None,
    trace_mode: options.TraceModeOption = options.TraceMode.STANDARD,
    json_output: options.Json = False,
) -> None:
    """Measure what FLy gains and costs on tasks with known answers, against target-only and standard verification."""
    parameters = _plain(locals())
    with _interruptible():
        from fly_jax.cli.evaluate import evaluate as run

        run(parameters)


@bench_app.command("decode")
def bench_decode(
    model: options.Model = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 15,
    json_output: options.Json = False,
) -> None:
    """Decoding steps against their floors: ratios of one interleaved run."""
    with _interruptible():
        from fly_jax.bench.decode import bench_table, measure
        from fly_jax.cli.generate import load
        from fly_jax.cli.tables import progress_bars, versions

        with progress_bars(Console(stderr=True)) as report:
            loaded = load(None if model is None else str(model), report)
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
        options.Clock,
        typer.Option(
            help="cpu: CPU time of this process over all its threads, which other work on the machine and a lucky "
            "spread over cores hardly change; wall: what a caller waits, which is what counts on an accelerator."
        ),
    ] = options.Clock.CPU,
    growth: Annotated[bool, typer.Option("--growth", help="Also measure along the batch and the vocabulary.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw --growth into this PNG file (extra: bench).")] = None,
    json_output: options.Json = False,
) -> None:
    """fly_verify against reading the logits once, and beside other verifiers: ratios of one interleaved run."""
    with _interruptible():
        from fly_jax.cli.bench_verify import bench_verify as run

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
    json_output: options.Json = False,
) -> None:
    """The GPU kernel against a copy of the logits, XLA and torch; or what it takes, compiled for each GPU."""
    with _interruptible():
        from fly_jax.bench.kernels import bench_kernels as run

        run(compile_only=compile_only, rounds=rounds, json_output=json_output)


@bench_app.command("bridge")
def bench_bridge(
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 15,
    json_output: options.Json = False,
) -> None:
    """A call from vLLM against the JAX function it ends in (extra: torch)."""
    with _interruptible(), _needs_torch():
        from fly_jax.bench.bridge import bench_bridge as run

        run(rounds=rounds, json_output=json_output)


@app.command("sweep")
def sweep(
    trace: Annotated[Path, typer.Argument(help="What --trace or FLY_JAX_VLLM=record wrote.")],
    window_sizes: Annotated[
        str | None, typer.Option(help="W, with commas between them. Default: 1 to 12, below the trace's K.")
    ] = None,
    thresholds: Annotated[str | None, typer.Option(help="Nats, with commas between them. Default: 0.1 to 1.")] = None,
    top_ks: Annotated[str | None, typer.Option(help="k, 1 to 8, with commas between them. Default: 2,3,5.")] = None,
    max_deferral_rate: Annotated[
        float | None, typer.Option(help="Leave out settings that defer a larger share of native rejections.")
    ] = None,
    max_logprob_loss: Annotated[
        float | None, typer.Option(help="Leave out settings that give up more nats a deferred token.")
    ] = None,
    far_below: Annotated[
        float, typer.Option(help="Nats below the argmax from which a deferred token counts as far. Default: ln 10.")
    ] = 2.302585,
    all_settings: Annotated[
        bool, typer.Option("--all", help="Also show settings that another one equals or beats.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the settings into this PNG file (extra: bench).")] = None,
    json_output: options.Json = False,
) -> None:
    """Replay a recorded trace under many settings of FLy: tokens a cycle, and what is risked for them."""
    parameters = dict(locals())
    with _interruptible():
        from fly_jax.cli import sweep as sweep_command

        sweep_command.sweep(parameters)


@app.command("crosscheck")
def crosscheck(
    file: Annotated[Path, typer.Argument(help="A step that FLY_JAX_VLLM=crosscheck wrote because tokens differed.")],
    all_requests: Annotated[bool, typer.Option("--all", help="Also show the requests that agree.")] = False,
) -> None:
    """Run a step recorded inside vLLM again and explain where JAX and vLLM differ; status 1 if a difference is real."""
    with _interruptible(), _needs_torch():
        from fly_jax.cli.crosscheck import print_explanation

        right = print_explanation(file, Console(), all_requests=all_requests)
        if not right:
            raise SystemExit(1)


@contextlib.contextmanager
def _needs_torch() -> Iterator[None]:
    from fly_jax.errors import UserError

    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UserError("torch is not installed; run this where vLLM is, or pip install -e '.[torch]'.") from None
