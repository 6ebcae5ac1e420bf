"""Settings: FLy's, with their defaults, validation and vLLM's names; and how the target samples."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from jax.typing import ArrayLike

from fly_jax import defaults

_VLLM_PREFIX = "fly_"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the target's logits are processed, per request or for all, as `fly_verify` takes it.

    Attributes:
      temperature: `[B]` float32 or a scalar; below 1e-5 (or NaN) is greedy. None: every request is greedy, and the
        others must be None too.
      top_k: `[B]` int32 or a scalar; 0 or at least V turns it off.
      top_p: `[B]` float32 or a scalar; 1 or more turns it off, 0 or less keeps the maximum only.
      min_p: `[B]` float32 or a scalar; 0 or less turns it off, 1 or more keeps the maximum only.
    """

    temperature: ArrayLike | None = None
    top_k: ArrayLike | None = None
    top_p: ArrayLike | None = None
    min_p: ArrayLike | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FlyConfig:
    """Settings of FLy verification (arXiv:2511.22972); using one is opting in to a lossy method.

    A pytree: `entropy_threshold` is a leaf, so changing it never recompiles; the other two are static.

    Attributes:
      window_size: W, how many tokens after a deferred one must be accepted natively; at least 1. None is
        `min(6, K - 1)` for the K of the draft array (whoever pads K passes W).
      entropy_threshold: nats, at least 0; the gate is open where the target's top-k entropy reaches it: that of the k
        largest probabilities of the whole softmax, not renormalised, so a flat row of a large vocabulary closes it. A
        number, or `[B]` float32 for a threshold per request; +inf turns FLy off for a request.
      entropy_top_k: over how many of the largest probabilities the entropy is summed; at least 1.

    Raises:
      TypeError: a field is of the wrong kind.
      ValueError: a field is out of range. A threshold that lives on the device is never checked: a NaN closes the gate.
    """

    window_size: int | None = dataclasses.field(default=None, metadata={"static": True})
    entropy_threshold: ArrayLike = defaults.ENTROPY_THRESHOLD
    entropy_top_k: int = dataclasses.field(default=defaults.ENTROPY_TOP_K, metadata={"static": True})

    LARGEST_DEFAULT_WINDOW_SIZE: ClassVar[int] = defaults.LARGEST_WINDOW_SIZE

    def __post_init__(self) -> None:
        if self.window_size is not None:
            _check_int("window_size", self.window_size, minimum=1)
        _check_int("entropy_top_k", self.entropy_top_k, minimum=1)
        for name in ("window_size", "entropy_top_k"):
            # NumPy's integers are integers too, but not for JSON.
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else int(value))
        threshold: Any = self.entropy_threshold
        _check_threshold("entropy_threshold", threshold)
        if isinstance(threshold, list | tuple):
            object.__setattr__(self, "entropy_threshold", np.asarray(threshold, np.float32))
        elif isinstance(threshold, int | np.integer | np.floating):
            # One type for all numbers, so that a sweep over them compiles once.
            object.__setattr__(self, "entropy_threshold", float(threshold))

    def window_size_for(self, num_speculative_tokens: int) -> int:
        """W for drafts of K tokens: `window_size`, or its default of `min(6, K - 1)`, at least 1."""
        if self.window_size is not None:
            return self.window_size
        return max(1, min(self.LARGEST_DEFAULT_WINDOW_SIZE, num_speculative_tokens - 1))

    @property
    def single_threshold(self) -> float:
        """The threshold of all requests, in nats; waits for the device where it lives there.

        Raises:
          ValueError: it is not one number.
        """
        # A Python float keeps its own digits: float32 would make 0.30000001192092896 of 0.3.
        if isinstance(self.entropy_threshold, float):
            return self.entropy_threshold
        threshold = np.asarray(self.entropy_threshold, np.float32)
        if threshold.ndim != 0:
            raise ValueError(
                f"entropy_threshold must be one number for all requests here, got shape {list(threshold.shape)}"
            )
        return float(threshold)

    def to_dict(self) -> dict[str, int | float | None]:
        """The fields by name, for JSON and `FlyConfig(**fields)`; raises as `single_threshold`."""
        return {
            "window_size": self.window_size,
            "entropy_threshold": self.single_threshold,
            "entropy_top_k": self.entropy_top_k,
        }

    @property
    def label(self) -> str:
        """The settings in a line, as tables name a mode: `fly W=6 θ=0.3 k=3`."""
        window_size = "default" if self.window_size is None else self.window_size
        return f"fly W={window_size} θ={self.single_threshold} k={self.entropy_top_k}"

    @classmethod
    def vllm_names(cls) -> dict[str, str]:
        """The name of each field in vLLM's `speculative_config`, by its name here."""
        return {field.name: _VLLM_PREFIX + field.name for field in dataclasses.fields(cls)}

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
        names = cls.vllm_names().values()
        unknown = sorted(k for k in speculative_config if k.startswith(_VLLM_PREFIX) and k not in names)
        if unknown:
            raise ValueError(f"{unknown[0]} is not a field of speculative_config; FLy's are {', '.join(names)}")
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
        given = {
            name: fields[vllm_name] for name, vllm_name in cls.vllm_names().items() if fields.get(vllm_name) is not None
        }
        names = cls.vllm_names()
        if "window_size" in given:
            _check_int(names["window_size"], given["window_size"], minimum=1)
            if given["window_size"] >= num_speculative_tokens:
                raise ValueError(
                    f"{names['window_size']} must be less than num_speculative_tokens ({num_speculative_tokens}), "
                    f"got {given['window_size']}"
                )
        if "entropy_threshold" in given:
            threshold = given["entropy_threshold"]
            if not isinstance(threshold, int | float) or isinstance(threshold, bool):
                raise TypeError(f"{names['entropy_threshold']} must be a number of nats, got {threshold!r}")
            _check_threshold(names["entropy_threshold"], threshold)
        if "entropy_top_k" in given:
            _check_int(names["entropy_top_k"], given["entropy_top_k"], minimum=1)
        config = cls(**given)
        return dataclasses.replace(config, window_size=config.window_size_for(num_speculative_tokens))


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
