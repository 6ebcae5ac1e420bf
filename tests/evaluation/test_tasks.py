"""Task files: what a line may hold, the error of every kind of bad line; and what the built-in tasks promise."""

import collections
import json

import pytest

from fly_jax.errors import UserError
from fly_jax.evaluation.tasks import Task, load_tasks

GOOD = {"prompt": "Say a.", "reference": "a"}
WORD_BOUNDARY = r"\b"
USER = {"role": "user", "content": "Say a."}


@pytest.fixture
def load(tmp_path):
    """Loads lines given as bytes, text or objects."""

    def loaded(*lines):
        path = tmp_path / "tasks.jsonl"
        texts = [line if isinstance(line, str | bytes) else json.dumps(line) for line in lines]
        path.write_bytes(b"\n".join(text if isinstance(text, bytes) else text.encode() for text in texts))
        return load_tasks(path)

    return loaded


def test_what_a_line_leaves_out_has_a_default(load):
    assert load("", GOOD, "  ") == (Task("line 2", "tasks", (USER,), ("a",), "normalised", None, "report"),)


def test_every_field_arrives(load):
    messages = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "a"}, USER]
    line = {"name": "n", "family": "f", "messages": messages, "reference": ["1", "2"], "scorer": "number"}
    (task,) = load({**line, "max_tokens": 7, "split": "choose"})
    assert task == Task("n", "f", tuple(messages), ("1", "2"), "number", 7, "choose")


def test_line_ends_and_a_byte_order_mark_of_other_systems_do_no_harm(load):
    separator = "\u2028"  # a line end to str.splitlines, but not to JSON
    (task,) = load(
        b"\xef\xbb\xbf" + json.dumps({**GOOD, "prompt": separator + "b"}, ensure_ascii=False).encode() + b"\r"
    )
    assert task.messages[0]["content"] == separator + "b"


BAD = {
    "not UTF-8": (b'{"prompt": "\xff"}', "not UTF-8"),
    "not JSON": ("{prompt: 1}", "not JSON"),
    "JSON too deep": ("[" * 100_000, "not JSON"),
    "not an object": ('["a"]', r"must be a JSON object, got \[\"a\"\]"),
    "unknown field": ({**GOOD, "refrence": "a"}, "unknown field 'refrence'; the fields are name, family, prompt"),
    "no prompt": ({"reference": "a"}, "prompt or messages, one of them, got neither"),
    "prompt and messages": ({**GOOD, "messages": [USER]}, "prompt or messages, one of them, got both"),
    "empty prompt": ({**GOOD, "prompt": " "}, "prompt must not be empty"),
    "prompt not text": ({**GOOD, "prompt": 3}, "prompt must be text in quotes, got 3"),
    "half a character": ('{"prompt": "\\ud800", "reference": "a"}', "prompt holds half of a surrogate pair"),
    "no messages": ({"messages": [], "reference": "a"}, r"messages must be a list .* got \[\]"),
    "message not an object": ({"messages": ["a"], "reference": "a"}, r"messages\[0\] must be an object with role"),
    "message without content": ({"messages": [USER, {"role": "user"}], "reference": "a"}, r"messages\[1\] must be an"),
    "unknown role": ({"messages": [{**USER, "role": "usr"}], "reference": "a"}, r"messages\[0\].role must be one of"),
    "empty message": ({"messages": [{**USER, "content": ""}], "reference": "a"}, r"messages\[0\].content must not be"),
    "last message not the user's": (
        {"messages": [USER, {"role": "assistant", "content": "a"}], "reference": "a"},
        "the last of the messages must be the user's, got role 'assistant'",
    ),
    "no reference": ({"prompt": "a"}, "must have a reference"),
    "no references": ({**GOOD, "reference": []}, "reference must be text or a list of texts"),
    "empty reference": ({**GOOD, "reference": ["a", ""]}, "reference must not be empty"),
    "reference not text": ({**GOOD, "reference": 3}, "reference must be text in quotes, got 3"),
    "unknown scorer": ({**GOOD, "scorer": "bleu"}, "scorer must be one of exact, normalised, .* got 'bleu'"),
    "scorer not text": ({**GOOD, "scorer": ["exact"]}, "scorer must be one of"),
    "unreadable reference": ({**GOOD, "scorer": "regex", "reference": "(a"}, r"reference '\(a' is not a regular"),
    "one unreadable reference": (
        {**GOOD, "scorer": "number", "reference": ["1", "a"]},
        "reference 'a' is not a number",
    ),
    "max_tokens too small": ({**GOOD, "max_tokens": 0}, "max_tokens must be a whole number of at least 1, got 0"),
    "max_tokens not a number": ({**GOOD, "max_tokens": True}, "max_tokens must be a whole number"),
    "unknown split": ({**GOOD, "split": "test"}, "split must be one of choose, report, got 'test'"),
    "empty name": ({**GOOD, "name": ""}, "name must not be empty"),
    "family not text": ({**GOOD, "family": None}, "family must be text in quotes, got None"),
}


@pytest.mark.parametrize(("line", "words"), BAD.values(), ids=BAD)
def test_a_bad_line_is_named_with_what_is_wrong(load, line, words):
    with pytest.raises(UserError, match=rf"tasks\.jsonl, line 3: .*{words}"):
        load(GOOD, "", line)


def test_a_name_is_used_once(load):
    with pytest.raises(UserError, match="line 3: name 'line 2' is taken by line 2; use another"):
        load("", GOOD, {**GOOD, "name": "line 2"})


def test_a_file_without_tasks_or_no_file_is_an_error(load, tmp_path):
    with pytest.raises(UserError, match="holds no task"):
        load("", "")
    with pytest.raises(UserError, match=r"nowhere\.jsonl cannot be read"):
        load_tasks(tmp_path / "nowhere.jsonl")


def test_the_builtin_tasks_are_many_of_several_kinds_in_two_equal_halves():
    tasks = load_tasks(None)
    families = collections.Counter(task.family for task in tasks)
    assert len(tasks) >= 80
    assert len(families) >= 5
    assert min(families.values()) >= 8
    halves = [
        collections.Counter((task.family, task.scorer) for task in tasks if task.split == split)
        for split in ("choose", "report")
    ]
    assert halves[0] == halves[1]
    assert len({task.messages[-1]["content"] for task in tasks}) == len(tasks)
    assert all(task.max_tokens is not None for task in tasks)


def test_only_an_answer_scores_on_a_builtin_task():
    for task in load_tasks(None):
        question = task.messages[-1]["content"]
        demonstrated = [message["content"] for message in task.messages[:-1]]
        for text in ["", question, *question.split("\n\n"), *demonstrated]:
            assert task.score(text) == 0.0, (task.name, text)
        for reference in task.references:
            # The regular expressions end with the words that are looked for, between word boundaries.
            answer = f"It is {reference.split(WORD_BOUNDARY)[-2]}." if task.scorer == "regex" else reference
            assert task.score(answer) == 1.0, task.name
