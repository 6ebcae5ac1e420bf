"""What the model `fly_jax` is told: options of the model, and a task's settings of generation."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from fly_jax import defaults
from fly_jax.config import FlyConfig, SamplingParams
from fly_jax.decode.checks import check_choice, check_int, parse_numbers
from fly_jax.decode.options import (
    DRAFTERS,
    SAMPLING_OFF,
    DecodeOptions,
    check_exclusions,
    drafter_options,
    fly_config,
    sampling_params,
)
from fly_jax.errors import UserError

NO_DRAFTER = "none"
REJECTION_SAMPLE_METHODS = ("standard", "fly")


@dataclasses.dataclass(frozen=True)
class ModelArgs:
    """What `--model_args`, or the constructor, takes; the names are those of `fly-jax generate`.

    Attributes:
      model: a GGUF file or a Hugging Face folder; None is SmolLM2-135M-Instruct, downloaded once.
      drafter: "ngram", "draft-model", "layer-skip", or "none" for target-only decoding.
      draft_model: with "draft-model": its file or folder.
      num_speculative_tokens: K, draft tokens per cycle.
      rejection_sample_method: "standard", which is lossless, or "fly".
      fly_window_size: W; with "fly" only, as the next two. None is vLLM's default, as there.
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
    num_speculative_tokens: int = defaults.NUM_SPECULATIVE_TOKENS
    rejection_sample_method: str = "standard"
    fly_window_size: int | None = None
    fly_entropy_threshold: float | None = None
    fly_entropy_top_k: int | None = None
    draft_sample_method: str = "greedy"
    prompt_lookup_max: int = defaults.PROMPT_LOOKUP_MAX
    prompt_lookup_min: int = defaults.PROMPT_LOOKUP_MIN
    skip_layers: str | int | list[int] | tuple[int, ...] | None = None
    batch_size: int | str = 1
    max_gen_toks: int = 256
    max_model_len: int | None = None
    seed: int = 0

    @classmethod
    def from_harness(cls, given: Mapping[str, Any]) -> "ModelArgs":
        """The options as the harness gives them.

        Raises:
          UserError: an option is unknown.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(given.keys() - set(names))
        if unknown:
            raise UserError(f"{unknown[0]} is not an option of the model fly_jax; there are {', '.join(names)}.")
        return cls(**given)

    def requests_together(self) -> int:
        """The batch size.

        Raises:
          UserError: it is no number, or less than 1.
        """
        size = self.batch_size
        number = int(size) if isinstance(size, str) and size.isdecimal() else size
        check_int("batch_size", number, least=1)
        return int(number)

    def decode_options(self) -> DecodeOptions:
        """How to decode.

        Raises:
          UserError: an option is out of range, without effect, or excluded by another.
        """
        check_choice("drafter", self.drafter, (*DRAFTERS, NO_DRAFTER))
        check_int("max_gen_toks", self.max_gen_toks, least=1)
        drafter = None
        if self.drafter == NO_DRAFTER:
            check_exclusions(NO_DRAFTER, draft_model=self.draft_model, skip_layers=self._layers())
        else:
            drafter = drafter_options(
                self.drafter,
                draft_model=self.draft_model,
                draft_sample_method=self.draft_sample_method,
                prompt_lookup_max=self.prompt_lookup_max,
                prompt_lookup_min=self.prompt_lookup_min,
                skip_layers=self._layers(),
            )
        return DecodeOptions(
            model=self.model,
            drafter=drafter,
            num_speculative_tokens=self.num_speculative_tokens,
            fly=self._fly(),
            max_tokens=self.max_gen_toks,
            max_model_len=self.max_model_len,
            seed=self.seed,
        )

    def _fly(self) -> FlyConfig | None:
        check_choice("rejection_sample_method", self.rejection_sample_method, REJECTION_SAMPLE_METHODS)
        if self.rejection_sample_method == "fly":
            if self.drafter == NO_DRAFTER:
                raise UserError(
                    "rejection_sample_method=fly needs draft tokens, got drafter=none: choose another drafter."
                )
            threshold, top_k = self.fly_entropy_threshold, self.fly_entropy_top_k
            return fly_config(
                window_size=self.fly_window_size,
                entropy_threshold=defaults.ENTROPY_THRESHOLD if threshold is None else threshold,
                entropy_top_k=defaults.ENTROPY_TOP_K if top_k is None else top_k,
            )
        for name in FlyConfig.vllm_names().values():
            if getattr(self, name) is not None:
                raise UserError(f"{name} has no effect without rejection_sample_method=fly: set that as well.")
        return None

    def _layers(self) -> tuple[int, ...] | None:
        if isinstance(self.skip_layers, str):
            return parse_numbers("skip_layers", self.skip_layers, int, "layer numbers like 12,13,14")
        if self.skip_layers is None:
            return None
        return (self.skip_layers,) if isinstance(self.skip_layers, int) else tuple(self.skip_layers)


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
        unknown = sorted(given.keys() - SAMPLING_OFF.keys())
        if unknown:
            raise UserError(
                f"generation_kwargs has {unknown[0]}, which is not available here; there are until, max_gen_toks, "
                f"do_sample, {', '.join(SAMPLING_OFF)}."
            )
        # Who asks for sampling and names no temperature means that of the model, as elsewhere in the harness.
        values = {**SAMPLING_OFF, **({"temperature": 1.0} if samples else {}), **given}
        for name, value in values.items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise UserError(f"generation_kwargs has {name}={value!r}: it must be a number.")
        sampling = sampling_params(
            temperature=values["temperature"], top_k=values["top_k"], top_p=values["top_p"], min_p=values["min_p"]
        )
        return cls(tuple(each for each in until if each), max_tokens, sampling)
