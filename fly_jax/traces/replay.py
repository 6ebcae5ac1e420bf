"""Replays a trace under many settings of FLy at once: what each cycle would have kept, and at what risk.

Of a recorded cycle the outcome under any setting is known exactly: its drafts, the target's rows for them and its noise
are the same whatever is kept. What follows a changed outcome is not: another number of kept tokens starts the next
cycle elsewhere, with other drafts, and after a deferral the text itself goes another way.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fly_jax import kernels
from fly_jax.traces.file import Trace
from fly_jax.traces.record import DEFERRABLE, DEFERRED, NATIVELY_ACCEPTED, TOP_K

FAR_BELOW = math.log(10)
"""Nats below the argmax from which a deferred draft counts as far below it: a tenth of its probability."""

# Settings x cycles x K at once: the temporaries stay in the processor's cache.
_MOST_ELEMENTS = 1 << 20


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Settings:
    """`S` settings of FLy; a threshold of +inf is standard verification.

    Attributes:
      window_sizes: `[S]` int32, at least 1.
      thresholds: `[S]` float32, nats.
      top_ks: `[S]` int32, 1 to 8.
    """

    window_sizes: Any
    thresholds: Any
    top_ks: Any

    @classmethod
    def from_lists(cls, settings: Sequence[tuple[int, float, int]]) -> "Settings":
        """Of W, threshold and k, one triple a setting.

        Raises:
          ValueError: a value is out of range.
        """
        for window_size, threshold, top_k in settings:
            if window_size < 1:
                raise ValueError(f"window sizes must be at least 1, got {window_size}")
            if not threshold >= 0:
                raise ValueError(f"thresholds must be at least 0 nats, got {threshold}")
            if not 1 <= top_k <= TOP_K:
                raise ValueError(f"top ks must be in [1, {TOP_K}], which a trace holds, got {top_k}")
        columns: list[tuple[Any, ...]] = list(zip(*settings, strict=True)) or [(), (), ()]
        return cls(
            *(np.array(each, dtype) for each, dtype in zip(columns, (np.int32, np.float32, np.int32), strict=True))
        )

    @classmethod
    def grid(cls, window_sizes: Sequence[int], thresholds: Sequence[float], top_ks: Sequence[int]) -> "Settings":
        """Every combination, k first."""
        return cls.from_lists([(w, theta, k) for k, w, theta in itertools.product(top_ks, window_sizes, thresholds)])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Cycles:
    """What a replay looks at, of `C` cycles padded to `K` positions, made once for all settings.

    Attributes:
      accepted: `[C, K]` bool, natively.
      num_accepted_after: `[C, K]` int32: how many positions right after a deferrable rejection are natively accepted; 0
        elsewhere, where no window is as short.
      entropies: `[8, C, K]` float32, nats, over the k = 1 to 8 largest.
      loss: `[C, K]` float32, nats from the argmax's log-probability down to the draft token's.
      overshoot: `[C, K]` float32, nats, log q / p of the draft token; NaN where q is not known.
      num_draft_tokens: `[C]` int32.
    """

    accepted: Array
    num_accepted_after: Array
    entropies: Array
    loss: Array
    overshoot: Array
    num_draft_tokens: Array


@dataclasses.dataclass(frozen=True)
class Replay:
    """What a trace would have given under `S` settings, as sums over its cycles.

    Attributes:
      settings: the settings.
      num_cycles: `C`, those without drafts included.
      num_drafts: cycles with drafts.
      num_tokens: `[S]` int64, emitted tokens.
      num_deferred: `[S]` int64, deferred tokens.
      num_stops: `[S]` int64, cycles that ended at a rejection.
      loss: `[S]` float64, nats: over the deferred tokens, the argmax's log-probability less the draft token's.
      num_far: `[S]` int64, deferred tokens further below the argmax than the cut.
      num_known: `[S]` int64, deferred tokens of which the draft's own probability is known.
      overshoot: `[S]` float64, nats: log q / p summed over those.
    """

    settings: Settings
    num_cycles: int
    num_drafts: int
    num_tokens: np.ndarray
    num_deferred: np.ndarray
    num_stops: np.ndarray
    loss: np.ndarray
    num_far: np.ndarray
    num_known: np.ndarray
    overshoot: np.ndarray

    @property
    def tokens_per_cycle(self) -> np.ndarray:
        """`[S]`: emitted tokens per cycle; a cycle without drafts emits one."""
        return self.num_tokens / max(self.num_cycles, 1)

    @property
    def deferral_rate(self) -> np.ndarray:
        """`[S]`: deferrals over native rejections that mattered: the deferred ones and those that ended a cycle."""
        return self.num_deferred / np.maximum(self.num_deferred + self.num_stops, 1)

    @property
    def logprob_loss(self) -> np.ndarray:
        """`[S]`: nats per deferred token, the target's log-probability given up against its argmax; 0 without any."""
        return self.loss / np.maximum(self.num_deferred, 1)

    @property
    def far_share(self) -> np.ndarray:
        """`[S]`: the share of deferred tokens far below the argmax; 0 without any."""
        return self.num_far / np.maximum(self.num_deferred, 1)

    @property
    def draft_overshoot(self) -> np.ndarray:
        """`[S]`: the geometric mean of q / p over deferred tokens of known q; NaN without any."""
        mean = np.where(self.num_known > 0, self.overshoot / np.maximum(self.num_known, 1), np.nan)
        return np.exp(mean)


def replay(trace: Trace, settings: Settings, *, far_below: float = FAR_BELOW) -> Replay:
    """Replays every cycle of a trace under every setting; memory does not grow with the trace.

    Args:
      trace: as recorded under any setting.
      settings: `S` of them; their values do not recompile.
      far_below: nats below the argmax from which a deferred token counts as far below it.
    """
    sums = np.zeros((7, len(settings.window_sizes)))
    for cycles, _ in _chunks(trace, num_settings=sums.shape[1]):
        sums += np.asarray(_sums(cycles, settings, jnp.float32(far_below)), np.float64)
    accepted, num_deferred, num_stops, num_far, num_known, loss, overshoot = sums
    counts = [each.astype(np.int64) for each in (num_deferred, num_stops, num_far, num_known)]
    num_cycles = len(trace.cycles["request"])
    return Replay(
        settings=settings,
        num_cycles=num_cycles,
        num_drafts=int((trace.cycles["num_draft_tokens"] > 0).sum()),
        num_tokens=accepted.astype(np.int64) + num_cycles,
        num_deferred=counts[0],
        num_stops=counts[1],
        loss=loss,
        num_far=counts[2],
        num_known=counts[3],
        overshoot=overshoot,
    )


def replay_cycles(trace: Trace, window_size: int, threshold: float, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """What every cycle would have kept under one setting.

    Returns:
      `num_accepted` `[C]` int32, and `deferred` `[C, K]` bool, inside the accepted prefix only.
    """
    settings = Settings.from_lists([(window_size, threshold, top_k)])
    setting = jax.tree.map(lambda values: values[0], settings)
    parts = [(np.zeros(0, np.int32), np.zeros((0, trace.num_speculative_tokens), bool))]
    for cycles, size in _chunks(trace, num_settings=1):
        num_accepted, deferred = jax.device_get(_outcomes(cycles, setting))
        parts.append((num_accepted[:size], deferred[:size]))
    num_accepted, deferred = (np.concatenate(each) for each in zip(*parts, strict=True))
    return num_accepted, deferred


def num_reproduced(trace: Trace) -> int:
    """Of how many cycles the recorded setting, replayed, gives what was recorded.

    That is all of them, but where one verifier decided and another was recorded beside it (inside vLLM).
    """
    config = trace.config
    setting = (1, math.inf, 1)
    if config is not None:
        setting = (config.window_size or 1, config.single_threshold, config.entropy_top_k)
    num_accepted, deferred = replay_cycles(trace, *setting)
    drafted = np.arange(deferred.shape[1]) < trace.cycles["num_draft_tokens"][:, None]
    recorded = np.zeros_like(deferred)
    recorded[drafted] = (trace.rows["flags"] & DEFERRED) > 0
    same = (num_accepted == trace.cycles["num_accepted"]) & (deferred == recorded).all(axis=1)
    return int(same.sum())


def _chunks(trace: Trace, *, num_settings: int) -> Iterator[tuple[_Cycles, int]]:
    """The cycles in parts of one size, and how many each has; the last is filled up with cycles without drafts."""
    num_positions, config = trace.num_speculative_tokens, trace.config
    lengths = trace.cycles["num_draft_tokens"]
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    size = max(1, min(_MOST_ELEMENTS // (max(num_settings, TOP_K) * num_positions), len(lengths)))
    for begin in range(0, len(lengths), size):
        end = min(begin + size, len(lengths))
        chunk = np.pad(lengths[begin:end], (0, begin + size - end))
        drafted = np.arange(num_positions) < chunk[:, None]
        padded = {}
        for name in ("flags", "top_logprobs", "draft_logprob", "draft_prob", "entropy"):
            values = trace.rows[name][starts[begin] : starts[end]]
            padded[name] = np.zeros((*drafted.shape, *values.shape[1:]), values.dtype)
            padded[name][drafted] = values
        yield _prepared(padded, np.int32(0 if config is None else config.entropy_top_k), chunk), end - begin


@jax.jit
def _prepared(rows: dict[str, Array], recorded_top_k: Array, num_draft_tokens: Array) -> _Cycles:
    flags, top_logprobs, entropy = rows["flags"], rows["top_logprobs"], rows["entropy"]
    accepted = (flags & NATIVELY_ACCEPTED) > 0
    num_positions = accepted.shape[1]
    position = jnp.arange(num_positions, dtype=jnp.int32)[None]
    stop = jnp.where(accepted, num_positions, position)
    # A window that is accepted lies inside the draft, since nothing past it is: condition 2 needs no look of its own.
    next_stop = jnp.pad(lax.cummin(stop, axis=1, reverse=True)[:, 1:], ((0, 0), (0, 1)), constant_values=num_positions)
    deferrable = ~accepted & ((flags & DEFERRABLE) > 0)
    p = kernels.probability(top_logprobs)
    entropies = jnp.moveaxis(-jnp.cumsum(jnp.where(p == 0, 0.0, p * top_logprobs), axis=2), 2, 0)
    is_recorded = (jnp.arange(TOP_K, dtype=jnp.int32) + 1 == recorded_top_k)[:, None, None] & ~jnp.isnan(entropy)[None]
    return _Cycles(
        accepted=accepted,
        num_accepted_after=jnp.where(deferrable, next_stop - position - 1, 0),
        entropies=jnp.where(is_recorded, entropy[None], entropies),
        loss=top_logprobs[:, :, 0] - rows["draft_logprob"],
        overshoot=jnp.log(rows["draft_prob"]) - rows["draft_logprob"],
        num_draft_tokens=num_draft_tokens,
    )


@jax.jit
def _outcomes(cycles: _Cycles, setting: Settings) -> tuple[Array, Array]:
    """`num_accepted` `[C]` int32 and `deferred` `[C, K]` bool under one setting, of scalars."""
    num_positions = cycles.accepted.shape[1]
    entropy = lax.dynamic_index_in_dim(cycles.entropies, setting.top_ks - 1, keepdims=False)
    deferred = (cycles.num_accepted_after >= setting.window_sizes) & (entropy >= setting.thresholds)
    position = jnp.arange(num_positions, dtype=jnp.int32)[None]
    stop = jnp.where(cycles.accepted | deferred, num_positions, position)
    num_accepted = jnp.min(stop, axis=1)
    return num_accepted, deferred & (position < num_accepted[:, None])


@jax.jit
def _sums(cycles: _Cycles, settings: Settings, far_below: Array) -> Array:
    """`[7, S]` float32: kept drafts, deferrals, stops, far ones, ones of known q, loss and overshoot.

    Counts stay below 2**24, so that they are exact.
    """

    def one(setting: Settings) -> Array:
        num_accepted, deferred = _outcomes(cycles, setting)
        known = deferred & ~jnp.isnan(cycles.overshoot)

        def total(mask: Array, values: Array | None = None) -> Array:
            return jnp.sum(mask if values is None else jnp.where(mask, values, 0.0), dtype=jnp.float32)

        return jnp.stack(
            [
                jnp.sum(num_accepted).astype(jnp.float32),
                total(deferred),
                total(num_accepted < cycles.num_draft_tokens),
                total(deferred & (cycles.loss > far_below)),
                total(known),
                total(deferred, cycles.loss),
                total(known, cycles.overshoot),
            ]
        )

    return jax.vmap(one, out_axes=1)(settings)
