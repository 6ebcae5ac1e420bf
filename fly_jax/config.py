"""FLy's settings: fields, defaults, validation, and reading them from vLLM's `speculative_config`."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

DEFAULT_WINDOW_SIZE = 6
DEFAULT_ENTROPY_THRESHOLD = 0.3
DEFAULT_ENTROPY_TOP_K = 3

_FLY_FIELDS = ("fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["entropy_threshold"],
    meta_fields=["window_size", "entropy_top_k"],
)
@dataclasses.dataclass(frozen=True)
class FlyConfig:
    """Settings of FLy verification (arXiv:2511.22972); using one is opting in to a lossy method.

    A pytree: `entropy_threshold` is a leaf, so changing it never recompiles; the other two are static.

    Attributes:
      window_size: W, how many tokens after a deferred one must be accepted natively; at least 1. None is
        `min(6, K - 1)` for the K of the draft array (whoever pads K passes W).
      entropy_threshold: nats, at least 0; the gate is open where the target's top-k entropy reaches it: that of the k
        largest probabilities of the whole softmax, not renormalised, so a flat row of a large vocabulary closes it. A
        number, or
        `[B]` float32 for a threshold per request; +inf turns FLy off for a request.
      entropy_top_k: over how many of the largest probabilities the entropy is summed; at least 1.

    Raises:
      TypeError: a field is of the wrong kind.
      ValueError: a field is out of range. A threshold that lives on the device is never checked: a NaN closes the gate.
    """

    window_size: int | None = None
    entropy_threshold: Any = DEFAULT_ENTROPY_THRESHOLD
    entropy_top_k: int = DEFAULT_ENTROPY_TOP_K

    def __post_init__(self) -> None:
        if self.window_size is not None:
            _check_int("window_size", self.window_size, minimum=1)
        _check_int("entropy_top_k", self.entropy_top_k, minimum=1)
        threshold = self.entropy_threshold
        _check_threshold("entropy_threshold", threshold)
        if isinstance(threshold, list | tuple):
            object.__setattr__(self, "entropy_threshold", np.asarray(threshold, np.float32))
        elif isinstance(threshold, int | np.integer | np.floating):
            # One type for all numbers, so that a sweep over them compiles once.
            object.__setattr__(self, "entropy_threshold", float(threshold))

    @classmethod
    def from_vllm(cls, speculative_config: Mapping[str, Any]) -> "FlyConfig | None":
        """Reads vLLM's `speculative_config`, with vLLM's defaults and the same combinations refused.

        Args:
          speculative_config: the mapping given to vLLM. Read here: `rejection_sample_method`,
            `num_speculative_tokens`, `fly_window_size`, `fly_entropy_threshold`, `fly_entropy_top_k`,
            `draft_sample_method`, `use_heterogeneous_vocab`, `use_local_argmax_reduction` and, with another
            vocabulary, `method`. Other fields concern drafting and are left alone, except that an unknown `fly_*`
            field is an error.

        Returns:
          The settings when `rejection_sample_method` is "fly", and None, which is standard lossless verification in
          `fly_verify(config=...)`, when it is "standard" or missing (the `fly_*` fields then have no effect).

        Raises:
          TypeError: a field is of the wrong kind.
          ValueError: a field is out of range, unknown, or excluded by another.
        """
        if not isinstance(speculative_config, Mapping):
            kind = type(speculative_config).__name__
            raise TypeError(f"speculative_config must be a mapping (parse JSON first), got {kind}")
        get = speculative_config.get
        unknown = sorted(k for k in speculative_config if k.startswith("fly_") and k not in _FLY_FIELDS)
        if unknown:
            raise ValueError(f"{unknown[0]} is not a field of speculative_config; FLy's are {', '.join(_FLY_FIELDS)}")
        method = _choice(speculative_config, "rejection_sample_method", ("standard", "fly"), _METHOD_HELP)
        draft_sample_method = _choice(speculative_config, "draft_sample_method", ("greedy", "probabilistic"))
        if get("use_heterogeneous_vocab"):
            if get("method") not in (None, "draft_model"):
                raise ValueError(
                    f"use_heterogeneous_vocab=True works with method='draft_model' only, got {get('method')!r}"
                )
            if draft_sample_method != "greedy":
                raise ValueError(
                    f"use_heterogeneous_vocab=True works with draft_sample_method='greedy' only, "
                    f"got {draft_sample_method!r}"
                )
            if get("use_local_argmax_reduction"):
                raise ValueError("use_heterogeneous_vocab=True excludes use_local_argmax_reduction=True; turn one off")
        num_speculative_tokens = get("num_speculative_tokens")
        if method == "standard":
            if num_speculative_tokens is not None:
                _check_int("num_speculative_tokens", num_speculative_tokens, minimum=1)
            return None
        if num_speculative_tokens is None:
            raise ValueError("num_speculative_tokens is missing; FLy needs it, at least 2")
        _check_int(
            "num_speculative_tokens", num_speculative_tokens, minimum=2, why=" with rejection_sample_method='fly'"
        )
        return cls._from_fly_fields(speculative_config, num_speculative_tokens)

    @classmethod
    def _from_fly_fields(cls, fields: Mapping[str, Any], num_speculative_tokens: int) -> "FlyConfig":
        def value(name: str, default: Any) -> Any:
            given = fields.get(name)
            return default if given is None else given

        window_size = value("fly_window_size", min(DEFAULT_WINDOW_SIZE, num_speculative_tokens - 1))
        entropy_threshold = value("fly_entropy_threshold", DEFAULT_ENTROPY_THRESHOLD)
        entropy_top_k = value("fly_entropy_top_k", DEFAULT_ENTROPY_TOP_K)
        _check_int("fly_window_size", window_size, minimum=1)
        if window_size >= num_speculative_tokens:
            raise ValueError(
                f"fly_window_size must be less than num_speculative_tokens ({num_speculative_tokens}), "
                f"got {window_size}"
            )
        if not isinstance(entropy_threshold, int | float) or isinstance(entropy_threshold, bool):
            raise TypeError(f"fly_entropy_threshold must be a number of nats, got {entropy_threshold!r}")
        _check_threshold("fly_entropy_threshold", entropy_threshold)
        _check_int("fly_entropy_top_k", entropy_top_k, minimum=1)
        return cls(window_size, entropy_threshold, entropy_top_k)


_METHOD_HELP = "; 'synthetic' and 'block' exclude FLy and are not verified here"


def _choice(fields: Mapping[str, Any], name: str, allowed: tuple[str, str], more: str = "") -> str:
    given = fields.get(name)
    if given is None:
        return allowed[0]
    if given not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {given!r}{more}")
    return given


def _check_int(name: str, value: Any, *, minimum: int, why: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an int of at least {minimum}{why}, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}{why}, got {value}")


def _check_threshold(name: str, value: Any) -> None:
    # Only what is surely a number on the host: a pytree is also built around tracers, specs and device arrays.
    if isinstance(value, bool | str | complex):
        raise TypeError(f"{name} must be a number of nats or a [B] float array, got {value!r}")
    if isinstance(value, int | float | np.number | np.ndarray | list | tuple):
        if np.asarray(value).dtype.kind not in "iuf":
            raise TypeError(f"{name} must be a number of nats or a [B] float array, got {value!r}")
        wrong = [float(x) for x in np.ravel(np.asarray(value, np.float64)) if math.isnan(x) or x < 0]
        if wrong:
            raise ValueError(f"{name} must be at least 0 nats (+inf turns FLy off), got {wrong[0]}")
