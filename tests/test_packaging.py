"""What is built is what runs: the wheel and the sdist hold every module, and the wheel alone works anywhere."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SUBPACKAGES = (
    "fly_jax",
    "fly_jax.rule",
    "fly_jax.kernels",
    "fly_jax.traces",
    "fly_jax.decode",
    "fly_jax.decode.checkpoints",
    "fly_jax.evaluation",
    "fly_jax.bench",
    "fly_jax.cli",
    "fly_jax.bridges",
)


def modules_of_the_tree():
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in (package.replace(".", "/") for package in SUBPACKAGES)
        for path in (ROOT / folder).rglob("*.py")
    }
    return found | {"fly_jax/py.typed", "fly_jax/evaluation/builtin_tasks.jsonl"}


def run(*command, cwd):
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """A wheel built from the sdist built from the tree, as a release would be."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", str(out), str(ROOT), cwd=out)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_nothing_else(distributions):
    with zipfile.ZipFile(distributions[1]) as wheel:
        names = wheel.namelist()
    assert {name for name in names if ".dist-info/" not in name} == modules_of_the_tree()


@pytest.mark.slow
def test_the_sdist_holds_every_module_and_the_licence(distributions):
    with tarfile.open(distributions[0]) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    assert modules_of_the_tree() <= names
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names


@pytest.mark.slow
def test_the_wheel_alone_works_from_any_folder(distributions, tmp_path):
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"), cwd=tmp_path)
    python = str(tmp_path / "venv" / "bin" / "python")
    # The dependencies of the running environment are the pinned ones; --target keeps the project's own tree out.
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--target",
        str(tmp_path / "site"),
        str(distributions[1]),
        cwd=tmp_path,
    )
    dependencies = next(p for p in sys.path if p.endswith("site-packages"))
    code = (
        "import sys, importlib, importlib.util\n"
        f"sys.path[:0] = [{str(tmp_path / 'site')!r}]\n"
        f"sys.path.append({dependencies!r})\n"
        f"modules = [importlib.import_module(n) for n in {SUBPACKAGES!r}]\n"
        f"assert all(m.__file__.startswith({str(tmp_path / 'site')!r}) for m in modules), modules\n"
        "assert importlib.util.find_spec('kernels') is None\n"
        "assert importlib.util.find_spec('bridges') is None\n"
        "import numpy as np, fly_jax\n"
        "print(fly_jax.fly_verify(np.eye(4, dtype=np.float32)[None], np.array([[0, 1, 2]])).token_ids.tolist())\n"
    )
    assert run(python, "-c", code, cwd=tmp_path) == "[[0, 1, 2, 3]]"


def test_the_tree_imports_in_the_repository_root():
    code = "import fly_jax.kernels, fly_jax.bridges; print(fly_jax.kernels.__name__)"
    assert run(sys.executable, "-c", code, cwd=ROOT) == "fly_jax.kernels"


def test_every_subpackage_is_known_here():
    packages = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "fly_jax").rglob("__init__.py")}
    links = {f"fly_jax/{name}" for name in ("kernels", "bridges")}
    assert {name.replace("/", ".") for name in packages | links} == set(SUBPACKAGES)
