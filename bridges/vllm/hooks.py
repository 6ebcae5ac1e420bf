"""What the plugin puts into vLLM V1, and how: `replace`, `crosscheck`, `record`; JAX is imported at the first step."""

import contextvars
import functools
import importlib
import inspect
import logging
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from fly_jax.bridges.vllm import V1_MODULE
from fly_jax.bridges.vllm.counting import COUNTERS
from fly_jax.bridges.vllm.settings import Settings

logger = logging.getLogger("vllm.fly_jax")

V2_MODULE = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"

_PARAMETERS = [
    "draft_token_ids",
    "num_draft_tokens",
    "max_spec_len",
    "cu_num_draft_tokens",
    "draft_probs",
    "target_logits",
    "bonus_token_ids",
    "sampling_metadata",
    "synthetic_mode",
    "synthetic_conditional_rates",
    "use_fp64_gumbel",
]
_FLY_PARAMETERS = ["fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"]

# Of the sampler that was made last, for the trace: an engine has one.
_SPECULATION: dict[str, Any] = {"num_speculative_tokens": 1}

# The sampler whose forward is running: vLLM 0.32 calls rejection_sample without FLy's settings.
_FLY: contextvars.ContextVar[dict[str, Any]] = contextvars.ContextVar("fly_jax_settings", default={})  # noqa: B039


def install(settings: Settings) -> list[str]:
    """Hooks vLLM's V1 verification.

    Returns:
      The names of what was hooked; none when that had been done before.

    Raises:
      RuntimeError: something to hook is missing or has another signature.
    """
    module = importlib.import_module(V1_MODULE)
    sampler, original = _found(module, "RejectionSampler"), _found(module, "rejection_sample")
    if hasattr(original, "fly_jax_original"):
        return []
    parameters = list(inspect.signature(original).parameters)
    if parameters not in (_PARAMETERS, [*_PARAMETERS, *_FLY_PARAMETERS]):
        raise RuntimeError(f"FLY_JAX_VLLM: {V1_MODULE}.rejection_sample has other parameters than known: {parameters}")
    hooked = ["rejection_sample", "RejectionSampler.__init__", "RejectionSampler.forward"]
    if settings.mode == "replace" and _platform().is_cpu():
        hooked += mend_cpu(module)
    if not _platform().is_cpu() or importlib.import_module("vllm.triton_utils").HAS_TRITON:
        _refuse_v2()
    hook: Any = functools.wraps(original)(functools.partial(_hook, original, settings))
    hook.fly_jax_original = original
    module.__dict__["rejection_sample"] = hook
    sampler.__init__ = _with_settings(sampler.__init__, settings)
    sampler.forward = _with_fly(sampler.forward)
    COUNTERS.about = {"mode": settings.mode}
    return hooked


def _hook(original: Callable[..., torch.Tensor], settings: Settings, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What stands in the place of vLLM's `rejection_sample`."""
    COUNTERS.keep_in(settings.folder)
    call = _call(original, args, kwargs)
    if call["synthetic_mode"] or call["use_fp64_gumbel"]:
        return _left_to_vllm(original, args, kwargs)
    if settings.mode == "replace":
        return _verify(call)[0]
    if settings.mode == "record":
        return _record(call, functools.partial(original, *args, **kwargs), settings)
    return _crosscheck(call, functools.partial(original, *args, **kwargs), settings)


def _crosscheck(call: dict[str, Any], original: Callable[[], torch.Tensor], settings: Settings) -> torch.Tensor:
    """vLLM's tokens, after JAX has decided the same step beside it."""
    # JAX first, with copies of the generators: then vLLM finds everything as if JAX had not been there.
    generators, default_generator = _copied_generators(call)
    ours, step = _verify(call, generators=generators, default_generator=default_generator)
    start = time.perf_counter()
    theirs = original()
    from fly_jax.bridges.vllm import crosscheck

    differing = crosscheck.differing_requests(theirs, ours)
    COUNTERS.seconds["vllm"] += time.perf_counter() - start
    if differing:
        _report(settings, step, theirs, ours, crosscheck.classify(step, theirs, ours, differing))
    return theirs


def _record(call: dict[str, Any], original: Callable[[], torch.Tensor], settings: Settings) -> torch.Tensor:
    """vLLM's tokens, after what a trace holds of the step has been computed beside it."""
    from fly_jax.bridges.vllm import recording, v1

    config = v1.fly_config(
        call.get("fly_window_size"), call.get("fly_entropy_threshold"), call.get("fly_entropy_top_k", 3)
    )
    recorder = recording.recorder(settings, config, _SPECULATION)
    if recorder.is_full:
        return original()
    if config != recorder.config:
        COUNTERS.counts["trace_steps_left_out"] += 1
        if COUNTERS.counts["trace_steps_left_out"] == 1:
            logger.warning("fly_jax records one setting of FLy, %s, and leaves out steps of others", recorder.config)
        return original()
    before, start = recording.num_programs(), time.perf_counter()
    rows, num_invalid = recording.rows_of(call, config, *_copied_generators(call))
    compiled = recording.num_programs() - before
    COUNTERS.seconds["jax_compiling" if compiled else "jax"] += time.perf_counter() - start
    COUNTERS.counts["programs_compiled"] += compiled
    start = time.perf_counter()
    tokens = original()
    COUNTERS.seconds["vllm"] += time.perf_counter() - start
    recorder.add(recording.as_emitted(rows, num_invalid, tokens))
    return tokens


def _copied_generators(call: dict[str, Any]) -> tuple[dict[int, torch.Generator], torch.Generator]:
    """Copies of the requests' generators and of torch's own."""
    metadata, device = call["sampling_metadata"], call["target_logits"].device
    copies = {request: generator.clone_state() for request, generator in metadata.generators.items()}
    return copies, _default_generator(device).clone_state()


def _report(settings: Settings, step: Any, theirs: torch.Tensor, ours: torch.Tensor, mismatches: Any) -> None:
    """Counts the mismatches of a step, records it if few were yet, and logs it if it is recorded or real."""
    from fly_jax.bridges.vllm import crosscheck

    counts = COUNTERS.counts
    for mismatch in mismatches:
        counts[f"mismatches_{mismatch.kind}"] += 1
    is_real = any(mismatch.kind == "real" for mismatch in mismatches)
    # Real ones have a quota of their own, so that near-ties cannot use it up.
    quota = "real_records_written" if is_real else "records_written"
    where = ""
    if counts[quota] < settings.records:
        try:
            path = crosscheck.save(settings.folder, step, theirs, ours, mismatches)
        except OSError as error:
            COUNTERS.write_failed(error)
        else:
            counts[quota] += 1
            where = f"; `fly-jax crosscheck {path}` explains it"
    if where or is_real:
        logger.warning("fly_jax: %s%s", crosscheck.summary(mismatches), where)
    COUNTERS.write()


def _verify(call: dict[str, Any], **generators: Any) -> tuple[torch.Tensor, Any]:
    """The tokens and the step of one call, counted and timed."""
    from fly_jax.bridges.vllm import v1

    before, start = v1.num_programs(), time.perf_counter()
    config = v1.fly_config(
        call.get("fly_window_size"), call.get("fly_entropy_threshold"), call.get("fly_entropy_top_k", 3)
    )
    step = v1.draw_step(
        call["draft_token_ids"],
        call["num_draft_tokens"],
        call["draft_probs"],
        call["target_logits"],
        call["bonus_token_ids"],
        call["sampling_metadata"],
        config=config,
        **generators,
    )
    verification, totals = v1.verify(step)
    tokens = v1.emitted(verification, len(step.num_draft_tokens), call["max_spec_len"])
    seconds = time.perf_counter() - start
    compiled = v1.num_programs() - before
    COUNTERS.seconds["jax_compiling" if compiled else "jax"] += seconds
    COUNTERS.counts["programs_compiled"] += compiled
    COUNTERS.add_step(step.num_draft_tokens, totals)
    return tokens, step


def _call(original: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, with FLy's settings from wherever they are."""
    bound = _signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    return {**_FLY.get(), **bound.arguments}


_signature = functools.cache(inspect.signature)


def _left_to_vllm(original: Callable[..., torch.Tensor], args: Any, kwargs: Any) -> torch.Tensor:
    COUNTERS.counts["steps_left_to_vllm"] += 1
    if COUNTERS.counts["steps_left_to_vllm"] == 1:
        logger.warning("fly_jax leaves steps of synthetic acceptance or float64 Gumbel noise to vLLM's own function")
        COUNTERS.write()
    return original(*args, **kwargs)


def _with_settings(original: Callable[..., None], settings: Settings) -> Callable[..., None]:
    @functools.wraps(original)
    def initialise(self: Any, sampler: Any, spec_config: Any = None, device: torch.device | None = None) -> None:
        fly = _fly_fields(settings, spec_config)
        if settings.mode == "record":
            _SPECULATION.update(_speculation(spec_config))
        method = getattr(spec_config, "rejection_sample_method", None)
        if settings.mode == "replace" and method == "fly" and device is not None and device.type == "cpu":
            # vLLM refuses FLy on a CPU, for its Triton kernels, and uses the device for synthetic acceptance only.
            device = None
        original(self, sampler, spec_config, device)
        if fly and self.use_fp64_gumbel:
            raise ValueError("FLY_JAX_REJECTION_SAMPLE_METHOD=fly excludes float64 Gumbel noise (use_fp64_gumbel)")
        self._fly_jax_fields = fly
        if fly:
            logger.warning("FLy verification is on: %s. It is lossy and may degrade model outputs.", fly)

    return initialise


def _fly_fields(settings: Settings, spec_config: Any) -> dict[str, Any]:
    """FLy's settings from the plugin's variables, validated as vLLM's own; none where they do not ask for FLy."""
    if not settings.fly:
        return {}
    if spec_config is None:
        raise ValueError("FLY_JAX_FLY_* variables are set, but this engine has no speculative_config")
    from fly_jax.config import FlyConfig

    names = ("num_speculative_tokens", "draft_sample_method", "use_heterogeneous_vocab", "use_local_argmax_reduction")
    given = {name: getattr(spec_config, name) for name in names if hasattr(spec_config, name)}
    method = spec_config.rejection_sample_method
    config = FlyConfig.from_vllm({**given, **settings.fly})
    if config is None:
        return {}
    if method != "standard":
        raise ValueError(f"FLY_JAX_REJECTION_SAMPLE_METHOD=fly excludes rejection_sample_method={method!r}")
    return dict(
        zip(_FLY_PARAMETERS, (config.window_size, float(config.entropy_threshold), config.entropy_top_k), strict=True)
    )


def _speculation(spec_config: Any) -> dict[str, Any]:
    """What the meta data of a trace says about drafting, as far as vLLM's configuration has it."""
    top_k = getattr(spec_config, "fly_entropy_top_k", None) or 3
    if getattr(spec_config, "rejection_sample_method", None) == "fly" and top_k > 8:
        raise ValueError(
            f"fly_entropy_top_k must be at most 8 with FLY_JAX_VLLM=record, since a trace holds that many "
            f"probabilities, got {top_k}"
        )
    model = getattr(getattr(spec_config, "target_model_config", None), "model", None)
    return {
        "num_speculative_tokens": getattr(spec_config, "num_speculative_tokens", None) or 1,
        "drafter": getattr(spec_config, "method", None),
        "model": model,
    }


def _with_fly(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _FLY.set(getattr(self, "_fly_jax_fields", {}))
        try:
            return original(self, *args, **kwargs)
        finally:
            _FLY.reset(token)

    return forward


def mend_cpu(module: ModuleType) -> list[str]:
    """Works around two faults of vLLM on CPUs (0.32 and 0.33): see the functions."""
    constraints = _found(module, "apply_sampling_constraints")
    _found(module, "expand_batch_to_tokens")

    def expand_batch_to_tokens(
        x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        """vLLM's kernel for CPUs expands into a copy and drops it: temperature, top-k and top-p are then garbage."""
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        replaced = x.masked_fill(x == replace_from, replace_to)
        return replaced.repeat_interleave(counts, output_size=num_tokens)

    @functools.wraps(constraints)
    def apply_sampling_constraints(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A step without drafts has no rows, and vLLM's top-k takes the maximum of none."""
        return logits if len(logits) == 0 else constraints(logits, *args, **kwargs)

    for function in (expand_batch_to_tokens, apply_sampling_constraints):
        module.__dict__[function.__name__] = function
    return ["expand_batch_to_tokens", "apply_sampling_constraints"]


def _refuse_v2() -> None:
    """An engine that verifies with vLLM's V2 model runner goes past what is hooked: it must say so, not go on."""
    sampler = _found(importlib.import_module(V2_MODULE), "RejectionSampler")

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "FLY_JAX_VLLM hooks vLLM's V1 model runner only, and this engine runs V2: set VLLM_USE_V2_MODEL_RUNNER=0, "
            "or unset FLY_JAX_VLLM"
        )

    sampler.__init__ = refuse


def _found(module: ModuleType, name: str) -> Any:
    if not hasattr(module, name):
        raise RuntimeError(f"FLY_JAX_VLLM: {module.__name__} has no {name}; this vLLM cannot be hooked")
    return getattr(module, name)


def _platform() -> Any:
    return importlib.import_module("vllm.platforms").current_platform


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index or 0]
