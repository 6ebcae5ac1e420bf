"""From options to what decodes: models loaded, the drafter made, one generator for each way of decoding."""

import dataclasses
from collections.abc import Mapping

from fly_jax.config import FlyConfig
from fly_jax.decode.checkpoints.load import LoadedModel, load_model
from fly_jax.decode.checkpoints.weights import Progress
from fly_jax.decode.drafters import Drafter, DraftModel, LayerSkip, PromptLookup, default_skip_layers
from fly_jax.decode.generate import Generator, context_length
from fly_jax.decode.options import DecodeOptions, LayerSkipOptions, NgramOptions
from fly_jax.decode.vocab import VocabMapping
from fly_jax.errors import UserError

TARGET_ONLY, STANDARD = "target-only", "standard"

_STEP = 64
"""Capacities are multiples of it, so that texts of similar length share a compilation."""


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way of decoding.

    Attributes:
      name: "target-only", "standard", or a name of FLy's.
      generator: what decodes.
      config: of FLy; None is lossless.
    """

    name: str
    generator: Generator
    config: FlyConfig | None


def make_drafter(options: DecodeOptions, target: LoadedModel, progress: Progress) -> Drafter | None:
    """The drafter that the options ask for, its model loaded; None for target-only decoding.

    Raises:
      UserError: the draft model cannot be read, or has no token in common with the target.
    """
    drafter, k = options.drafter, options.num_speculative_tokens
    if drafter is None:
        return None
    if isinstance(drafter, NgramOptions):
        return PromptLookup(k, drafter.prompt_lookup_max, drafter.prompt_lookup_min)
    if isinstance(drafter, LayerSkipOptions):
        layers = drafter.skip_layers
        if layers is None:
            layers = default_skip_layers(target.config.num_layers)
        return LayerSkip(layers, k, drafter.draft_sample_method)
    draft = load_model(drafter.draft_model, progress=progress)
    mapping = vocab_mapping_of(target, draft)
    padded_apart = mapping is None and draft.config.vocab_size != target.config.vocab_size
    return DraftModel(draft.decoder, k, drafter.draft_sample_method, mapping, padded_apart)


def vocab_mapping_of(target: LoadedModel, draft: LoadedModel) -> VocabMapping | None:
    """Between the two models' vocabularies; None when these are the same, token by token.

    Raises:
      UserError: they have no token in common.
    """
    ours, theirs = (each.tokenizer.vocabulary(each.config.vocab_size) for each in (target, draft))
    if ours.same_tokens(theirs):
        return None
    try:
        return VocabMapping.between(ours, theirs)
    except ValueError as error:
        raise UserError(f"draft model {draft.name}: {error}.") from error


def prepare_modes(
    target: LoadedModel, drafter: Drafter | None, configs: Mapping[str, FlyConfig], *, num_tokens: int
) -> tuple[Mode, ...]:
    """Target-only, standard verification, and FLy in each of its settings; compiles nothing yet.

    Args:
      target: what verifies.
      drafter: of all modes but target-only.
      configs: of FLy, by the name of the mode.
      num_tokens: of the longest prompt and its output; what exceeds a model's context is cut off.

    Raises:
      UserError: the drafter does not fit the target.
    """
    max_model_len = min(-(-num_tokens // _STEP) * _STEP, context_length(target.decoder, drafter))
    target_only = Generator(target.decoder, max_model_len=max_model_len)
    speculative = Generator(target.decoder, drafter=drafter, max_model_len=max_model_len)
    return (
        Mode(TARGET_ONLY, target_only, None),
        Mode(STANDARD, speculative, None),
        *(Mode(name, speculative, config) for name, config in configs.items()),
    )
