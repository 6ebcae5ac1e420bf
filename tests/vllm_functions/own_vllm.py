"""vLLM's own two `rejection_sample` functions and its `VocabMapping`, unmodified, on a CPU.

The functions run under Triton's interpreter.

They are read from the folder in `FLY_JAX_VLLM_SOURCE`, which holds `vllm/`: `pip install --no-deps --target` of the GPU
wheel is enough. Only the modules of these are executed; what they import besides is a stand-in.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import os
import pathlib
import sys
import types
import warnings

import numpy as np

SOURCE = pathlib.Path(os.environ["FLY_JAX_VLLM_SOURCE"])
VERSION = next(each.version for each in importlib.metadata.distributions(name="vllm", path=[str(SOURCE)]))

# Triton reads it while it is imported: its own functions are either compiled or interpreted from then on.
if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("triton was imported without TRITON_INTERPRET=1: set it in the environment of the whole run")
os.environ["TRITON_INTERPRET"] = "1"

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

V1 = "vllm.v1.sample.rejection_sampler"
V2 = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
VOCABULARIES = "vllm.v1.spec_decode.vocab_mapping"
EXECUTED = {
    V1,
    V2,
    VOCABULARIES,
    "vllm.model_executor.warmup.jit_warmup",
    "vllm.model_executor.warmup.jit_warmup_triton_helper",
    "vllm.v1.spec_decode.fly",
    "vllm.v1.watermarking.prfs.philox",
    "vllm.v1.worker.gpu.sample.gumbel",
    "vllm.v1.worker.gpu.sample.watermark",
}


@triton.jit
def _log1p(x):
    # The interpreter has no libdevice. `log(w) / (w - 1)` cancels the rounding of `w = 1 + x`.
    w = 1.0 + x
    return tl.where(w == 1.0, x, tl.log(w) * (x / (w - 1.0)))


STAND_INS = {
    "vllm.config.model": {"PROCESSED_LOGPROBS_MODES": ()},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.triton_utils": {
        "HAS_TRITON": True,
        "triton": triton,
        "tl": tl,
        "tldevice": types.SimpleNamespace(log1p=_log1p),
    },
}


class _StandIn(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})  # enough for annotations and base classes; anything else fails


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "vllm":
            return None
        if name in EXECUTED:
            return importlib.util.spec_from_file_location(name, SOURCE.joinpath(*name.split(".")).with_suffix(".py"))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        vars(module).update(STAND_INS.get(module.__name__, {}))


def _load():
    def take_vllm():
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "vllm"}

    # A vLLM that is installed beside is not disturbed, and nobody else meets a stand-in.
    installed, finder = take_vllm(), _Finder()
    sys.meta_path.insert(0, finder)
    try:
        return [importlib.import_module(name) for name in (V1, V2, VOCABULARIES)]
    finally:
        sys.meta_path.remove(finder)
        take_vllm()
        sys.modules.update(installed)


def _quiet(function):
    """The interpreter computes masked lanes too, with numpy, which warns about them."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return function(*args, **kwargs)

    return call


_v1, _v2, _vocabularies = _load()
v1_rejection_sample, v2_rejection_sample = _quiet(_v1.rejection_sample), _quiet(_v2.rejection_sample)
VocabMapping = _vocabularies.VocabMapping
