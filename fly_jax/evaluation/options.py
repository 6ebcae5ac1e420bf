"""What an evaluation is told: how to decode, FLy's settings to compare, and the runs to make."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from fly_jax.config import FlyConfig
from fly_jax.decode.checks import check_choice, check_int
from fly_jax.decode.options import DecodeOptions
from fly_jax.errors import UserError
from fly_jax.evaluation.tasks import SPLITS

ALL = "all"


@dataclasses.dataclass(frozen=True)
class EvaluationOptions:
    """An evaluation.

    Attributes:
      decode: how to decode, in every mode; its `fly` and `seed` have no effect, the ones below count.
      fly: FLy's settings, each a mode of its own, W settled for this K.
      tasks: a file of tasks; None are the built-in ones.
      split: "choose", "report", or "all" of its tasks.
      batch_sizes: requests decoded together.
      seeds: of all drawing: every task is decoded with each.
      min_batches: batches of each size, at least: tasks come again, for speed only.

    Raises:
      UserError: an option is out of range or excluded by another.
    """

    decode: DecodeOptions
    fly: tuple[FlyConfig, ...] = (FlyConfig(),)
    tasks: Path | None = None
    split: str = "report"
    batch_sizes: tuple[int, ...] = (1,)
    seeds: tuple[int, ...] = (0,)
    min_batches: int = 3

    def __post_init__(self) -> None:
        check_choice("--split", self.split, (*SPLITS, ALL))
        check_int("--min-batches", self.min_batches, least=1)
        _check_different("--batch-sizes", self.batch_sizes, least=1)
        _check_different("--seeds", self.seeds, least=0)
        if self.decode.sampling.temperature is None and len(self.seeds) > 1:
            raise UserError(
                f"--seeds {','.join(map(str, self.seeds))}: at temperature 0 nothing is drawn; set --temperature, or "
                "one seed."
            )
        fly = []
        for config in self.fly:
            try:
                settled = dataclasses.replace(self.decode, fly=config).fly
            except UserError as error:
                raise UserError(f"--fly ({config.label}): {error}") from error
            assert settled is not None
            if settled in fly:
                raise UserError(f"--fly: {settled.label} is there twice.")
            fly.append(settled)
        object.__setattr__(self, "fly", tuple(fly))

    @property
    def workload(self) -> str:
        """Which tasks, for people."""
        return f"{self.tasks or 'built-in'}, {self.split}"

    @property
    def modes(self) -> dict[str, FlyConfig]:
        """FLy's settings by the name of the mode."""
        return {config.label: config for config in self.fly}

    def to_dict(self, model: str) -> dict[str, Any]:
        """Everything, for JSON; `model` is the target's name."""
        return {**self.batch_config(model), "batch_sizes": list(self.batch_sizes), "seeds": list(self.seeds)}

    def batch_config(self, model: str) -> dict[str, Any]:
        """What decides the results of a batch, for JSON; `model` is the target's name."""
        fields = self.decode.to_dict()
        for name in (*FlyConfig.vllm_names().values(), "max_model_len", "seed"):
            del fields[name]
        return {
            **fields,
            "tasks": self.workload,
            "model": model,
            "fly": list(self.modes),
            "model_files": _identity(self.decode.model),
            "draft_model_files": _identity(fields["draft_model"]),
        }


def _identity(path: str | None) -> str | None:
    """Tells one model from another that has the same name: paths, sizes and times of its files; None is the default."""
    if path is None:
        return None
    files = sorted(Path(path).iterdir()) if Path(path).is_dir() else [Path(path)]
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


def _check_different(option: str, numbers: tuple[int, ...], *, least: int) -> None:
    if not numbers or min(numbers) < least or len(set(numbers)) < len(numbers) or max(numbers) >= 2**32:
        given = ",".join(map(str, numbers))
        raise UserError(f"{option} must be different numbers from {least} to 2**32 - 1, got {given!r}.")
