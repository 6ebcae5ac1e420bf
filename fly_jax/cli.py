"""The command line: `fly-jax generate`, `fly-jax bench ...` and `fly-jax crosscheck`.

jax and the model code are imported when a command runs, so that `--help` is quick.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

INSTALL_HINT = "install the demo extra: pip install 'fly-jax[demo]', or -e '.[demo]' in the repository"

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as error:
    raise SystemExit(f"fly-jax: {error.name} is not installed; {INSTALL_HINT}") from None

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
        from fly_jax.decode import command

        command.generate(
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
        from fly_jax.decode.command import load
        from fly_jax.decode.report import progress_bars, versions

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


@bench_app.command("bridge")
def bench_bridge(
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 15,
    json_output: JsonOption = False,
) -> None:
    """A call from vLLM against the JAX function it ends in (extra: torch)."""
    with _interruptible(), _needs_torch():
        from fly_jax.bench.bridge import bench_bridge as run

        run(rounds=rounds, json_output=json_output)


@app.command("crosscheck")
def crosscheck(
    file: Annotated[Path, typer.Argument(help="A step that FLY_JAX_VLLM=crosscheck wrote because tokens differed.")],
    all_requests: Annotated[bool, typer.Option("--all", help="Also show the requests that agree.")] = False,
) -> None:
    """Run a step recorded inside vLLM again and explain where JAX and vLLM differ; status 1 if a difference is real."""
    with _interruptible(), _needs_torch():
        from fly_jax.bridges.vllm.report import explain
        from fly_jax.decode.errors import ModelError

        try:
            right = explain(file, Console(), all_requests=all_requests)
        except (OSError, ValueError) as error:
            raise ModelError(f"{error}.") from error
        if not right:
            raise SystemExit(1)


@contextlib.contextmanager
def _needs_torch() -> Iterator[None]:
    from fly_jax.decode.errors import ModelError

    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModelError("torch is not installed; run this where vLLM is, or pip install -e '.[torch]'.") from None
