"""The options that several commands of the command line share; importing this imports nothing of JAX."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer


class DrafterName(enum.StrEnum):
    """Where draft tokens come from."""

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
NumSpeculativeTokens = Annotated[int, typer.Option(min=1, help="K: draft tokens a cycle.")]
DraftSampling = Annotated[DraftSampleMethod, typer.Option(help="How a model drafts; n-grams are always greedy.")]
PromptLookupMax = Annotated[int, typer.Option(min=1, help="Longest n-gram looked up.")]
PromptLookupMin = Annotated[int, typer.Option(min=1, help="Shortest n-gram looked up.")]
SkipLayers = Annotated[str | None, typer.Option(help="With --drafter layer-skip: layers left out, like 12,13,14.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0, help="1 is off.")]
TopK = Annotated[int, typer.Option(min=0, help="0 is off.")]
MinP = Annotated[float, typer.Option(min=0.0, max=1.0, help="0 is off.")]
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
