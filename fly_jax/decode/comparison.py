"""The same prompts decoded target-only, with standard verification and with FLy, and what is measured of it."""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fly_jax.config import FlyConfig, SamplingParams
from fly_jax.decode.checkpoints.load import LoadedModel
from fly_jax.decode.checkpoints.weights import Progress
from fly_jax.decode.drafters import Drafter
from fly_jax.decode.generate import Generation, Generator
from fly_jax.decode.prompts import Prompt
from fly_jax.metrics import AcceptanceCounts

MODES = ("target-only", "standard", "fly")
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
      counts: of the verified drafts, also past the end of a text.
    """

    num_tokens: int
    num_cycles: int
    prefill_seconds: float
    decode_seconds: float
    num_differing: int | None
    num_deferred: int
    counts: AcceptanceCounts

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
        """Emitted tokens a target step."""
        return self.num_tokens / self.num_cycles if self.num_cycles else 0.0


def figures(run: PromptRun, mode: str) -> Figures:
    """The figures of one text."""
    generation, reference = run.generations[mode], run.generations.get(MODES[0])
    differing = None
    if reference is not None and run.greedy:
        differing = num_differing(generation.token_ids, reference.token_ids)
    return Figures(
        len(generation.token_ids),
        generation.num_cycles,
        generation.prefill_seconds,
        generation.decode_seconds,
        differing,
        sum(generation.deferred),
        generation.counts,
    )


def totals(runs: Sequence[PromptRun]) -> dict[str, Figures]:
    """The figures of each mode over all prompts that were decoded in every mode."""
    complete = [run for run in runs if all(mode in run.generations for mode in MODES)]
    result = {}
    for mode in MODES if complete else ():
        parts = [figures(run, mode) for run in complete]
        counts = parts[0].counts
        for part in parts[1:]:
            counts = counts + part.counts
        result[mode] = Figures(
            sum(part.num_tokens for part in parts),
            sum(part.num_cycles for part in parts),
            sum(part.prefill_seconds for part in parts),
            sum(part.decode_seconds for part in parts),
            _sum_known([part.num_differing for part in parts]),
            sum(part.num_deferred for part in parts),
            counts,
        )
    return result


def _sum_known(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


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
      modes: by name, what decodes in it.
      max_model_len: capacity of the caches, in tokens.
      arguments: of every call of `Generator.generate`.
    """

    loaded: LoadedModel
    prompts: Sequence[Prompt]
    prompt_token_ids: Sequence[Sequence[int]]
    modes: Mapping[str, tuple[Generator, FlyConfig | None]]
    max_model_len: int
    arguments: Mapping[str, Any]

    def run(self, i: int, report: Callable[[str, float], None]) -> tuple[PromptRun, bool]:
        """Decodes a prompt in one mode after the other; also says whether the user interrupted it."""
        prompt, token_ids = self.prompts[i], self.prompt_token_ids[i]
        generations: dict[str, Generation] = {}
        interrupted = False
        try:
            for mode, (generator, config) in self.modes.items():
                label = f"generate: {prompt.name}, {mode}"
                on_tokens = functools.partial(_report_tokens, report, self.arguments["max_tokens"], label)
                generations[mode] = generator.generate(token_ids, config=config, on_tokens=on_tokens, **self.arguments)
        except KeyboardInterrupt:
            interrupted = True
        decode = self.loaded.tokenizer.decode
        pieces = {mode: token_pieces(decode, each.token_ids) for mode, each in generations.items()}
        greedy = self.arguments["sampling"].temperature is None
        return PromptRun(prompt.name, prompt.text, len(token_ids), generations, pieces, greedy), interrupted


def prepare(
    loaded: LoadedModel,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    *,
    config: FlyConfig,
    sampling: SamplingParams,
    max_tokens: int,
    seed: int,
    raw: bool,
    report: Progress,
) -> Comparison:
    """Encodes the prompts and compiles every step.

    Args:
      loaded: the target.
      drafter: of the two speculative modes.
      prompts: at least one.
      config: of the FLy mode.
      sampling: of every mode.
      max_tokens: most tokens to emit for a prompt.
      seed: of all drawing.
      raw: whether a prompt goes to the model as it is, not as a chat message.
      report: called with what is being done and the fraction done.

    Raises:
      UserError: a prompt does not fit the context, or the drafter the target.
    """
    token_ids = [_encode(loaded, prompt.text, raw=raw) for prompt in prompts]
    needed = max(len(each) for each in token_ids) + max_tokens
    max_model_len = min(-(-needed // 64) * 64, loaded.config.max_position_embeddings)
    target_only = Generator(loaded.decoder, max_model_len=max_model_len)
    speculative = Generator(loaded.decoder, drafter=drafter, max_model_len=max_model_len)
    for each in token_ids:
        speculative.check_prompt(each)
    modes = dict(zip(MODES, ((target_only, None), (speculative, None), (speculative, config)), strict=True))
    for i, (generator, mode_config) in enumerate(modes.values()):
        report("compile", i / len(modes))
        generator.warm_up(config=mode_config, sampling=sampling)
    report("compile", 1.0)
    arguments = {
        "sampling": sampling,
        "max_tokens": max_tokens,
        "eos_token_ids": loaded.tokenizer.eos_token_ids,
        "seed": seed,
    }
    return Comparison(loaded, prompts, token_ids, modes, max_model_len, arguments)


def _report_tokens(report: Progress, max_tokens: int, label: str, num_tokens: int) -> None:
    report(label, num_tokens / max_tokens)


def _encode(loaded: LoadedModel, text: str, *, raw: bool) -> list[int]:
    if not raw:
        text = loaded.tokenizer.apply_chat_template([{"role": "user", "content": text}])
    return loaded.tokenizer.encode(text)
