"""The README's Python runs as it stands, and its commands name what exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_blocks_run_one_after_the_other(capsys):
    names = {}
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(code, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "[9 9] [2 9]" in printed
    assert "True [9 9]" in printed
    assert names["fly"].deferred.tolist() == [[False, True] + [False] * 6, [False] * 8]


def test_local_files_exist():
    files = re.findall(r"(?:constraints|tests)/[\w./]+", README)
    assert files
    assert all((ROOT / name.rstrip(".")).exists() for name in files)


def test_every_figure_is_filled_in():
    # A name in capitals alone in its cell or line is a place for a figure that was never put there.
    assert re.findall(r"^(?:.*\| )?[A-Z]+_[A-Z]+(?: \|)?$", README, re.MULTILINE) == []
