"""README and docs: their Python runs as it stands, their links lead somewhere, their commands are the ones CI runs."""

import functools
import re
import urllib.parse
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
OUTSIDE_DOCS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md", "tests/data/README.md")
PAGES = sorted([*(ROOT / name for name in OUTSIDE_DOCS), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
INCLUDED = re.compile(r'include-markdown "([^"]+)"')


def name_of(page):
    return str(page.relative_to(ROOT))


@functools.cache
def text_of(page):
    """A page; one that only includes another is that one."""
    text = page.read_text(encoding="utf-8")
    included = INCLUDED.search(text)
    return text_of((page.parent / included[1]).resolve()) if included else text


def prose_of(page):
    """A page without its blocks of code and its code spans, which hold no links and no headings."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE))


@functools.cache
def anchors_of(page):
    """The anchors that GitHub and the site make of a page's headings."""
    without_blocks = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", without_blocks, re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def python_of(page):
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def broken_links(page, text):
    """The links of a text, standing where `page` stands, that lead nowhere."""
    broken = []
    for link in LINK.findall(text):
        parts = urllib.parse.urlsplit(link)
        if parts.scheme or parts.netloc:
            if parts.scheme != "https" or "." not in parts.netloc:
                broken.append(link)
            continue
        target = (page.parent / parts.path).resolve() if parts.path else page
        if not target.exists() or (parts.fragment and parts.fragment not in anchors_of(target)):
            broken.append(link)
    return broken


# What the blocks of a page print, as the comments in them say.
PRINTED = {
    "README.md": ["[[5 6 7 8]] [[ 5  3 -1 -1]]", "[[False  True False]] 0.66"],
    "docs/python.md": ["[9 9] [2 9]", "[1 1]", "9.0 (2, 9)", "True [9 9]"],
    "docs/rule.md": ["[[4 7 9 2]] [[ True False False]]", "[[ 5 -1 -1 -1]]"],
}


def test_pages_with_python_are_the_ones_that_are_run():
    assert {name_of(page) for page in PAGES if python_of(page)} == set(PRINTED)


# Half a minute of compiling, by functions that the default run tests elsewhere.
SLOW = ("docs/python.md",)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PRINTED])
def test_python_blocks_run_one_after_the_other(name, capsys):
    names = {}
    for code in python_of(ROOT / name):
        exec(compile(code, name, "exec"), names)
    printed = capsys.readouterr().out
    at = 0
    for words in PRINTED[name]:
        assert words in printed[at:]
        at = printed.index(words, at) + len(words)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    source = page.read_text(encoding="utf-8")
    # What a page includes is checked where it stands.
    assert INCLUDED.search(source) or broken_links(page, prose_of(page)) == []


@pytest.mark.parametrize(
    ("link", "is_broken"),
    [
        ("docs/rule.md", False),
        ("docs/rule.md#a-worked-example", False),
        ("#working-on-it", False),
        ("https://arxiv.org/abs/2511.22972", False),
        ("docs/no-such-page.md", True),
        ("docs/rule.md#no-such-heading", True),
        ("#no-such-heading", True),
        ("http://arxiv.org", True),
        ("https://arxiv", True),
    ],
)
def test_a_broken_link_is_found(link, is_broken):
    assert broken_links(README, f"see [this]({link}).") == [link] * is_broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page):
    named = re.findall(r"`((?:fly_jax|kernels|bridges|tests|constraints|docs|scripts)/[\w./-]*)`", text_of(page))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_readme_is_one_page():
    lines = README.read_text(encoding="utf-8").splitlines()
    # The two commands are lines of their own for CI, which runs them as they stand.
    long = [line for line in lines if len(line) > 120 and not line.startswith("python3 -m venv ")]
    assert (len(lines) <= 150, long) == (True, [])


@pytest.mark.parametrize("command", ["pytest", "fly-jax generate"])
def test_each_command_of_ci_stands_once(command):
    lines = re.findall(rf"^python3.*&& {command}$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == 1
    assert all((ROOT / name).exists() for name in re.findall(r"constraints/[\w.]+", lines[0]))


def test_every_page_is_in_the_navigation():
    navigation = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1]))
    assert navigation == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_every_figure_is_filled_in():
    # A name in capitals alone in its cell or line is a place for a figure that was never put there.
    place = re.compile(r"^(?:.*\| )?[A-Z]+_[A-Z]+(?: \|)?$|@@", re.MULTILINE)
    assert [name_of(page) for page in PAGES if place.search(text_of(page))] == []
