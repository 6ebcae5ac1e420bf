"""What the benchmarks report: ratios of things that ran one after the other, once per round."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Ratio:
    """One ratio, measured once per round.

    Attributes:
      name: what is divided by what.
      definition: how each side is measured.
      goal: what it should reach; None where it only explains another.
      at_most: whether smaller is better.
      values: one per round.
    """

    name: str
    definition: str
    goal: float | None
    at_most: bool
    values: tuple[float, ...]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median, upper quartile over rounds."""
        lower, median, upper = np.quantile(self.values, [0.25, 0.5, 0.75]).tolist()
        return lower, median, upper

    @property
    def is_met(self) -> bool | None:
        """Whether the median is within the goal, if there is one."""
        median = self.quartiles[1]
        if self.goal is None:
            return None
        return median <= self.goal if self.at_most else median >= self.goal

    def verdict(self, unit: str = "") -> str:
        """The goal and whether it is met, for a table; "-" without one."""
        return verdict("<=" if self.at_most else ">=", self.goal, self.is_met, unit)

    def fields(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`."""
        return {**dataclasses.asdict(self), "quartiles": list(self.quartiles), "is_met": self.is_met}


def verdict(sign: str, goal: float | None, is_met: bool | None, unit: str = "") -> str:
    """A goal and whether it is met, for a table; "-" without one."""
    if goal is None:
        return "-"
    return f"{sign} {goal:g}{unit} {'-' if is_met is None else 'met' if is_met else 'MISSED'}"
