"""One step of vLLM's verification in each mode of the plugin: `replace`, `crosscheck` and `record`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import torch

from fly_jax.bridges.vllm import crosscheck, programs, recording, v1
from fly_jax.bridges.vllm.crosscheck import Mismatch
from fly_jax.bridges.vllm.interface import Call
from fly_jax.bridges.vllm.session import Session
from fly_jax.config import FlyConfig

logger = logging.getLogger("vllm.fly_jax")


def _replace(session: Session, call: Call, original: Callable[[], torch.Tensor]) -> torch.Tensor:
    """JAX's tokens."""
    return _verify(session, call)[0]


def _crosscheck(session: Session, call: Call, original: Callable[[], torch.Tensor]) -> torch.Tensor:
    """vLLM's tokens, after JAX has decided the same step beside it."""
    # JAX first, with copies of the generators: then vLLM finds everything as if JAX had not been there.
    ours, step = _verify(session, call, _copied_generators(call))
    start = time.perf_counter()
    theirs = original()
    differing = crosscheck.differing_requests(theirs, ours)
    session.counters.seconds["vllm"] += time.perf_counter() - start
    if differing:
        _report(session, step, theirs, ours, crosscheck.classify(step, theirs, ours, differing))
    return theirs


def _record(session: Session, call: Call, original: Callable[[], torch.Tensor]) -> torch.Tensor:
    """vLLM's tokens, after what a trace holds of the step has been computed beside it."""
    config = v1.fly_config(call.fly_window_size, call.fly_entropy_threshold, call.fly_entropy_top_k)
    recorder = _recorder(session, config)
    if recorder.is_full:
        return original()
    counters = session.counters
    if config != recorder.config:
        counters.counts["trace_steps_left_out"] += 1
        if counters.counts["trace_steps_left_out"] == 1:
            logger.warning("fly_jax records one setting of FLy, %s, and leaves out steps of others", recorder.config)
        return original()
    with programs.Watch() as watch:
        rows, num_invalid = recording.rows_of(call, config, *_copied_generators(call))
    counters.add_jax(watch.seconds, watch.num_compiled)
    start = time.perf_counter()
    tokens = original()
    counters.seconds["vllm"] += time.perf_counter() - start
    recorder.add(recording.as_emitted(rows, num_invalid, tokens, counters))
    return tokens


MODES = {"replace": _replace, "crosscheck": _crosscheck, "record": _record}
"""What is done with a step, by the name of the mode: the session, the call, and the same call of vLLM's own."""


def _verify(
    session: Session, call: Call, generators: tuple[dict[int, torch.Generator], torch.Generator] | None = None
) -> tuple[torch.Tensor, v1.Step]:
    """The tokens and the step of one call, counted and timed."""
    with programs.Watch() as watch:
        own, default = (None, None) if generators is None else generators
        step = v1.draw_step(
            call.draft_token_ids,
            call.num_draft_tokens,
            call.draft_probs,
            call.target_logits,
            call.bonus_token_ids,
            call.sampling_metadata,
            config=v1.fly_config(call.fly_window_size, call.fly_entropy_threshold, call.fly_entropy_top_k),
            generators=own,
            default_generator=default,
        )
        verification, totals = v1.verify(step)
        tokens = v1.emitted(verification, len(step.num_draft_tokens), call.max_spec_len)
    session.counters.add_jax(watch.seconds, watch.num_compiled)
    session.counters.add_step(step.num_draft_tokens, totals)
    return tokens, step


def _report(
    session: Session, step: v1.Step, theirs: torch.Tensor, ours: torch.Tensor, mismatches: list[Mismatch]
) -> None:
    """Counts the mismatches of a step, records it if few were yet, and logs it if it is recorded or real."""
    counters = session.counters
    for mismatch in mismatches:
        counters.counts[f"mismatches_{mismatch.kind}"] += 1
    is_real = any(mismatch.kind == "real" for mismatch in mismatches)
    # Real ones have a quota of their own, so that near-ties cannot use it up.
    quota = "real_records_written" if is_real else "records_written"
    where = ""
    if counters.counts[quota] < session.settings.records:
        try:
            path = crosscheck.save(session.settings.folder, step, theirs, ours, mismatches)
        except OSError as error:
            counters.write_failed(error)
        else:
            counters.counts[quota] += 1
            where = f"; `fly-jax crosscheck {path}` explains it"
    if where or is_real:
        logger.warning("fly_jax: %s%s", crosscheck.summary(mismatches), where)
    counters.write()


def _recorder(session: Session, config: FlyConfig | None) -> recording.Recorder:
    """The recorder of this process, made at the first step, with the setting of that step."""
    pid = os.getpid()
    # A process started by fork has its parent's recorder, but not the thread that collects.
    if session.recorder is None or session.recorder.pid != pid:
        # A process in a container may have the same number each time it is started.
        path = session.settings.folder / f"trace-{pid}-{time.time_ns()}.npz"
        session.recorder = recording.Recorder(
            path, config, session.settings.record_rows, session.speculation, session.counters
        )
    return session.recorder


def _copied_generators(call: Call) -> tuple[dict[int, torch.Generator], torch.Generator]:
    """Copies of the requests' generators and of torch's own."""
    copies = {request: generator.clone_state() for request, generator in call.sampling_metadata.generators.items()}
    device = call.target_logits.device
    default = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]
    return copies, default.clone_state()
