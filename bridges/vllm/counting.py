"""What the plugin counts: verified steps, mismatches by class, and where the time went."""

import json
import logging
import multiprocessing.util
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fly_jax.files import write_whole

logger = logging.getLogger("vllm.fly_jax")

_SECONDS_BETWEEN_WRITES = 2.0
_MOST_PENDING = 256


class Counters:
    """Counts of one process; reading them waits for the device, adding does not.

    Attributes:
      counts: by name.
      seconds: of wall-clock time, by what it was spent on.
    """

    def __init__(self, about: Mapping[str, Any] | None = None) -> None:
        self.counts = dict.fromkeys(
            (
                "steps",
                "requests",
                "draft_tokens",
                "accepted",
                "deferred",
                "invalid",
                "steps_left_to_vllm",
                "programs_compiled",
                "mismatches_near_tie",
                "mismatches_documented",
                "mismatches_real",
                "records_written",
                "real_records_written",
                "trace_rows",
                "trace_cycles_differing",
                "trace_steps_left_out",
                "failed_writes",
            ),
            0,
        )
        self.seconds = {"jax": 0.0, "jax_compiling": 0.0, "vllm": 0.0}
        self._about = dict(about or {})
        self._pending: list[Any] = []
        self._path: Path | None = None
        self._pid = 0
        self._written = 0.0

    def add_step(self, num_draft_tokens: list[int], totals: Any) -> None:
        """One verified step; `totals` `[3]`: kept, deferred, invalid, on the device."""
        self.counts["steps"] += 1
        self.counts["requests"] += len(num_draft_tokens)
        self.counts["draft_tokens"] += sum(num_draft_tokens)
        self._pending.append(totals)
        if len(self._pending) > _MOST_PENDING:
            self._fold()
        if time.monotonic() - self._written > _SECONDS_BETWEEN_WRITES:
            self.write()

    def add_jax(self, seconds: float, num_compiled: int) -> None:
        """The time of a step in JAX, apart where programs were compiled in it."""
        self.seconds["jax_compiling" if num_compiled else "jax"] += seconds
        self.counts["programs_compiled"] += num_compiled

    def as_dict(self) -> dict[str, Any]:
        """Everything counted so far, and JAX's share of the time where vLLM decides as well."""
        self._fold()
        seconds = {f"{name}_seconds": round(value, 6) for name, value in self.seconds.items()}
        result = {**self._about, **self.counts, **seconds}
        if self.seconds["vllm"] > 0:
            result["overhead"] = round(self.seconds["jax"] / self.seconds["vllm"], 3)
        return result

    def keep_in(self, folder: Path) -> None:
        """Writes the counters to a file of this process from the first step on, and to the log at the end.

        Raises:
          OSError: the folder cannot be written to; later, when requests are under way, that is only counted.
        """
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"counters-{self._pid}.json"
        self._replace_file(self._path)
        # Not atexit, which processes started by fork skip.
        multiprocessing.util.Finalize(None, self._finish, exitpriority=0)

    def write(self) -> None:
        """Writes the file, if there is one; a failure is logged and counted, since nothing verified is wrong by it."""
        if self._path is None:
            return
        try:
            self._replace_file(self._path)
        except OSError as error:
            self.write_failed(error)

    def write_failed(self, error: OSError) -> None:
        """Counts a failure to write, and logs the first."""
        self.counts["failed_writes"] += 1
        if self.counts["failed_writes"] == 1:
            logger.error("fly_jax cannot write what it counts and records, and goes on: %s", error)

    def _replace_file(self, path: Path) -> None:
        write_whole(path, (json.dumps(self.as_dict(), indent=2) + "\n").encode())
        self._written = time.monotonic()

    def _fold(self) -> None:
        pending, self._pending = self._pending, []
        for totals in pending:
            kept, deferred, invalid = np.asarray(totals).tolist()
            self.counts["accepted"] += kept
            self.counts["deferred"] += deferred
            self.counts["invalid"] += invalid

    def _finish(self) -> None:
        self.write()
        logger.warning("fly_jax counted (%s): %s", self._path, json.dumps(self.as_dict()))
