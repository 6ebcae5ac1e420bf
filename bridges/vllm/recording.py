"""`FLY_JAX_VLLM=record`: a trace of what vLLM verifies, for `fly-jax sweep`; vLLM decides as always.

A step costs one JAX function over its logits (it reads them as verifying does, and is waited for) and the copy of a few
small arrays; no noise but the acceptance uniforms is drawn, and none where every request is greedy. Collecting and
writing happen in a thread. After `FLY_JAX_VLLM_RECORD_ROWS` draft tokens nothing is computed any more.

The function that is hooked is not told which request is which: a trace has its place in the batch of a step. A step in
which no request has drafts does not come by. A request that is still reading its prompt counts as one without drafts.
"""

import dataclasses
import logging
import math
import multiprocessing.util
import os
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from fly_jax.bridges.vllm import v1
from fly_jax.bridges.vllm.counting import Counters
from fly_jax.bridges.vllm.interface import Call
from fly_jax.bridges.vllm.programs import program
from fly_jax.config import FlyConfig
from fly_jax.noise import VerifyNoise
from fly_jax.traces.file import TraceWriter
from fly_jax.traces.record import DEFERRED, TraceRows, trace_flattened_rows
from fly_jax.verify import fly_verify_rows

logger = logging.getLogger("vllm.fly_jax")

_SECONDS_BETWEEN_WRITES = 60.0


class Recorder:
    """Collects the rows of one process and keeps a file of them: every minute while there are new ones, and at the end.

    Attributes:
      config: FLy's settings of every recorded step.
      is_full: whether nothing more is recorded.
      pid: the number of that process.
    """

    def __init__(
        self, path: Path, config: FlyConfig | None, max_rows: int, about: Mapping[str, Any], counters: Counters
    ) -> None:
        self.config, self.is_full, self.pid = config, False, os.getpid()
        self._counters = counters
        self._path, self._max_rows, self._num_rows, self._num_steps = path, max_rows, 0, 0
        self._writer = TraceWriter(config, source="vLLM", max_rows=max_rows, **about)
        self._queue: queue.SimpleQueue[tuple[TraceRows, int] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._collect, name="fly_jax trace", daemon=True)
        self._thread.start()
        # Not atexit, which processes started by fork skip; before the counters are written for the last time.
        multiprocessing.util.Finalize(None, self.finish, exitpriority=1)

    def add(self, rows: TraceRows) -> None:
        """Hands over the rows of a step, of NumPy arrays; does not wait.

        Raises:
          RuntimeError: collecting failed, in a way that is not the file system's.
        """
        if self._failure is not None:
            raise RuntimeError("recording the trace failed") from self._failure
        needed = int(np.maximum(rows.num_draft_tokens, 1).sum())
        if self._num_rows + needed > self._max_rows:
            self.is_full = True
            # The writer does not take it either, and the file then says that it is full.
            self._queue.put((rows, self._num_steps))
            self._queue.put(None)
            logger.warning(
                "fly_jax has recorded %d rows, which is all that FLY_JAX_VLLM_RECORD_ROWS=%d allows: %s",
                self._num_rows,
                self._max_rows,
                self._path,
            )
            return
        self._num_rows += needed
        self._counters.counts["trace_rows"] += needed
        self._queue.put((rows, self._num_steps))
        self._num_steps += 1

    def finish(self) -> None:
        """Writes what was handed over, and ends the thread."""
        self._queue.put(None)
        self._thread.join()
        if self._failure is not None:
            logger.error("fly_jax failed to record the trace: %r", self._failure)

    def _collect(self) -> None:
        try:
            due = math.inf  # while nothing is new
            while True:
                try:
                    wait = max(due - time.monotonic(), 0.0)
                    handed = self._queue.get(timeout=None if wait == math.inf else wait)
                    if handed is None:
                        break
                    rows, step = handed
                    self._writer.add(rows, request=np.arange(len(rows.num_accepted)), cycle=step)
                    due = min(due, time.monotonic() + _SECONDS_BETWEEN_WRITES)
                except queue.Empty:
                    pass
                if time.monotonic() >= due:
                    self._save()
                    due = math.inf
            self._save()
        except BaseException as error:
            self._failure = error

    def _save(self) -> None:
        try:
            self._writer.save(self._path)
        except OSError as error:
            self._counters.write_failed(error)


def rows_of(
    call: Call,
    config: FlyConfig | None,
    generators: Mapping[int, torch.Generator],
    default_generator: torch.Generator,
) -> tuple[TraceRows, int]:
    """What a trace holds of a call of `rejection_sample`, as NumPy arrays of `B` requests; waits for the device.

    Args:
      call: its arguments.
      config: FLy's settings, or None for standard verification.
      generators: copies of the requests' own.
      default_generator: a copy of torch's own.

    Returns:
      The rows, and how many requests stopped at an invalid one.
    """
    lengths, logits, metadata = call.num_draft_tokens, call.target_logits, call.sampling_metadata
    step = v1.Step(call.draft_token_ids, lengths, logits, None, call.bonus_token_ids.reshape(-1), config=config)
    if not metadata.all_greedy:
        step = dataclasses.replace(
            step,
            draft_probs=call.draft_probs,
            sampling=v1.sampling_requests(metadata),
            uniform=v1.draw_uniform(lengths, logits.device, generators, default_generator),
        )
    rows, num_invalid = program(_trace, logits.device)(*v1.crossed(step), num_positions=v1.num_positions(step))
    rows = jax.tree.map(lambda values: np.asarray(values)[: len(lengths)], rows)
    return rows, int(num_invalid)


def as_emitted(rows: TraceRows, num_invalid: int, tokens: torch.Tensor, counters: Counters) -> TraceRows:
    """The rows of a step with the acceptance of the `tokens` `[B, K + 1]` that vLLM emitted, -1 padded; counts them.

    Where JAX would have kept more or less, a decision was near its opposite: the flags of such a cycle are JAX's.
    """
    num_accepted = (tokens != -1).sum(dim=1).cpu().numpy().astype(np.int32) - 1
    kept = np.arange(rows.flags.shape[1]) < num_accepted[:, None]
    num_deferred = int((kept & ((rows.flags & DEFERRED) > 0)).sum())
    counters.add_step(rows.num_draft_tokens.tolist(), np.array([num_accepted.sum(), num_deferred, num_invalid]))
    counters.counts["trace_cycles_differing"] += int((num_accepted != rows.num_accepted).sum())
    fields: dict[str, Any] = {**vars(rows), "num_accepted": num_accepted}
    return TraceRows(**fields)


def _trace(
    target_logits: Array,
    draft_token_ids: Array,
    num_draft_tokens: Array,
    bonus_token_ids: Array,
    sampling: Array | None,
    uniform: Array | None,
    exponential: None,
    draft_probs: Array | None,
    config: FlyConfig | None,
    *,
    num_positions: int,
) -> tuple[TraceRows, Array]:
    row_index = v1.row_index_of(num_draft_tokens, num_positions)
    noise = None
    if uniform is not None:
        # The token after the accepted prefix is not looked at, so that it is not computed either.
        final = jnp.zeros((len(num_draft_tokens), 2), jnp.float32)
        noise = VerifyNoise(v1.per_request(row_index, uniform, 1.0), final_uniform=final)
    arguments: dict[str, Any] = {
        "target_logits": target_logits,
        "row_index": row_index,
        "draft_token_ids": v1.per_request(row_index, draft_token_ids, -1),
        "num_draft_tokens": num_draft_tokens,
        "draft_probs": draft_probs,
        # The logits are divided by it already.
        "temperature": None if sampling is None else sampling.astype(jnp.float32),
    }
    verification = fly_verify_rows(**arguments, config=config, noise=noise, bonus_token_ids=bonus_token_ids)
    rows = trace_flattened_rows(verification=verification, **arguments)
    return rows, jnp.sum(verification.invalid, dtype=jnp.int32)
