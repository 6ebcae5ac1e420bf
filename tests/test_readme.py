"""The README's Python runs as it stands, and its commands name what exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_python_blocks_run(code, capsys):
    exec(compile(code, "README.md", "exec"), names := {})
    assert "[9 9] [2 9]" in capsys.readouterr().out
    assert names["fly"].deferred.tolist() == [[False, True] + [False] * 6, [False] * 8]


def test_local_files_exist():
    files = re.findall(r"(?:constraints|tests)/[\w./]+", README)
    assert files
    assert all((ROOT / name.rstrip(".")).exists() for name in files)
