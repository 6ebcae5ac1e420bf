"""What the plugin puts into vLLM V1: a session in the place of `rejection_sample`; its first step starts JAX."""

from __future__ import annotations

import contextvars
import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

from fly_jax.bridges.vllm import V1_MODULE, cpu_repairs
from fly_jax.bridges.vllm.counting import Counters
from fly_jax.bridges.vllm.interface import PARAMETERS, PARAMETERS_WITHOUT_FLY, Call, found
from fly_jax.bridges.vllm.session import Session
from fly_jax.bridges.vllm.settings import Settings

logger = logging.getLogger("vllm.fly_jax")

V2_MODULE = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"


def install(settings: Settings) -> list[str]:
    """Hooks vLLM's V1 verification.

    Returns:
      The names of what was hooked; none when that had been done before.

    Raises:
      RuntimeError: something to hook is missing or has another signature.
    """
    module = importlib.import_module(V1_MODULE)
    sampler, original = found(module, "RejectionSampler"), found(module, "rejection_sample")
    if hasattr(original, "fly_jax_session"):
        return []
    parameters = list(inspect.signature(original).parameters)
    if parameters not in (PARAMETERS_WITHOUT_FLY, PARAMETERS):
        raise RuntimeError(f"FLY_JAX_VLLM: {V1_MODULE}.rejection_sample has other parameters than known: {parameters}")
    hooked = ["rejection_sample", "RejectionSampler.__init__", "RejectionSampler.forward"]
    is_cpu = importlib.import_module("vllm.platforms").current_platform.is_cpu()
    # Whatever can be refused comes first, so that nothing is left half hooked.
    if not is_cpu or importlib.import_module("vllm.triton_utils").HAS_TRITON:
        _refuse_v2()
    if settings.mode == "replace" and is_cpu:
        hooked += cpu_repairs.install(module)
    session = Session(settings, original, Counters({"mode": settings.mode}))
    hook = Hook(session)
    function: Any = functools.wraps(original)(lambda *args, **kwargs: hook.rejection_sample(*args, **kwargs))
    function.fly_jax_session = session
    module.__dict__["rejection_sample"] = function
    sampler.__init__ = hook.initialise_instead_of(sampler.__init__)
    sampler.forward = hook.forward_instead_of(sampler.forward)
    return hooked


class Hook:
    """What runs in the place of vLLM's functions, on one session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._signature = inspect.signature(session.original)
        # Of the sampler whose forward is running: vLLM 0.32 calls rejection_sample without FLy's settings.
        self._fly: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
            "fly_jax_settings", default=None
        )

    def rejection_sample(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What stands in the place of vLLM's function of that name."""
        self.session.counters.keep_in(self.session.settings.folder)
        call = self._call(args, kwargs)
        original = functools.partial(self.session.original, *args, **kwargs)
        if call.synthetic_mode or call.use_fp64_gumbel:
            return self._left_to_vllm(original)
        # Here, since JAX is to start in no process but the one that verifies.
        from fly_jax.bridges.vllm import steps

        return steps.MODES[self.session.settings.mode](self.session, call, original)

    def _call(self, args: Any, kwargs: Any) -> Call:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return Call(**{**(self._fly.get() or {}), **bound.arguments})

    def _left_to_vllm(self, original: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.session.counters.counts["steps_left_to_vllm"] += 1
        if self.session.counters.counts["steps_left_to_vllm"] == 1:
            logger.warning(
                "fly_jax leaves steps of synthetic acceptance or float64 Gumbel noise to vLLM's own function"
            )
            self.session.counters.write()
        return original()

    def initialise_instead_of(self, original: Callable[..., None]) -> Callable[..., None]:
        """A `RejectionSampler.__init__` that knows FLy's settings."""
        session = self.session

        @functools.wraps(original)
        def initialise(
            sampler_self: Any, sampler: Any, spec_config: Any = None, device: torch.device | None = None
        ) -> None:
            fly = _fly_arguments(session.settings, spec_config)
            if session.settings.mode == "record":
                session.speculation = _speculation(spec_config)
            method = getattr(spec_config, "rejection_sample_method", None)
            if session.settings.mode == "replace" and method == "fly" and device is not None and device.type == "cpu":
                # vLLM refuses FLy on a CPU, for its Triton kernels, and uses the device for synthetic acceptance only.
                device = None
            original(sampler_self, sampler, spec_config, device)
            if fly and sampler_self.use_fp64_gumbel:
                raise ValueError("FLY_JAX_REJECTION_SAMPLE_METHOD=fly excludes float64 Gumbel noise (use_fp64_gumbel)")
            sampler_self._fly_jax_arguments = fly
            if fly:
                logger.warning("FLy verification is on: %s. It is lossy and may degrade model outputs.", fly)

        return initialise

    def forward_instead_of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A `RejectionSampler.forward` in which `rejection_sample` knows FLy's settings."""

        @functools.wraps(original)
        def forward(sampler: Any, *args: Any, **kwargs: Any) -> Any:
            token = self._fly.set(getattr(sampler, "_fly_jax_arguments", None))
            try:
                return original(sampler, *args, **kwargs)
            finally:
                self._fly.reset(token)

        return forward


def _fly_arguments(settings: Settings, spec_config: Any) -> dict[str, Any]:
    """FLy's arguments from the plugin's variables, validated as vLLM's own; none where they do not ask for FLy."""
    if not settings.fly:
        return {}
    if spec_config is None:
        raise ValueError("FLY_JAX_FLY_* variables are set, but this engine has no speculative_config")
    # Here, since it imports JAX, and only the process that verifies makes a sampler.
    from fly_jax.config import FlyConfig

    names = ("num_speculative_tokens", "draft_sample_method", "use_heterogeneous_vocab", "use_local_argmax_reduction")
    given = {name: getattr(spec_config, name) for name in names if hasattr(spec_config, name)}
    method = spec_config.rejection_sample_method
    config = FlyConfig.from_vllm({**given, **settings.fly})
    if config is None:
        return {}
    if method != "standard":
        raise ValueError(f"FLY_JAX_REJECTION_SAMPLE_METHOD=fly excludes rejection_sample_method={method!r}")
    vllm_names = FlyConfig.vllm_names()
    return {vllm_names[name]: value for name, value in config.to_dict().items()}


def _speculation(spec_config: Any) -> dict[str, Any]:
    """What the meta data of a trace says about drafting, as far as vLLM's configuration has it."""
    # Here, since it imports JAX, and only the process that verifies makes a sampler.
    from fly_jax.traces.record import TOP_K

    top_k = getattr(spec_config, "fly_entropy_top_k", None)
    if getattr(spec_config, "rejection_sample_method", None) == "fly" and top_k is not None and top_k > TOP_K:
        raise ValueError(
            f"fly_entropy_top_k must be at most {TOP_K} with FLY_JAX_VLLM=record, since a trace holds that many "
            f"probabilities, got {top_k}"
        )
    model = getattr(getattr(spec_config, "target_model_config", None), "model", None)
    return {
        "num_speculative_tokens": getattr(spec_config, "num_speculative_tokens", None) or 1,
        "drafter": getattr(spec_config, "method", None),
        "model": model,
    }


def _refuse_v2() -> None:
    """An engine that verifies with vLLM's V2 model runner goes past what is hooked: it must say so, not go on."""
    try:
        module = importlib.import_module(V2_MODULE)
    except ImportError as error:
        raise RuntimeError(f"FLY_JAX_VLLM: this vLLM has no {V2_MODULE}, which fly_jax has to hook") from error
    sampler = found(module, "RejectionSampler")

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "FLY_JAX_VLLM hooks vLLM's V1 model runner only, and this engine runs V2: set VLLM_USE_V2_MODEL_RUNNER=0, "
            "or unset FLY_JAX_VLLM"
        )

    sampler.__init__ = refuse
