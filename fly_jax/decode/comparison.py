"""The same prompts decoded target-only, with standard verification and with FLy, and what is measured of it."""

import dataclasses
import difflib
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fly_jax.decode.checkpoints.load import LoadedModel
from fly_jax.decode.checkpoints.weights import Progress
from fly_jax.decode.drafters import Drafter
from fly_jax.decode.generate import Generation
from fly_jax.decode.options import DecodeOptions
from fly_jax.decode.prepare import STANDARD, TARGET_ONLY, Mode, prepare_modes
from fly_jax.decode.prompts import Prompt
from fly_jax.metrics import AcceptanceCounts

FLY = "fly"
MODES = (TARGET_ONLY, STANDARD, FLY)
"""In the order in which they are run and shown."""


@dataclasses.dataclass(frozen=True)
class PromptRun:
    """One prompt decoded in several modes.

    Attributes:
      name: a short label.
      prompt: the text given to the model.
      num_prompt_tokens: its length.
      generations: by mode; fewer than `MODES` after an interrupt.
      pieces: by mode, the text of each token.
      greedy: whether nothing was drawn at random, so that the texts can be compared token by token.
    """

    name: str
    prompt: str
    num_prompt_tokens: int
    generations: Mapping[str, Generation]
    pieces: Mapping[str, Sequence[str]]
    greedy: bool = True


@dataclasses.dataclass(frozen=True)
class Figures:
    """What is measured of one mode, over any number of generations.

    Attributes:
      num_tokens: emitted.
      num_cycles: target steps after prefill.
      prefill_seconds: total.
      decode_seconds: total.
      num_differing: tokens to insert, delete or replace to get target-only's texts; None when these are not known, or
        drawn at random.
      num_deferred: tokens kept by a deferral.
      counts: of the verified drafts, each text's up to its end.
    """

    num_tokens: int
    num_cycles: int
    prefill_seconds: float
    decode_seconds: float
    num_differing: int | None
    num_deferred: int
    counts: AcceptanceCounts

    @classmethod
    def of_batch(cls, generations: Sequence[Generation]) -> "Figures":
        """The figures of texts decoded together, at least one; what differs is not known."""
        return cls(
            num_tokens=sum(len(each.token_ids) for each in generations),
            num_cycles=sum(each.num_cycles for each in generations),
            # Those of the batch, in each of its texts.
            prefill_seconds=generations[0].prefill_seconds,
            decode_seconds=generations[0].decode_seconds,
            num_differing=None,
            num_deferred=sum(sum(each.deferred) for each in generations),
            counts=functools.reduce(operator.add, [each.counts for each in generations]),
        )

    def __add__(self, other: "Figures") -> "Figures":
        """The figures of both, one after the other."""
        known = self.num_differing is not None and other.num_differing is not None
        return Figures(
            num_tokens=self.num_tokens + other.num_tokens,
            num_cycles=self.num_cycles + other.num_cycles,
            prefill_seconds=self.prefill_seconds + other.prefill_seconds,
            decode_seconds=self.decode_seconds + other.decode_seconds,
            num_differing=(self.num_differing or 0) + (other.num_differing or 0) if known else None,
            num_deferred=self.num_deferred + other.num_deferred,
            counts=self.counts + other.counts,
        )

    @property
    def total_seconds(self) -> float:
        """Prefill and decoding."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float:
        """Of decoding."""
        return self.num_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def tokens_per_cycle(self) -> float:
        """Emitted tokens per target step."""
        return self.num_tokens / self.num_cycles if self.num_cycles else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything measured, ready for `json.dumps`."""
        counts = self.counts
        return {
            "num_tokens": self.num_tokens,
            "num_cycles": self.num_cycles,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "total_seconds": self.total_seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_cycle": self.tokens_per_cycle,
            "num_differing": self.num_differing,
            "num_drafts": int(counts.num_drafts),
            "num_draft_tokens": int(counts.num_draft_tokens),
            "num_accepted": int(counts.num_accepted),
            "num_deferred": self.num_deferred,
            "mean_acceptance_length": float(counts.mean_acceptance_length()),
            "acceptance_rate": float(counts.acceptance_rate()),
            "acceptance_rate_per_position": [float(rate) for rate in counts.acceptance_rate_per_position()],
            "deferral_rate": float(counts.deferral_rate()),
        }


def figures(run: PromptRun, mode: str) -> Figures:
    """The figures of one text."""
    generation, reference = run.generations[mode], run.generations.get(TARGET_ONLY)
    differing = None
    if reference is not None and run.greedy:
        differing = num_differing(generation.token_ids, reference.token_ids)
    return dataclasses.replace(Figures.of_batch([generation]), num_differing=differing)


def totals(runs: Sequence[PromptRun]) -> dict[str, Figures]:
    """The figures of each mode over all prompts that were decoded in every mode."""
    complete = [run for run in runs if all(mode in run.generations for mode in MODES)]
    if not complete:
        return {}
    return {mode: functools.reduce(operator.add, [figures(run, mode) for run in complete]) for mode in MODES}


def num_differing(token_ids: Sequence[int], reference: Sequence[int]) -> int:
    """How many tokens to insert, delete or replace to turn one text into the other."""
    matcher = difflib.SequenceMatcher(None, list(token_ids), list(reference), autojunk=False)
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


def token_pieces(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> list[str]:
    """The text of each token; where several make up one character, the last of them has it."""
    pieces, done = [], 0
    for i in range(len(token_ids)):
        text = decode(token_ids[: i + 1])
        incomplete = text.endswith("\N{REPLACEMENT CHARACTER}") and i + 1 < len(token_ids)
        pieces.append("" if incomplete else text[done:])
        done = done if incomplete else len(text)
    return pieces


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A model, ready to decode the same prompts in every mode.

    Attributes:
      loaded: the target.
      prompts: what to decode.
      prompt_token_ids: the same, encoded.
      modes: by name, in the order of `MODES`.
      options: of every mode.
    """

    loaded: LoadedModel
    prompts: Sequence[Prompt]
    prompt_token_ids: Sequence[Sequence[int]]
    modes: Mapping[str, Mode]
    options: DecodeOptions

    @property
    def max_model_len(self) -> int:
        """Capacity of the caches, in tokens."""
        return self.modes[TARGET_ONLY].generator.max_model_len

    def run(self, i: int, report: Progress) -> tuple[PromptRun, bool]:
        """Decodes a prompt in one mode after the other; also says whether the user interrupted it."""
        prompt, token_ids, options = self.prompts[i], self.prompt_token_ids[i], self.options
        generations: dict[str, Generation] = {}
        interrupted = False
        try:
            for name, mode in self.modes.items():
                label = f"generate: {prompt.name}, {name}"
                generations[name] = mode.generator.generate(
                    token_ids,
                    config=mode.config,
                    sampling=options.sampling,
                    max_tokens=options.max_tokens,
                    eos_token_ids=self.loaded.tokenizer.eos_token_ids,
                    seed=options.seed,
                    on_tokens=functools.partial(_report_tokens, report, options.max_tokens, label),
                )
        except KeyboardInterrupt:
            interrupted = True
        decode = self.loaded.tokenizer.decode
        pieces = {name: token_pieces(decode, each.token_ids) for name, each in generations.items()}
        greedy = options.sampling.temperature is None
        return PromptRun(prompt.name, prompt.text, len(token_ids), generations, pieces, greedy), interrupted


def prepare(
    loaded: LoadedModel, drafter: Drafter | None, prompts: Sequence[Prompt], options: DecodeOptions, report: Progress
) -> Comparison:
    """Encodes the prompts and compiles every step.

    Args:
      loaded: the target.
      drafter: of the two speculative modes.
      prompts: at least one.
      options: of every mode; `fly` is that of the FLy mode.
      report: called with what is being done and the fraction done.

    Raises:
      UserError: a prompt does not fit the context, or the drafter the target.
    """
    encode = functools.partial(loaded.tokenizer.encode_chat, raw=options.raw)
    token_ids = [encode([{"role": "user", "content": prompt.text}]) for prompt in prompts]
    configs = {} if options.fly is None else {FLY: options.fly}
    num_tokens = max(len(each) for each in token_ids) + options.max_tokens
    modes = prepare_modes(loaded, drafter, configs, num_tokens=num_tokens)
    for each in token_ids:
        modes[0].generator.check_prompt(each)
    for i, mode in enumerate(modes):
        report("compile", i / len(modes))
        mode.generator.warm_up(config=mode.config, sampling=options.sampling)
    report("compile", 1.0)
    return Comparison(loaded, prompts, token_ids, {mode.name: mode for mode in modes}, options)


def _report_tokens(report: Progress, max_tokens: int, label: str, num_tokens: int) -> None:
    report(label, num_tokens / max_tokens)
