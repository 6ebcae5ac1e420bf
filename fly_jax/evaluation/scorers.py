"""Whether an answer is right: a reference and a text in, 1.0 or 0.0 out.

A model's answer is read kindly where it costs no rigour: whitespace around it is dropped, and so is a code fence that
encloses all of it. The scorers are plain comparisons; none of them asks a model.
"""

import json
import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from typing import Any

SCORERS = {
    "exact": "the answer is the reference",
    "normalised": "the same; case, kind of whitespace and quotes, quotes around it and a full stop at its end aside",
    "contains": "the reference is in the answer, as whole words, both normalised",
    "regex": "the regular expression is found in the answer (Python's re.search; flags inline, as in (?i))",
    "number": "the last number in the answer equals the reference (1,200.50 and 1200.5 are equal)",
    "json": "the answer, or the first code fence in it, is JSON of equal value (order of keys aside; 1 equals 1.0)",
}
"""Name -> what makes an answer right."""

_FENCE = re.compile(r"^```[^\n`]*\n(.*?)\n?```[^\S\n]*$", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"(?<![0-9])-?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")
# Typographic quotes and the minus sign, which models write as they like.
_PLAIN = str.maketrans("\u2018\u2019\u201c\u201d\u2212", "''\"\"-")
_QUOTES = "\"'`"


def matches(scorer: str, reference: str, text: str) -> bool:
    """Whether `text` agrees with `reference`; see `SCORERS` for what that means.

    Args:
      scorer: a key of `SCORERS`.
      reference: one that `check_reference` accepts.
      text: the model's whole answer.
    """
    return _MATCHERS[scorer](reference, text)


def check_reference(scorer: str, reference: str) -> None:
    """Refuses a reference that a scorer cannot read.

    Raises:
      ValueError: what is wrong with it.
    """
    if scorer == "regex":
        try:
            re.compile(reference)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"reference {reference!r} is not a regular expression: {error}") from error
    elif scorer == "number":
        if _NUMBER.fullmatch(reference.strip()) is None:
            raise ValueError(f"reference {reference!r} is not a number: write digits, as in -1200.5")
    elif scorer == "json":
        try:
            _parse(reference)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"reference {reference!r} is not JSON: {error}") from error
    elif scorer in ("normalised", "contains") and not _normalise(reference):
        raise ValueError(f"reference {reference!r} has nothing left when normalised: use the scorer exact")


def _exact(reference: str, text: str) -> bool:
    return _unfenced(reference) == _unfenced(text)


def _normalised(reference: str, text: str) -> bool:
    return _normalise(reference) == _normalise(text)


def _contains(reference: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(_normalise(reference))}(?!\w)", _normalise(text)) is not None


def _regex(reference: str, text: str) -> bool:
    return re.search(reference, text.strip()) is not None


def _number(reference: str, text: str) -> bool:
    found = _NUMBER.findall(text.translate(_PLAIN))
    return bool(found) and _decimal(found[-1]) == _decimal(reference)


def _json(reference: str, text: str) -> bool:
    fence = _FENCE.search(text)
    try:
        return _equal(_parse(reference), _parse(text if fence is None else fence[1]))
    except (ValueError, RecursionError):  # a model that repeats itself opens thousands of brackets
        return False


_MATCHERS: dict[str, Callable[[str, str], bool]] = {
    "exact": _exact,
    "normalised": _normalised,
    "contains": _contains,
    "regex": _regex,
    "number": _number,
    "json": _json,
}


def _unfenced(text: str) -> str:
    fence = _FENCE.fullmatch(text.strip())
    return (text if fence is None else fence[1]).strip()


def _normalise(text: str) -> str:
    folded = unicodedata.normalize("NFKC", _unfenced(text)).translate(_PLAIN).casefold()
    return " ".join(folded.split()).strip(_QUOTES).removesuffix(".").strip(_QUOTES + " ")


def _decimal(number: str) -> Decimal:
    return Decimal(number.strip().replace(",", ""))


def _parse(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON value")


def _equal(left: Any, right: Any) -> bool:
    """Equality of JSON values: unlike Python's, true is not 1."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(value, right[key]) for key, value in left.items())
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    return isinstance(left, bool) == isinstance(right, bool) and left == right
