"""The command line: `fly-jax generate`, `eval`, `sweep`, `bench ...` and `crosscheck`.

A command imports what it runs in its own function: that starts JAX, which `--help` must not wait for.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from fly_jax import defaults
from fly_jax.errors import UserError

INSTALL_HINT = "install the demo extra: pip install 'fly-jax[demo]', or -e '.[demo]' in the repository"

try:
    import typer

    from fly_jax.cli import options
    from fly_jax.cli.output import INTERRUPTED, interruptible
except ModuleNotFoundError as error:
    raise SystemExit(f"fly-jax: {error.name} is not installed; {INSTALL_HINT}") from None

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
bench_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure ratios on this machine.")
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Runs the command line; problems that a user can fix are one line and exit status 2."""
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
    raw: options.Raw = False,
    max_tokens: options.MaxTokens = defaults.MAX_TOKENS,
    num_speculative_tokens: options.NumSpeculativeTokens = defaults.NUM_SPECULATIVE_TOKENS,
    fly_window_size: options.FlyWindowSize = None,
    fly_entropy_threshold: options.FlyEntropyThreshold = defaults.ENTROPY_THRESHOLD,
    fly_entropy_top_k: options.FlyEntropyTopK = defaults.ENTROPY_TOP_K,
    draft_sample_method: options.DraftSampling = options.DraftSampleMethod.GREEDY,
    prompt_lookup_max: options.PromptLookupMax = defaults.PROMPT_LOOKUP_MAX,
    prompt_lookup_min: options.PromptLookupMin = defaults.PROMPT_LOOKUP_MIN,
    skip_layers: options.SkipLayers = None,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    trace: options.TraceFile = None,
    trace_mode: options.TraceModeOption = options.TraceMode.STANDARD,
    seed: options.Seed = 0,
    json_output: options.Json = False,
) -> None:
    """Decode prompts target-only, with standard verification and with FLy, side by side."""
    with interruptible():
        from fly_jax.cli import generate as command
        from fly_jax.decode.options import fly_config

        decode = options.decode_options(
            model=model,
            drafter=drafter,
            draft_model=draft_model,
            draft_sample_method=draft_sample_method,
            prompt_lookup_max=prompt_lookup_max,
            prompt_lookup_min=prompt_lookup_min,
            skip_layers=skip_layers,
            num_speculative_tokens=num_speculative_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            max_tokens=max_tokens,
            raw=raw,
            fly=fly_config(
                window_size=fly_window_size, entropy_threshold=fly_entropy_threshold, entropy_top_k=fly_entropy_top_k
            ),
            seed=seed,
        )
        command.generate(
            decode,
            prompt=prompt,
            prompt_file=prompt_file,
            trace=trace,
            trace_mode=str(trace_mode),
            json_output=json_output,
        )


@app.command("eval")
def evaluate(
    tasks: options.Tasks = None,
    split: options.SplitOption = options.Split.REPORT,
    output: Annotated[Path, typer.Option(help="Folder for results, report and pictures.")] = Path("fly_jax_eval"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what --output holds.")] = False,
    model: options.Model = None,
    drafter: options.Drafter = options.DrafterName.NGRAM,
    draft_model: options.DraftModel = None,
    raw: options.Raw = False,
    batch_sizes: options.BatchSizes = "1",
    min_batches: options.MinBatches = 3,
    max_tokens: options.MaxTokens = defaults.MAX_TOKENS,
    num_speculative_tokens: options.NumSpeculativeTokens = defaults.NUM_SPECULATIVE_TOKENS,
    fly: options.Fly = None,
    draft_sample_method: options.DraftSampling = options.DraftSampleMethod.GREEDY,
    prompt_lookup_max: options.PromptLookupMax = defaults.PROMPT_LOOKUP_MAX,
    prompt_lookup_min: options.PromptLookupMin = defaults.PROMPT_LOOKUP_MIN,
    skip_layers: options.SkipLayers = None,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seeds: options.Seeds = "0",
    trace: options.TraceFile = None,
    trace_mode: options.TraceModeOption = options.TraceMode.STANDARD,
    json_output: options.Json = False,
) -> None:
    """Measure what FLy gains and costs on tasks with known answers, against target-only and standard verification."""
    with interruptible():
        from fly_jax.cli import evaluate as command

        decode = options.decode_options(
            model=model,
            drafter=drafter,
            draft_model=draft_model,
            draft_sample_method=draft_sample_method,
            prompt_lookup_max=prompt_lookup_max,
            prompt_lookup_min=prompt_lookup_min,
            skip_layers=skip_layers,
            num_speculative_tokens=num_speculative_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            max_tokens=max_tokens,
            raw=raw,
        )
        command.evaluate(
            command.evaluation_options(
                decode,
                fly=fly,
                tasks=tasks,
                split=str(split),
                batch_sizes=batch_sizes,
                min_batches=min_batches,
                seeds=seeds,
            ),
            output=output,
            resume=resume,
            trace=trace,
            trace_mode=str(trace_mode),
            json_output=json_output,
        )


@bench_app.command("decode")
def bench_decode(model: options.Model = None, rounds: options.Rounds = 15, json_output: options.Json = False) -> None:
    """Decoding steps against their floors: ratios of one interleaved run."""
    with interruptible():
        from fly_jax.cli import bench

        bench.bench_decode(None if model is None else str(model), rounds=rounds, json_output=json_output)


@bench_app.command("verify")
def bench_verify(
    cases: Annotated[
        str, typer.Option(help="Names with commas between them, all, or none (with --growth); a wrong name lists them.")
    ] = "all",
    rounds: options.Rounds = 15,
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
    with interruptible():
        from fly_jax.cli import bench

        bench.bench_verify(
            cases,
            rounds=rounds,
            clock=str(clock),
            growth=growth or plot is not None,
            plot=plot,
            json_output=json_output,
        )


@bench_app.command("kernels")
def bench_kernels(
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Compile for every GPU instead, without one (extra: triton).")
    ] = False,
    rounds: options.Rounds = 15,
    json_output: options.Json = False,
) -> None:
    """The GPU kernel against a copy of the logits, XLA and torch; or what it takes, compiled for each GPU."""
    with interruptible():
        from fly_jax.cli import bench

        bench.bench_kernels(compile_only=compile_only, rounds=rounds, json_output=json_output)


@bench_app.command("bridge")
def bench_bridge(rounds: options.Rounds = 15, json_output: options.Json = False) -> None:
    """A call from vLLM against the JAX function it ends in (extra: torch)."""
    with interruptible(), _needs_torch():
        from fly_jax.cli import bench

        bench.bench_bridge(rounds=rounds, json_output=json_output)


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
        float | None, typer.Option(help="Leave out settings that give up more nats per deferred token.")
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
    """Replay a recorded trace under many settings of FLy: tokens per cycle, and what is risked for them."""
    with interruptible():
        from fly_jax.cli import sweep as command

        command.sweep(
            trace,
            window_sizes=window_sizes,
            thresholds=thresholds,
            top_ks=top_ks,
            filters=command.Filters(max_deferral_rate, max_logprob_loss, far_below, all_settings),
            plot_file=plot,
            json_output=json_output,
        )


@app.command("crosscheck")
def crosscheck(
    file: Annotated[Path, typer.Argument(help="A step that FLY_JAX_VLLM=crosscheck wrote because tokens differed.")],
    all_requests: Annotated[bool, typer.Option("--all", help="Also show the requests that agree.")] = False,
) -> None:
    """Run a step recorded inside vLLM again and explain where JAX and vLLM differ; status 1 if a difference is real."""
    with interruptible(), _needs_torch():
        from fly_jax.cli import crosscheck as command

        command.crosscheck(file, all_requests=all_requests)


@contextlib.contextmanager
def _needs_torch() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UserError("torch is not installed; run this where vLLM is, or pip install -e '.[torch]'.") from None
