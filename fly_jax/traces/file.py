"""The trace file: verifications collected on the host, written whole or not at all, and read back.

A trace is one `.npz` file without pickles, 53 bytes per draft token and 16 per cycle, not compressed. In it `C` is the
number of cycles (one request in one verification), `R` that of draft tokens: the rows of a cycle follow each other, in
the order of the cycles, so that those of cycle c start at `cumsum(num_draft_tokens)[c] - num_draft_tokens[c]`.

- `meta`: scalar string, JSON; see below.
- `request` `[C]` int32: which request; inside vLLM its place in the batch of that step.
- `cycle` `[C]` int32: which cycle of the run; inside vLLM the step.
- `num_draft_tokens` `[C]` int32; 0 is a cycle that verified nothing and emitted one token.
- `num_accepted` `[C]` int32: drafts kept when it was recorded, deferred ones included; one token more was emitted.
- `draft_token_id` `[R]` int32; -1 is a placeholder, or any other id outside the vocabulary.
- `argmax_token_id` `[R]` int32, the target's; -1 in an invalid row.
- `draft_logprob` `[R]` float32, nats: the target's log-probability of the draft token; -inf where it excludes it, NaN
  for a placeholder and in a row that is not a distribution.
- `top_logprobs` `[R, 8]` float32, nats: the largest, in descending order, so that the first is the argmax's; -inf where
  fewer are kept, NaN in a row that is not a distribution.
- `draft_prob` `[R]` float32: q of the draft token; NaN where drafts are one-hot or the request is greedy.
- `entropy` `[R]` float32, nats: over the k of the recorded setting, what its gate was decided by; NaN where it was
  not looked at (where condition 1, 2 or 4 of a deferral fails).
- `flags` `[R]` uint8, a sum: 1 natively accepted, 2 deferrable (condition 1 of a deferral, in a valid row), 4 deferred.

Log-probabilities are of the target's processed distribution: after temperature, min-p, top-k and top-p, of the raw
logits for a greedy request. Rows past the stop are recorded as well. Tokens past the end of a text count too.

`meta`: `format` ("fly-jax trace"), `version` (1), `versions` (of packages), `source` (what recorded it), `config`
(`window_size`, `entropy_threshold` in nats, `entropy_top_k`; null: standard verification, a threshold of +inf too),
`num_speculative_tokens` (K), `model`, `drafter`, `sampling` (null where not known), `max_rows`, `is_full` (whether
anything that came later was left out).

The entropy of a row over any k up to 8 follows from `top_logprobs` (section 2 of the rule: not renormalised); from the
recorded one it differs by rounding, up to about 5e-6 nats. A replay takes the recorded one where it has it. So every
threshold, with the recorded window or a longer one and the recorded k, is replayed exactly; another k, or a shorter
window, up to that rounding at the gate.
"""

import dataclasses
import functools
import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from fly_jax.config import FlyConfig
from fly_jax.files import write_whole
from fly_jax.traces.record import ROW_FIELDS, TOP_K, TraceRows
from fly_jax.versions import installed_versions

DEFAULT_MAX_ROWS = 1_000_000
FORMAT, VERSION = "fly-jax trace", 1

_CYCLE_FIELDS = ("request", "cycle", "num_draft_tokens", "num_accepted")
_META_FIELDS = (
    "versions",
    "source",
    "config",
    "num_speculative_tokens",
    "model",
    "drafter",
    "sampling",
    "max_rows",
    "is_full",
)


@dataclasses.dataclass(frozen=True)
class Trace:
    """A trace on the host: the arrays of the file, and its `meta` as a dictionary.

    Attributes:
      cycles: by name, `[C]` int32.
      rows: by name, `[R]` or `[R, 8]`.
      meta: the rest.
    """

    cycles: Mapping[str, np.ndarray]
    rows: Mapping[str, np.ndarray]
    meta: Mapping[str, Any]

    @property
    def config(self) -> FlyConfig | None:
        """The recorded setting; None is standard verification."""
        return None if self.meta["config"] is None else FlyConfig(**self.meta["config"])

    @property
    def num_speculative_tokens(self) -> int:
        """K."""
        return self.meta["num_speculative_tokens"]


class TraceWriter:
    """Collects verifications on the host, up to a bound; the oldest are kept.

    Whole calls of `add` are kept or left out, and after the first that does not fit, all are: `is_full` then says that
    there is no use in computing more. A cycle without drafts counts as one row, so that the memory is bounded.
    """

    def __init__(
        self,
        config: FlyConfig | None,
        *,
        num_speculative_tokens: int,
        source: str,
        model: str | None = None,
        drafter: str | None = None,
        sampling: Mapping[str, float] | None = None,
        max_rows: int = DEFAULT_MAX_ROWS,
    ) -> None:
        """Starts an empty trace.

        Args:
          config: the setting that verifies, None for standard verification.
          num_speculative_tokens: K; a longer draft that comes counts instead.
          source: what records, such as "fly-jax generate".
          model: the target's name.
          drafter: the drafter's name.
          sampling: sampling parameters of all requests by name; None where they differ or are not known.
          max_rows: most rows kept.

        Raises:
          ValueError: the setting cannot be replayed: `entropy_top_k` is above 8, or there are several thresholds; or
            `max_rows` is below 1.
        """
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}")
        self.is_full = False
        self._max_rows, self._used = max_rows, 0
        self._cycles: list[dict[str, np.ndarray]] = []
        self._rows: list[dict[str, np.ndarray]] = []
        self._meta: dict[str, Any] = {
            "config": _config_fields(config, num_speculative_tokens),
            "num_speculative_tokens": num_speculative_tokens,
            "source": source,
            "model": model,
            "drafter": drafter,
            "sampling": None if sampling is None else dict(sampling),
        }

    def add(self, rows: TraceRows, *, request: ArrayLike, cycle: ArrayLike) -> None:
        """Adds a verification; waits for the device if `rows` are still there.

        Args:
          rows: of `B` requests.
          request: `[B]` integers, which request each is; a negative one (padding, a finished request) is left out.
          cycle: `[B]` integers, or one for all.
        """
        values = {name: np.asarray(value) for name, value in vars(jax.device_get(rows)).items()}
        request = np.asarray(request, np.int32)
        counted = request >= 0
        lengths = values["num_draft_tokens"][counted]
        needed = int(np.maximum(lengths, 1).sum())
        if self.is_full or self._used + needed > self._max_rows:
            self.is_full = True
            return
        self._used += needed
        longest = int(lengths.max(initial=0))
        self._meta["num_speculative_tokens"] = max(self._meta["num_speculative_tokens"], longest)
        position = np.arange(values["flags"].shape[1])
        drafted = (position < values["num_draft_tokens"][:, None]) & counted[:, None]
        self._cycles.append(
            {
                "request": request[counted],
                "cycle": np.broadcast_to(np.asarray(cycle, np.int32), request.shape)[counted],
                "num_draft_tokens": lengths,
                "num_accepted": values["num_accepted"][counted],
            }
        )
        self._rows.append({name: values[name][drafted] for name in ROW_FIELDS})

    def trace(self) -> Trace:
        """Everything kept so far."""
        self._cycles = _joined(self._cycles, dict.fromkeys(_CYCLE_FIELDS, np.int32))
        self._rows = _joined(self._rows, ROW_FIELDS)
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "versions": installed_versions(),
            **self._meta,
            "max_rows": self._max_rows,
            "is_full": self.is_full,
        }
        return Trace(self._cycles[0], self._rows[0], meta)

    def save(self, path: str | Path) -> None:
        """Writes everything kept so far, as `save_trace` does."""
        save_trace(self.trace(), path)


def save_trace(trace: Trace, path: str | Path) -> None:
    """Writes the file whole, or not at all.

    Raises:
      OSError: it cannot be written.
    """
    arrays: dict[str, Any] = {"meta": np.asarray(json.dumps(trace.meta)), **trace.cycles, **trace.rows}
    write_whole(path, functools.partial(np.savez, **arrays))


def load_trace(path: str | Path) -> Trace:
    """Reads what `save_trace` wrote.

    Raises:
      ValueError: it is not a trace, of another version, or damaged.
      OSError: it cannot be read.
    """
    try:
        # NumPy leaves a damaged file open that it opened itself.
        with Path(path).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        meta = json.loads(str(arrays["meta"]))
        if meta["format"] != FORMAT:
            raise ValueError(f"its format is {meta['format']!r}")
        if meta["version"] != VERSION:
            raise ValueError(f"its version is {meta['version']!r}, this fly_jax reads {VERSION}")
        if missing := [name for name in _META_FIELDS if name not in meta]:
            raise ValueError(f"its meta has no {missing[0]}")
        cycles = {name: _checked(arrays, name, np.int32) for name in _CYCLE_FIELDS}
        rows = {name: _checked(arrays, name, dtype) for name, dtype in ROW_FIELDS.items()}
        trace = Trace(cycles, rows, meta)
        _check_contents(trace)
        return trace
    except (AttributeError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is not a trace that fly_jax can read: {what}") from error


def _config_fields(config: FlyConfig | None, num_speculative_tokens: int) -> dict[str, Any] | None:
    if config is None:
        return None
    if config.entropy_top_k > TOP_K:
        raise ValueError(
            f"entropy_top_k must be at most {TOP_K} to be recorded, since a trace holds that many probabilities, "
            f"got {config.entropy_top_k}"
        )
    fields = dataclasses.replace(config, window_size=config.window_size_for(num_speculative_tokens)).to_dict()
    # Compared in float32, where it may be infinite: then it is standard verification.
    return None if np.isinf(np.float32(config.single_threshold)) else fields


def _joined(parts: list[dict[str, np.ndarray]], dtypes: Mapping[str, Any]) -> list[dict[str, np.ndarray]]:
    if len(parts) == 1:
        return parts
    shapes = {name: (0, TOP_K) if name == "top_logprobs" else (0,) for name in dtypes}
    nothing = {name: np.zeros(shapes[name], dtype) for name, dtype in dtypes.items()}
    return [{name: np.concatenate([nothing[name], *(part[name] for part in parts)]) for name in dtypes}]


def _checked(arrays: Mapping[str, np.ndarray], name: str, dtype: Any) -> np.ndarray:
    array, ndim = arrays[name], 2 if name == "top_logprobs" else 1
    if array.dtype != dtype or array.ndim != ndim or array.shape[1:] != (TOP_K,) * (ndim - 1):
        raise ValueError(f"{name} is {array.dtype} of shape {list(array.shape)}")
    return array


def _check_contents(trace: Trace) -> None:
    lengths, accepted = trace.cycles["num_draft_tokens"], trace.cycles["num_accepted"]
    if len({len(each) for each in trace.cycles.values()}) != 1:
        raise ValueError("its arrays are not of the same number of cycles")
    if (lengths < 0).any() or {len(each) for each in trace.rows.values()} != {int(lengths.sum())}:
        raise ValueError(f"its arrays are not of the {int(lengths.sum())} rows that num_draft_tokens adds up to")
    if ((accepted < 0) | (accepted > lengths)).any():
        raise ValueError("num_accepted is not between 0 and num_draft_tokens")
    most = trace.num_speculative_tokens
    if isinstance(most, bool) or not isinstance(most, int) or most < int(lengths.max(initial=1)):
        raise ValueError(f"num_speculative_tokens is {most!r}, and a cycle has {int(lengths.max(initial=0))} drafts")
    if trace.config is not None and trace.config.entropy_top_k > TOP_K:
        raise ValueError(f"entropy_top_k is {trace.config.entropy_top_k}, and it holds {TOP_K} probabilities a row")
