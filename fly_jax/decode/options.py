"""What decoding is told: one frozen value that `fly-jax generate`, `fly-jax eval` and the lm-eval model all build.

The functions below read settings as people write them, flat and as text, and give the typed values. Their errors name
an option by `spelled(name)`, so that each front end shows its own spelling.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from fly_jax import defaults
from fly_jax.config import FlyConfig, SamplingParams
from fly_jax.decode.checks import check_choice, check_int
from fly_jax.decode.drafters import DRAFT_SAMPLE_METHODS, PromptLookup
from fly_jax.errors import UserError

SAMPLING_OFF = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""The value of each sampling parameter at which it has no effect."""


@dataclasses.dataclass(frozen=True)
class NgramOptions:
    """Drafts are looked up in the text so far: see `PromptLookup`.

    Attributes:
      prompt_lookup_max: tokens of the longest n-gram looked up.
      prompt_lookup_min: of the shortest.

    Raises:
      UserError: a number is out of range.
    """

    prompt_lookup_max: int = defaults.PROMPT_LOOKUP_MAX
    prompt_lookup_min: int = defaults.PROMPT_LOOKUP_MIN

    name: ClassVar[str] = "ngram"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_int(field.name, getattr(self, field.name), least=1)
        PromptLookup(1, self.prompt_lookup_max, self.prompt_lookup_min)


@dataclasses.dataclass(frozen=True)
class DraftModelOptions:
    """Another model drafts: see `DraftModel`.

    Attributes:
      draft_model: its GGUF file or Hugging Face folder.
      draft_sample_method: "greedy" or "probabilistic".

    Raises:
      UserError: the method is another one.
    """

    draft_model: str
    draft_sample_method: str = "greedy"

    name: ClassVar[str] = "draft-model"

    def __post_init__(self) -> None:
        check_choice("draft_sample_method", self.draft_sample_method, DRAFT_SAMPLE_METHODS)


@dataclasses.dataclass(frozen=True)
class LayerSkipOptions:
    """The target drafts with layers left out: see `LayerSkip`.

    Attributes:
      skip_layers: their numbers; None are those of `default_skip_layers`.
      draft_sample_method: "greedy" or "probabilistic".

    Raises:
      UserError: the method is another one.
    """

    skip_layers: tuple[int, ...] | None = None
    draft_sample_method: str = "greedy"

    name: ClassVar[str] = "layer-skip"

    def __post_init__(self) -> None:
        check_choice("draft_sample_method", self.draft_sample_method, DRAFT_SAMPLE_METHODS)
        if self.skip_layers is not None:
            if not self.skip_layers:
                raise UserError("skip_layers must name a layer, or be left out for the default ones, got none.")
            for layer in self.skip_layers:
                check_int("skip_layers", layer, least=0)
            object.__setattr__(self, "skip_layers", tuple(self.skip_layers))


DrafterOptions = NgramOptions | DraftModelOptions | LayerSkipOptions
"""Where draft tokens come from. A new drafter has a class here and one in `fly_jax.decode.drafters`."""

DRAFTERS = (NgramOptions.name, DraftModelOptions.name, LayerSkipOptions.name)
"""Their names."""


@dataclasses.dataclass(frozen=True)
class DecodeOptions:
    """How to decode.

    Attributes:
      model: a GGUF file or a Hugging Face folder; None is SmolLM2-135M-Instruct, downloaded once.
      drafter: where draft tokens come from; None is target-only decoding.
      num_speculative_tokens: K, draft tokens per cycle.
      fly: FLy's settings, W settled for this K; None is standard verification, which is lossless.
      sampling: how the target samples, one number for all requests; the default is greedy.
      max_tokens: most tokens to emit for a prompt.
      max_model_len: tokens of prompt and output together; None is what the prompts need, or the model's context where
        they are not known beforehand.
      raw: whether a prompt goes to the model as it is, not as a chat message.
      seed: of all drawing.

    Raises:
      UserError: an option is out of range or excluded by another.
    """

    model: str | None = None
    drafter: DrafterOptions | None = NgramOptions()
    num_speculative_tokens: int = defaults.NUM_SPECULATIVE_TOKENS
    fly: FlyConfig | None = None
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 (frozen)
    max_tokens: int = defaults.MAX_TOKENS
    max_model_len: int | None = None
    raw: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("num_speculative_tokens", self.num_speculative_tokens, least=1)
        check_int("max_tokens", self.max_tokens, least=1)
        check_int("seed", self.seed, least=0)
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, least=2)
        if not isinstance(self.drafter, DrafterOptions | None):
            raise UserError(f"drafter must be the options of a drafter, or None, got {self.drafter!r}.")
        object.__setattr__(self, "sampling", _checked(self.sampling))
        if self.fly is not None:
            if not isinstance(self.fly, FlyConfig):
                raise UserError(f"fly must be a FlyConfig, or None, got {self.fly!r}.")
            if self.drafter is None:
                raise UserError("FLy needs draft tokens, and no drafter is chosen: choose one.")
            object.__setattr__(self, "fly", _settled(self.fly, self.num_speculative_tokens))

    def to_dict(self) -> dict[str, Any]:
        """The options by the names that people give them by, for JSON; None where one has no effect."""
        drafting: dict[str, Any] = dict.fromkeys(("draft_model", "prompt_lookup_max", "prompt_lookup_min"))
        drafting |= {"draft_sample_method": "greedy", "skip_layers": None}
        if self.drafter is not None:
            drafting |= dataclasses.asdict(self.drafter)
        if drafting["skip_layers"] is not None:
            drafting["skip_layers"] = ",".join(map(str, drafting["skip_layers"]))
        fly = (
            dict.fromkeys(field.name for field in dataclasses.fields(FlyConfig))
            if self.fly is None
            else self.fly.to_dict()
        )
        return {
            "model": self.model,
            "drafter": "none" if self.drafter is None else self.drafter.name,
            **drafting,
            "num_speculative_tokens": self.num_speculative_tokens,
            # JSON has no infinity.
            **{FlyConfig.vllm_names()[name]: str(each) if each == math.inf else each for name, each in fly.items()},
            **sampling_fields(self.sampling),
            "max_tokens": self.max_tokens,
            "max_model_len": self.max_model_len,
            "raw": self.raw,
            "seed": self.seed,
        }


def drafter_options(
    name: str,
    *,
    draft_model: str | None,
    draft_sample_method: str,
    prompt_lookup_max: int,
    prompt_lookup_min: int,
    skip_layers: tuple[int, ...] | None,
    spelled: Callable[[str], str] = str,
) -> DrafterOptions:
    """The options of one drafter out of those of all.

    Args:
      name: one of `DRAFTERS`.
      draft_model: with "draft-model" only, which needs it.
      draft_sample_method: "greedy", or "probabilistic" where a model drafts.
      prompt_lookup_max: counts with "ngram" only, as the next.
      prompt_lookup_min: of the shortest n-gram.
      skip_layers: with "layer-skip" only.
      spelled: how an option is named in an error.

    Raises:
      UserError: the name is another one, or options do not go together.
    """
    check_choice(spelled("drafter"), name, DRAFTERS)
    check_exclusions(name, draft_model=draft_model, skip_layers=skip_layers, spelled=spelled)
    check_int(spelled("prompt_lookup_max"), prompt_lookup_max, least=1)
    check_int(spelled("prompt_lookup_min"), prompt_lookup_min, least=1)
    chosen = f"{spelled('drafter')} "
    if name == LayerSkipOptions.name:
        return LayerSkipOptions(skip_layers, draft_sample_method)
    if name == DraftModelOptions.name:
        if draft_model is None:
            raise UserError(f"{chosen}{name} needs {spelled('draft_model')} PATH.")
        return DraftModelOptions(draft_model, draft_sample_method)
    if draft_sample_method != "greedy":
        raise UserError(
            f"{spelled('draft_sample_method')} {draft_sample_method} needs a drafter that samples, got {chosen}{name}."
        )
    return NgramOptions(prompt_lookup_max, prompt_lookup_min)


def check_exclusions(
    name: str, *, draft_model: str | None, skip_layers: tuple[int, ...] | None, spelled: Callable[[str], str] = str
) -> None:
    """Refuses the options of one drafter beside the name of another, or of none.

    Raises:
      UserError: there is one.
    """
    for option, value, needed in (
        ("draft_model", draft_model, DraftModelOptions.name),
        ("skip_layers", skip_layers, LayerSkipOptions.name),
    ):
        if value is not None and name != needed:
            raise UserError(f"{spelled(option)} needs {spelled('drafter')} {needed}, got {name}.")


def fly_config(*, window_size: int | None, entropy_threshold: float, entropy_top_k: int) -> FlyConfig:
    """FLy's settings; W may stay open until K is known.

    Raises:
      UserError: one is out of range; it is named as in vLLM's `speculative_config`.
    """
    try:
        return FlyConfig(window_size=window_size, entropy_threshold=entropy_threshold, entropy_top_k=entropy_top_k)
    except (TypeError, ValueError) as error:
        # The message begins with the field's name.
        raise UserError(f"fly_{error}.") from error


def sampling_params(
    *, temperature: float, top_k: int, top_p: float, min_p: float, spelled: Callable[[str], str] = str
) -> SamplingParams:
    """How the target samples; at temperature 0, which is greedy, the others have no effect.

    Raises:
      UserError: the temperature is infinite or NaN.
    """
    if not math.isfinite(temperature):
        raise UserError(f"{spelled('temperature')} must be a finite number, at least 0, got {temperature}.")
    if temperature == SAMPLING_OFF["temperature"]:
        return SamplingParams()
    # What is off is left out: a mask costs passes over the vocabulary also where it keeps everything.
    return SamplingParams(
        temperature=temperature,
        top_k=None if top_k == SAMPLING_OFF["top_k"] else top_k,
        top_p=None if top_p == SAMPLING_OFF["top_p"] else top_p,
        min_p=None if min_p == SAMPLING_OFF["min_p"] else min_p,
    )


def sampling_fields(sampling: SamplingParams) -> dict[str, float]:
    """The numbers by name, for JSON: what is off as the number that turns it off."""
    given = {name: getattr(sampling, name) for name in SAMPLING_OFF}
    return {name: off if given[name] is None else np.asarray(given[name]).item() for name, off in SAMPLING_OFF.items()}


def _checked(sampling: SamplingParams) -> SamplingParams:
    """The same, if it is one finite number for each; greedy where the temperature is 0."""
    given = {name: getattr(sampling, name) for name in SAMPLING_OFF if getattr(sampling, name) is not None}
    for name, value in given.items():
        if np.ndim(value) != 0 or not math.isfinite(value):
            raise UserError(f"{name} must be one finite number for all requests, got {value}.")
    if "temperature" not in given and given:
        raise UserError(f"{next(iter(given))} needs a temperature: without one nothing is sampled.")
    return SamplingParams() if given.get("temperature") == SAMPLING_OFF["temperature"] else sampling


def _settled(fly: FlyConfig, num_speculative_tokens: int) -> FlyConfig:
    """The settings with W for this K."""
    try:
        threshold = fly.single_threshold
    except ValueError as error:
        raise UserError(f"{error}.") from error
    if math.isnan(threshold):
        raise UserError("entropy_threshold must be a number of nats, got nan.")
    if num_speculative_tokens < 2:
        raise UserError(f"num_speculative_tokens must be at least 2 with FLy, got {num_speculative_tokens}.")
    if fly.window_size is not None and fly.window_size >= num_speculative_tokens:
        raise UserError(
            f"fly_window_size must be less than num_speculative_tokens ({num_speculative_tokens}), "
            f"got {fly.window_size}."
        )
    return dataclasses.replace(fly, window_size=fly.window_size_for(num_speculative_tokens))
