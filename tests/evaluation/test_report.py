"""The report of an evaluation, as it is read."""

import pytest
from records import MODES, one_by_one, tasks

from fly_jax.cli.output import has_matplotlib
from fly_jax.decode.options import DecodeOptions
from fly_jax.evaluation.options import EvaluationOptions
from fly_jax.evaluation.plots import pictures
from fly_jax.evaluation.report import document, findings, markdown

OPTIONS = EvaluationOptions(DecodeOptions(num_speculative_tokens=2, max_tokens=8))
VERSIONS = {"python": "3.11", "jax": "0.10", "platform": "cpu (cpu)"}


def found(num_planned=6):
    records = one_by_one([1, 1, 0, 1, 1, 0], fly=[1, 0, 0, 1, 1, 0])
    return findings(records, MODES, tasks(6), num_planned, greedy=True)


def test_the_tables_hold_the_figures():
    lines = markdown(found(), OPTIONS, "Tiny", VERSIONS).splitlines()
    cells = {row[0]: row[1:] for row in (line.strip("| ").split(" | ") for line in lines if line.startswith("| "))}
    assert [each.split(" (")[0] for each in cells["accuracy"]] == ["66.7%", "66.7%", "50.0%"]
    assert [each.split(" (")[0] for each in cells["retention"]] == ["100.0%", "100.0%", "75.0%"]
    assert cells["lost, won"] == ["0, 0", "0, 0", "1, 0"]
    assert cells["changed texts"] == ["0%", "0%", "100%"]
    assert cells["tokens per cycle"] == ["1.00", "2.00", "2.00"]
    assert cells["drafts kept"] == ["-", "75%", "75%"]
    assert cells["deferrals per 100 tokens"] == ["0.0", "0.0", "25.0"]
    assert cells["accuracy: odd (3)"] == ["67%", "67%", "33%"]
    rows = [line.strip("| ").split(" | ")[1:] for line in lines if line.startswith("| 1 |")]
    assert rows[0] == ["1.0", "1.9", "4.0"]
    assert [each.split(" (")[0] for each in rows[1]] == ["1.90x", "4.00x"]
    assert [each.split(" (")[0] for each in rows[2]] == ["2.10x"]
    assert rows[3] == ["1.73 (27 s)", "1.00 (16 s)", "0.58 (9 s)"]
    assert [each.split(" (")[0] for each in rows[4]] == ["100.0%", "75.0%"]
    authors = "| cpu (cpu) | Tiny / ngram | fly | 2 | built-in, report, 6 tasks | 1 | 2.100-2.100 | 75.0% ("
    assert any(line.startswith(authors) for line in lines)
    assert any("FLy is lossy" in line for line in lines)


def test_an_unfinished_run_says_so():
    assert "**Unfinished: 6 of 9 batches.**" in markdown(found(9), OPTIONS, "Tiny", VERSIONS)
    assert document(found(9), OPTIONS, "Tiny", VERSIONS)["complete"] is False


@pytest.mark.skipif(not has_matplotlib(), reason="needs matplotlib")
def test_the_pictures_have_axes_with_units_and_a_legend(monkeypatch):
    from matplotlib.figure import Figure

    seen = {}

    def look(self, data, **arguments):
        (panel,) = self.axes
        seen[panel.get_ylabel()] = [text.get_text() for text in panel.get_legend().get_texts()]
        data.write(b"picture")

    monkeypatch.setattr(Figure, "savefig", look)
    assert set(pictures(found(), "title").values()) == {b"picture"}
    assert seen == {
        "drafts kept / drafts proposed there": ["standard", "fly"],
        "decoding (tokens/s, all requests together)": list(MODES),
        "accuracy / target-only's (%)": ["standard", "fly", "target-only"],
    }
