"""Tasks: what the model is asked, and how its answer is judged. Read from JSON lines.

A line is an object with these fields:

- `prompt` (text: one user message) or `messages` (a list of objects with `role` and `content`), one of the two.
- `reference`: the right answer, or a list of several; what it says depends on the scorer.
- `scorer`: one of `fly_jax.evaluation.scorers.SCORERS`; default "normalised".
- `name` (default "line 12", unique), `family` (default "tasks"; accuracy is also reported by family).
- `max_tokens`: most tokens to answer in, where fewer than the run allows are enough.
- `split`: "choose" for choosing settings, "report" (the default) for reporting what they give.

Blank lines are skipped.
"""

import dataclasses
import importlib.resources
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fly_jax.errors import UserError
from fly_jax.evaluation.scorers import SCORERS, check_reference, matches

SPLITS = ("choose", "report")
ROLES = ("system", "user", "assistant")
BUILTIN_NAME = "builtin_tasks.jsonl"
_FIELDS = ("name", "family", "prompt", "messages", "reference", "scorer", "max_tokens", "split")


@dataclasses.dataclass(frozen=True)
class Task:
    """One question with a checkable answer.

    Attributes:
      name: unique in its file.
      family: tasks of one kind have the same.
      messages: the conversation so far, with "role" and "content"; the last one is the user's.
      references: right answers, at least one.
      scorer: a key of `scorers.SCORERS`.
      max_tokens: most tokens to answer in; None leaves it to the run.
      split: "choose" or "report".
    """

    name: str
    family: str
    messages: tuple[Mapping[str, str], ...]
    references: tuple[str, ...]
    scorer: str
    max_tokens: int | None
    split: str

    def score(self, text: str) -> float:
        """1.0 where the model's whole answer, special tokens left out, agrees with any reference, else 0.0."""
        return max(float(matches(self.scorer, reference, text)) for reference in self.references)


def load_tasks(path: Path | None) -> tuple[Task, ...]:
    """Reads tasks, in their order.

    Args:
      path: a file of JSON lines, UTF-8; None for the built-in tasks.

    Raises:
      UserError: the file cannot be read or holds no task, or a line is wrong: which one, and what is wrong with it.
    """
    source = path if path is not None else importlib.resources.files("fly_jax.evaluation") / BUILTIN_NAME
    try:
        lines = source.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error}.") from error
    tasks: list[Task] = []
    names: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            task = _task(_object(line), default_name=f"line {number}")
            if task.name in names:
                raise ValueError(f"name {task.name!r} is taken by line {names[task.name]}; use another")
        except ValueError as error:
            raise UserError(f"{source}, line {number}: {error}.") from error
        names[task.name] = number
        tasks.append(task)
    if not tasks:
        raise UserError(f"{source} holds no task: write one JSON object per line.")
    return tuple(tasks)


def _object(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode("utf-8-sig").strip()
        fields = json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"must be a JSON object, got {text}")
    unknown = [name for name in fields if name not in _FIELDS]
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}; the fields are {', '.join(_FIELDS)}")
    return fields


def _task(fields: Mapping[str, Any], default_name: str) -> Task:
    scorer = _choice("scorer", fields.get("scorer", "normalised"), tuple(SCORERS))
    return Task(
        name=_text("name", fields.get("name", default_name)),
        family=_text("family", fields.get("family", "tasks")),
        messages=_messages(fields),
        references=_references(fields, scorer),
        scorer=scorer,
        max_tokens=_max_tokens(fields.get("max_tokens")),
        split=_choice("split", fields.get("split", "report"), SPLITS),
    )


def _messages(fields: Mapping[str, Any]) -> tuple[Mapping[str, str], ...]:
    if ("prompt" in fields) == ("messages" in fields):
        found = "both" if "prompt" in fields else "neither"
        raise ValueError(f"must have prompt or messages, one of them, got {found}")
    if "prompt" in fields:
        return ({"role": "user", "content": _text("prompt", fields["prompt"])},)
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages must be a list of at least one message, got {messages!r}")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise ValueError(f"messages[{i}] must be an object with role and content, got {message!r}")
        _choice(f"messages[{i}].role", message["role"], ROLES)
        _text(f"messages[{i}].content", message["content"])
    if messages[-1]["role"] != "user":
        raise ValueError(f"the last of the messages must be the user's, got role {messages[-1]['role']!r}")
    return tuple(messages)


def _references(fields: Mapping[str, Any], scorer: str) -> tuple[str, ...]:
    if "reference" not in fields:
        raise ValueError("must have a reference, the right answer")
    reference = fields["reference"]
    references = reference if isinstance(reference, list) else [reference]
    if not references:
        raise ValueError("reference must be text or a list of texts, got an empty list")
    for each in references:
        check_reference(scorer, _text("reference", each))
    return tuple(references)


def _max_tokens(value: Any) -> int | None:
    # bool is an int to Python.
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"max_tokens must be a whole number of at least 1, got {value!r}")
    return value


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text in quotes, got {value!r}")
    if not value.strip():
        raise ValueError(f"{name} must not be empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds half of a surrogate pair, which no tokenizer takes: {value!r}") from error
    return value
