"""The options that several commands share, and how they become `DecodeOptions`. Imports nothing of JAX."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fly_jax import defaults

if TYPE_CHECKING:
    from fly_jax.config import FlyConfig
    from fly_jax.decode.options import DecodeOptions


class DrafterName(enum.StrEnum):
    """Where draft tokens come from: the names of `fly_jax.decode.options.DRAFTERS`."""

    NGRAM = "ngram"
    DRAFT_MODEL = "draft-model"
    LAYER_SKIP = "layer-skip"


class DraftSampleMethod(enum.StrEnum):
    """How a model drafts."""

    GREEDY = "greedy"
    PROBABILISTIC = "probabilistic"


class TraceMode(enum.StrEnum):
    """What decides while a trace is recorded."""

    STANDARD = "standard"
    FLY = "fly"


class Clock(enum.StrEnum):
    """What a benchmark counts."""

    CPU = "cpu"
    WALL = "wall"


class Split(enum.StrEnum):
    """Which tasks are evaluated."""

    REPORT = "report"
    CHOOSE = "choose"
    ALL = "all"


Model = Annotated[
    Path | None,
    typer.Option(help="A GGUF file or a Hugging Face folder. Default: SmolLM2-135M-Instruct, downloaded once."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds.")]
Raw = Annotated[bool, typer.Option("--raw", help="Give the model a prompt as it is, not as a chat.")]
Drafter = Annotated[DrafterName, typer.Option(help="Where draft tokens come from.")]
DraftModel = Annotated[
    Path | None,
    typer.Option(
        help="With --drafter draft-model: its file or folder. Its tokenizer may be another one: it then drafts the "
        "tokens that both have."
    ),
]
MaxTokens = Annotated[
    int, typer.Option(min=1, help="Most tokens to generate for a prompt; each step costs time for all.")
]
NumSpeculativeTokens = Annotated[int, typer.Option(min=1, help="K: draft tokens per cycle.")]
FlyWindowSize = Annotated[
    int | None,
    typer.Option(
        help="W: tokens after a deferral that must be accepted. "
        f"Default: {defaults.LARGEST_WINDOW_SIZE}, or K - 1 if that is less."
    ),
]
FlyEntropyThreshold = Annotated[float, typer.Option(help="Nats from which a mismatch may be deferred.")]
FlyEntropyTopK = Annotated[int, typer.Option(help="Probabilities the entropy is summed over.")]
Fly = Annotated[
    list[str] | None,
    typer.Option(
        help="FLy's settings, like window_size=4,entropy_threshold=0.5,entropy_top_k=5; what is left out has its "
        "default. May be repeated: each is a mode of its own. Default: one mode with the defaults."
    ),
]
DraftSampling = Annotated[DraftSampleMethod, typer.Option(help="How a model drafts; n-grams are always greedy.")]
PromptLookupMax = Annotated[int, typer.Option(min=1, help="Longest n-gram looked up.")]
PromptLookupMin = Annotated[int, typer.Option(min=1, help="Shortest n-gram looked up.")]
SkipLayers = Annotated[str | None, typer.Option(help="With --drafter layer-skip: layers left out, like 12,13,14.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0, help="1 is off.")]
TopK = Annotated[int, typer.Option(min=0, help="0 is off.")]
MinP = Annotated[float, typer.Option(min=0.0, max=1.0, help="0 is off.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of all drawing.")]
Seeds = Annotated[str, typer.Option(help="Of all drawing, like 0,1,2: every task is decoded with each.")]
Tasks = Annotated[
    Path | None,
    typer.Option(help="JSON lines, see docs/evaluate.md. Default: the built-in tasks, which repeat a source."),
]
SplitOption = Annotated[Split, typer.Option(help="choose settings on one half, report on the other.")]
BatchSizes = Annotated[str, typer.Option(help="Requests decoded together, like 1,4,8.")]
MinBatches = Annotated[
    int, typer.Option(min=1, help="Batches of each size, at least: tasks come again, for speed only.")
]
TraceFile = Annotated[
    Path | None,
    typer.Option(help="Decode the prompts once more and record every verification here, for `fly-jax sweep`."),
]
TraceModeOption = Annotated[
    TraceMode,
    typer.Option(
        help="With --trace: what decides; standard leaves the text to the target. In an evaluation fly is the first "
        "--fly, and the first batch size and seed are recorded."
    ),
]


def spelled(name: str) -> str:
    """An option as it is typed: `--draft-model` for `draft_model`."""
    return "--" + name.replace("_", "-")


def decode_options(
    *,
    model: Path | None,
    drafter: DrafterName,
    draft_model: Path | None,
    draft_sample_method: DraftSampleMethod,
    prompt_lookup_max: int,
    prompt_lookup_min: int,
    skip_layers: str | None,
    num_speculative_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    max_tokens: int,
    raw: bool,
    fly: FlyConfig | None = None,
    seed: int = 0,
) -> DecodeOptions:
    """The options as the command line has them, checked.

    Raises:
      UserError: one is out of range or excluded by another.
    """
    # Here, because it imports JAX and --help must not.
    from fly_jax.decode.checks import parse_numbers
    from fly_jax.decode.options import DecodeOptions, drafter_options, sampling_params

    layers = None
    if skip_layers is not None:
        layers = parse_numbers(spelled("skip_layers"), skip_layers, int, "layer numbers like 12,13,14")
    return DecodeOptions(
        model=None if model is None else str(model),
        drafter=drafter_options(
            str(drafter),
            draft_model=None if draft_model is None else str(draft_model),
            draft_sample_method=str(draft_sample_method),
            prompt_lookup_max=prompt_lookup_max,
            prompt_lookup_min=prompt_lookup_min,
            skip_layers=layers,
            spelled=spelled,
        ),
        num_speculative_tokens=num_speculative_tokens,
        fly=fly,
        sampling=sampling_params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, spelled=spelled),
        max_tokens=max_tokens,
        raw=raw,
        seed=seed,
    )
