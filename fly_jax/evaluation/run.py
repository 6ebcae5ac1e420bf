"""What an evaluation decodes, and in which order: every batch in every mode, one after the other."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fly_jax.config import FlyConfig
from fly_jax.decode.checkpoint import LoadedModel
from fly_jax.decode.drafters import Drafter
from fly_jax.decode.generate import Generation, Generator
from fly_jax.evaluation.scorers import score
from fly_jax.evaluation.tasks import Task
from fly_jax.processing import SamplingParams

TARGET_ONLY, STANDARD = "target-only", "standard"


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way of decoding.

    Attributes:
      name: "target-only", "standard", or FLy with its settings.
      generator: what decodes.
      config: of FLy; None is lossless.
    """

    name: str
    generator: Generator
    config: FlyConfig | None


@dataclasses.dataclass(frozen=True)
class Unit:
    """One batch, decoded in every mode: what is stored whole or not at all.

    Attributes:
      batch_size: requests.
      seed: of all drawing.
      first: index of the first task.
      tasks: `batch_size` indices; those past the last task are tasks from the beginning again, so that every batch is
        full. They count for speed only.
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
        counts = [each.counts for each in scored]
        names = ("drafted_per_position", "accepted_per_position", "deferred_per_position")
        return {
            "prefill_seconds": generations[0].prefill_seconds,
            "decode_seconds": generations[0].decode_seconds,
            "num_tokens": sum(len(each.token_ids) for each in generations),
            "num_cycles": sum(each.num_cycles for each in generations),
            **{name: np.sum([getattr(each, name) for each in counts], 0).tolist() for name in names},
            "texts": [self._text(i, each) for i, each in zip(unit.tasks, scored, strict=False)],
        }

    def _text(self, i: int, generation: Generation) -> dict[str, Any]:
        text = self.loaded.tokenizer.decode(generation.token_ids)
        return {
            "task": self.tasks[i].name,
            "score": score(self.tasks[i], text),
            "text": text,
            "token_ids": list(generation.token_ids),
            "num_deferred": sum(generation.deferred),
            "num_cycles": generation.num_cycles,
            "finish_reason": generation.finish_reason,
        }


def plan(num_tasks: int, batch_sizes: Sequence[int], seeds: Sequence[int]) -> list[Unit]:
    """All units: batch size by batch size, seed by seed, in the order of the tasks."""
    return [
        Unit(
            batch_size,
            seed,
            first,
            tuple((first + i) % num_tasks for i in range(batch_size)),
            min(batch_size, num_tasks - first),
        )
        for batch_size in batch_sizes
        for seed in seeds
        for first in range(0, num_tasks, batch_size)
    ]


def prepare(
    loaded: LoadedModel,
    drafter: Drafter,
    tasks: Sequence[Task],
    *,
    configs: Mapping[str, FlyConfig],
    sampling: SamplingParams,
    max_tokens: int,
) -> Evaluation:
    """Encodes the prompts; compiles nothing yet.

    Args:
      loaded: the target.
      drafter: of standard verification and FLy.
      tasks: at least one.
      configs: of FLy, by the name of the mode.
      sampling: of every mode.
      max_tokens: most tokens to emit for a task; a task may say less.

    Raises:
      ModelError: a prompt does not fit the context, or the drafter the target.
    """
    prompts = [encode(loaded, task) for task in tasks]
    most = [min(max_tokens, task.max_tokens or max_tokens) for task in tasks]
    needed = max(len(prompt) + each for prompt, each in zip(prompts, most, strict=True))
    max_model_len = min(-(-needed // 64) * 64, loaded.config.max_position_embeddings)
    target_only = Generator(loaded.decoder, max_model_len=max_model_len)
    speculative = Generator(loaded.decoder, drafter=drafter, max_model_len=max_model_len)
    for prompt in prompts:
        speculative.check_prompt(prompt)
    modes = [Mode(TARGET_ONLY, target_only, None), Mode(STANDARD, speculative, None)]
    modes += [Mode(name, speculative, config) for name, config in configs.items()]
    return Evaluation(loaded, tasks, prompts, modes, sampling, most)


def encode(loaded: LoadedModel, task: Task) -> list[int]:
    """A task's token ids: its messages through the model's chat template."""
    return loaded.tokenizer.encode(loaded.tokenizer.apply_chat_template(task.messages))


def task_seed(seed: int, i: int) -> int:
    """The seed of task `i` in the run of a seed: the same in every mode and batch."""
    return int(np.random.SeedSequence([seed, i]).generate_state(1, np.uint32)[0])


def _report(report: Callable[[float], None], i: int, num_modes: int, most: int, num_tokens: int) -> None:
    report((i + min(num_tokens / most, 1.0)) / num_modes)
