"""What an evaluation decodes, and in which order: every batch in every mode, one after the other."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fly_jax.config import FlyConfig, SamplingParams
from fly_jax.decode.checkpoints.load import LoadedModel
from fly_jax.decode.drafters import Drafter
from fly_jax.decode.generate import Generation, context_length
from fly_jax.decode.options import DecodeOptions
from fly_jax.decode.prepare import Mode, prepare_modes
from fly_jax.errors import UserError
from fly_jax.evaluation.tasks import Task


@dataclasses.dataclass(frozen=True)
class Unit:
    """One batch, decoded in every mode: what is stored whole or not at all.

    Attributes:
      batch_size: requests.
      seed: of all drawing.
      first: how many tasks came before.
      tasks: `batch_size` indices; past the last task come the first ones again, so that every batch is full and there
        are as many batches as asked for. They count for speed only.
      num_scored: how many of them are here for the first time.
    """

    batch_size: int
    seed: int
    first: int
    tasks: tuple[int, ...]
    num_scored: int

    @property
    def key(self) -> list[int]:
        """What tells it from the other units."""
        return [self.batch_size, self.seed, self.first]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Everything a unit needs.

    Attributes:
      loaded: the target.
      tasks: in their order.
      prompts: their token ids.
      modes: target-only first, standard second, then FLy.
      sampling: of every mode.
      max_tokens: for each task.
    """

    loaded: LoadedModel
    tasks: Sequence[Task]
    prompts: Sequence[Sequence[int]]
    modes: Sequence[Mode]
    sampling: SamplingParams
    max_tokens: Sequence[int]

    def run(self, unit: Unit, turn: int, report: Callable[[float], None]) -> dict[str, Any]:
        """Decodes a batch in every mode, beginning with another one at each turn, and scores the texts.

        Returns:
          The unit's record: see `fly_jax.evaluation.results`.
        """
        first = turn % len(self.modes)
        order = [*self.modes[first:], *self.modes[:first]]
        records: dict[str, Any] = {}
        for i, mode in enumerate(order):
            on_tokens = functools.partial(_report, report, i, len(order), sum(self.max_tokens[j] for j in unit.tasks))
            records[mode.name] = self._record(unit, self._decode(unit, mode, on_tokens))
        return {"unit": unit.key, "modes": {mode.name: records[mode.name] for mode in self.modes}}

    def _decode(self, unit: Unit, mode: Mode, on_tokens: Callable[[int], None]) -> list[Generation]:
        return mode.generator.generate_batch(
            [self.prompts[i] for i in unit.tasks],
            config=mode.config,
            sampling=self.sampling,
            max_tokens=[self.max_tokens[i] for i in unit.tasks],
            eos_token_ids=self.loaded.tokenizer.eos_token_ids,
            seed=[task_seed(unit.seed, i) for i in unit.tasks],
            on_tokens=on_tokens,
        )

    def _record(self, unit: Unit, generations: Sequence[Generation]) -> dict[str, Any]:
        scored = generations[: unit.num_scored]
        names = ("drafted_per_position", "accepted_per_position", "deferred_per_position")

        def total(name: str) -> list[int]:
            # Of the same length where nothing is scored.
            nothing = np.zeros_like(getattr(generations[0].counts, name))
            return sum((getattr(each.counts, name) for each in scored), start=nothing).tolist()

        return {
            "prefill_seconds": generations[0].prefill_seconds,
            "decode_seconds": generations[0].decode_seconds,
            "num_tokens": sum(len(each.token_ids) for each in generations),
            "num_cycles": sum(each.num_cycles for each in generations),
            **{name: total(name) for name in names},
            "texts": [self._text(i, each) for i, each in zip(unit.tasks, scored, strict=False)],
        }

    def _text(self, i: int, generation: Generation) -> dict[str, Any]:
        text = self.loaded.tokenizer.decode(generation.token_ids)
        return {
            "task": self.tasks[i].name,
            "score": self.tasks[i].score(text),
            "text": text,
            "token_ids": list(generation.token_ids),
            "num_deferred": sum(generation.deferred),
            "num_cycles": generation.num_cycles,
            "finish_reason": generation.finish_reason,
        }


def plan(num_tasks: int, batch_sizes: Sequence[int], seeds: Sequence[int], min_batches: int = 1) -> list[Unit]:
    """All units: batch size by batch size, seed by seed, in the order of the tasks.

    Args:
      num_tasks: all of them are decoded at every batch size and seed.
      batch_sizes: requests decoded together.
      seeds: of all drawing.
      min_batches: batches of each size and seed, at least.
    """
    return [
        Unit(
            batch_size,
            seed,
            first,
            tuple((first + i) % num_tasks for i in range(batch_size)),
            max(0, min(batch_size, num_tasks - first)),
        )
        for batch_size in batch_sizes
        for seed in seeds
        for first in range(0, max(num_tasks, min_batches * batch_size), batch_size)
    ]


def prepare(
    loaded: LoadedModel,
    drafter: Drafter | None,
    tasks: Sequence[Task],
    options: DecodeOptions,
    configs: Mapping[str, FlyConfig],
) -> Evaluation:
    """Encodes the prompts; compiles nothing yet.

    Args:
      loaded: the target.
      drafter: of standard verification and FLy.
      tasks: at least one; a task may ask for fewer tokens than the options.
      options: of every mode.
      configs: of FLy, by the name of the mode.

    Raises:
      UserError: a task does not fit the model, its context, or the draft model's; or the drafter not the target.
    """
    prompts = [_encode(loaded, task, raw=options.raw) for task in tasks]
    most = [min(options.max_tokens, task.max_tokens or options.max_tokens) for task in tasks]
    context = context_length(loaded.decoder, drafter)
    for task, prompt, each in zip(tasks, prompts, most, strict=True):
        if len(prompt) + each > context:
            raise UserError(
                f"task {task.name!r} needs {len(prompt)} tokens for its prompt and {each} for its answer, and the "
                f"context is {context}: shorten it, or lower --max-tokens."
            )
    num_tokens = max(len(prompt) + each for prompt, each in zip(prompts, most, strict=True))
    modes = prepare_modes(loaded, drafter, configs, num_tokens=num_tokens)
    return Evaluation(loaded, tasks, prompts, modes, options.sampling, most)


def _encode(loaded: LoadedModel, task: Task, *, raw: bool) -> list[int]:
    try:
        token_ids = loaded.tokenizer.encode_chat(task.messages, raw=raw)
    except UserError as error:
        raise UserError(f"task {task.name!r}: {error}") from error
    if not token_ids:
        raise UserError(f"task {task.name!r}: its prompt is empty.")
    return token_ids


def task_seed(seed: int, i: int) -> int:
    """The seed of task `i` in the run of a seed: the same in every mode and batch."""
    return int(np.random.SeedSequence([seed, i]).generate_state(1, np.uint32)[0])


def _report(report: Callable[[float], None], i: int, num_modes: int, most: int, num_tokens: int) -> None:
    report((i + min(num_tokens / most, 1.0)) / num_modes)
