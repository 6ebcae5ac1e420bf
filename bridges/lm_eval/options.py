"""What the model `fly_jax` is told: options of the model, and a task's settings of generation."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from fly_jax.cli import generate as command
from fly_jax.config import SamplingParams
from fly_jax.errors import UserError

DRAFTERS = ("ngram", "draft-model", "layer-skip", "none")
REJECTION_SAMPLE_METHODS = ("standard", "fly")

_FLY_OPTIONS = ("fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k")
_LEAST = {"num_speculative_tokens": 1, "prompt_lookup_max": 1, "prompt_lookup_min": 1, "batch_size": 1,
          "max_gen_toks": 1, "max_model_len": 2, "seed": 0}  # fmt: skip
_SAMPLING_OFF = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclasses.dataclass(frozen=True)
class Options:
    """What `--model_args`, or the constructor, takes; the names are those of `fly-jax generate`.

    Attributes:
      model: a GGUF file or a Hugging Face folder; None is SmolLM2-135M-Instruct, downloaded once.
      drafter: "ngram", "draft-model", "layer-skip", or "none" for target-only decoding.
      draft_model: with "draft-model": its file or folder.
      num_speculative_tokens: K, draft tokens a cycle.
      rejection_sample_method: "standard", which is lossless, or "fly".
      fly_window_size: W; with "fly" only, as the next two. None is vLLM's default.
      fly_entropy_threshold: nats from which a mismatch may be deferred.
      fly_entropy_top_k: probabilities the entropy is summed over.
      draft_sample_method: "greedy", or "probabilistic" where a model drafts.
      prompt_lookup_max: longest n-gram looked up.
      prompt_lookup_min: shortest.
      skip_layers: with "layer-skip": numbers, or text like "12,13,14".
      batch_size: requests decoded together.
      max_gen_toks: most tokens to generate where a task does not say.
      max_model_len: tokens of prompt and output together; None is the model's context.
      seed: of all drawing; request i draws with `seed + i`.
    """

    model: str | None = None
    drafter: str = "ngram"
    draft_model: str | None = None
    num_speculative_tokens: int = 16
    rejection_sample_method: str = "standard"
    fly_window_size: int | None = None
    fly_entropy_threshold: float | None = None
    fly_entropy_top_k: int | None = None
    draft_sample_method: str = "greedy"
    prompt_lookup_max: int = 3
    prompt_lookup_min: int = 1
    skip_layers: str | None = None
    batch_size: int = 1
    max_gen_toks: int = 256
    max_model_len: int | None = None
    seed: int = 0

    @classmethod
    def from_model_args(cls, given: Mapping[str, Any]) -> "Options":
        """The options as the harness gives them, checked.

        Raises:
          UserError: an option is unknown, out of range, or without effect.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(given.keys() - set(names))
        if unknown:
            raise UserError(f"{unknown[0]} is not an option of the model fly_jax; there are {', '.join(names)}.")
        values = dict(given)
        if isinstance(layers := values.get("skip_layers"), int | list | tuple):
            values["skip_layers"] = ",".join(map(str, [layers] if isinstance(layers, int) else layers))
        if isinstance(size := values.get("batch_size"), str) and size.isdecimal():
            values["batch_size"] = int(size)
        options = cls(**values)
        options._check()
        return options

    def _check(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if name == "max_model_len" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**32:
                raise UserError(f"{name} must be an integer of at least {least}, got {value!r}.")
        for name, allowed in (("drafter", DRAFTERS), ("rejection_sample_method", REJECTION_SAMPLE_METHODS)):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        if self.rejection_sample_method == "fly" and self.drafter == "none":
            raise UserError("rejection_sample_method=fly needs draft tokens, got drafter=none: choose another drafter.")
        idle = [name for name in _FLY_OPTIONS if getattr(self, name) is not None]
        if idle and self.rejection_sample_method != "fly":
            raise UserError(f"{idle[0]} has no effect without rejection_sample_method=fly: set that as well.")
        command.check_drafter_options(dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """How a task wants its texts: what is decoded together has the same.

    Attributes:
      until: a text ends before the first of these.
      max_tokens: most tokens of a text.
      sampling: how the target samples.
    """

    until: tuple[str, ...]
    max_tokens: int
    sampling: SamplingParams

    @classmethod
    def from_task(cls, generation_kwargs: Mapping[str, Any], max_gen_toks: int) -> "GenerationSettings":
        """Reads a task's `generation_kwargs`.

        Raises:
          UserError: one is unknown here, or not a number.
        """
        given: dict[str, Any] = normalize_gen_kwargs(dict(generation_kwargs), default_max_gen_toks=max_gen_toks)
        until, max_tokens, samples = (given.pop(name) for name in ("until", "max_gen_toks", "do_sample"))
        if given.pop("num_beams", 1) != 1:
            raise UserError("generation_kwargs has num_beams, but beam search is not available here: leave it out.")
        unknown = sorted(given.keys() - _SAMPLING_OFF.keys())
        if unknown:
            raise UserError(
                f"generation_kwargs has {unknown[0]}, which is not available here; there are until, max_gen_toks, "
                f"do_sample, {', '.join(_SAMPLING_OFF)}."
            )
        # Who asks for sampling and names no temperature means that of the model, as elsewhere in the harness.
        values = {**_SAMPLING_OFF, **({"temperature": 1.0} if samples else {}), **given}
        for name, value in values.items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise UserError(f"generation_kwargs has {name}={value!r}: it must be a number.")
        return cls(tuple(each for each in until if each), max_tokens, command.sampling_params(values))
