"""Each scorer by table: what it accepts, what it refuses, which references it cannot read."""

import pytest

from fly_jax.evaluation.scorers import SCORERS, check_reference, matches
from fly_jax.evaluation.tasks import Task

FENCED = "```python\nx = 1\n```"

ACCEPTED = [
    ("exact", "x = 1", "x = 1"),
    ("exact", "x = 1", "\n  x = 1 \n"),
    ("exact", "x = 1", FENCED),
    ("exact", "a\n b", "```\na\n b\n```\n"),
    ("normalised", "The end.", "the  END"),
    ("normalised", "a b", "A\nb."),
    ("normalised", "Say it.", "“Say it.”"),
    ("normalised", "x = 1", FENCED),
    (
        "normalised",
        "don't",
        "\N{LEFT SINGLE QUOTATION MARK}Don\N{RIGHT SINGLE QUOTATION MARK}t\N{RIGHT SINGLE QUOTATION MARK}",
    ),
    ("normalised", "1 km\N{SUPERSCRIPT TWO}", "1\N{NO-BREAK SPACE}km2"),
    ("contains", "Uppsala", "It goes to uppsala, I think."),
    ("contains", "two words.", "These are TWO\nwords"),
    ("contains", "C++", "Written in C++."),
    ("regex", r"^(?!.*red).*blue", "the blue door"),
    ("regex", r"(?i)^yes\b", "  Yes, it is"),
    ("number", "35", "35 minutes"),
    ("number", "35", "6 times 6 less 1 is 35.0."),
    ("number", "1200.5", "1,200.50 euros"),
    ("number", "-3", "\N{MINUS SIGN}3 degrees"),
    ("number", "12", "10-12"),
    ("number", "1,000", "1000"),
    ("number", ".5", "0.5"),
    ("json", '{"a": 1, "b": [true, null]}', '{"b": [true, null], "a": 1.0}'),
    ("json", '{"a": "x"}', 'Here it is:\n```json\n{"a": "x"}\n```\nDone.'),
    ("json", "[]", " [] "),
]
REFUSED = [
    ("exact", "x = 1", "X = 1"),
    ("exact", "x = 1", "x  = 1"),
    ("exact", "x = 1", f"Here it is:\n{FENCED}"),
    ("exact", "x = 1", "```\nx = 1"),
    ("normalised", "The end.", "The end is near"),
    ("normalised", "The end.", "The, end."),
    ("normalised", "The end.", ""),
    ("contains", "12", "There are 120"),
    ("contains", "Uppsala", "Upp sala"),
    ("contains", "a.b", "a b"),
    ("regex", r"^(?!.*red).*blue", "the red and the blue door"),
    ("number", "35", "35 minutes and 10 seconds"),
    ("number", "35", "thirty-five"),
    ("number", "35", "-35"),
    ("number", "3.5", "3.50001"),
    ("json", '{"a": 1}', '{"a": true}'),
    ("json", '{"a": 1}', '{"a": 1, "b": 2}'),
    ("json", '{"a": 1}', '{"a": "1"}'),
    ("json", "[1, 2]", "[2, 1]"),
    ("json", "[1]", "[1, 1]"),
    ("json", "{}", "[]"),
    ("json", '{"a": 1}', "{'a': 1}"),
    ("json", "[1]", "[NaN]"),
    ("json", "[[]]", "[" * 100_000),
    ("json", "1", "1" * 10_000),
]
UNREADABLE = [
    ("regex", "(a", "is not a regular expression"),
    ("regex", "a{99999999999999999999}", "is not a regular expression"),
    ("number", "twelve", "is not a number"),
    ("number", "1 2", "is not a number"),
    ("number", "1e5", "is not a number"),
    ("json", "{'a': 1}", "is not JSON"),
    ("json", "NaN", "is not JSON"),
    ("normalised", "'.'", "nothing left when normalised"),
    ("contains", ".", "nothing left when normalised"),
]


@pytest.mark.parametrize(("scorer", "reference", "text"), ACCEPTED)
def test_a_right_answer_is_accepted(scorer, reference, text):
    check_reference(scorer, reference)
    assert matches(scorer, reference, text)


@pytest.mark.parametrize(("scorer", "reference", "text"), REFUSED)
def test_a_wrong_answer_is_refused(scorer, reference, text):
    check_reference(scorer, reference)
    assert not matches(scorer, reference, text)


@pytest.mark.parametrize(("scorer", "reference", "words"), UNREADABLE)
def test_a_reference_that_the_scorer_cannot_read_is_an_error(scorer, reference, words):
    with pytest.raises(ValueError, match=words):
        check_reference(scorer, reference)


@pytest.mark.parametrize("scorer", SCORERS)
def test_every_scorer_is_in_every_table(scorer):
    assert scorer in {row[0] for row in ACCEPTED}
    assert scorer in {row[0] for row in REFUSED}


@pytest.mark.parametrize(("text", "expected"), [("Lund", 1.0), ("lund.", 1.0), ("Oslo", 1.0), ("Bergen", 0.0)])
def test_any_of_several_references_will_do(text, expected):
    task = Task("city", "towns", ({"role": "user", "content": "?"},), ("Lund", "Oslo"), "normalised", None, "report")
    assert task.score(text) == expected
