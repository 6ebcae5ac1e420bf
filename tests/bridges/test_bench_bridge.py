"""`fly-jax bench bridge`: its plumbing, on a small vocabulary."""

import json

import pytest
from rich.console import Console

pytest.importorskip("torch")

from fly_jax.bench import bridge
from fly_jax.cli.bench_tables import bridge_table

pytestmark = pytest.mark.torch


def test_measuring(capsys):
    seen = []
    ratios = bridge.measure(
        bridge.CASES,
        rounds=3,
        progress=lambda what, fraction: seen.append((what, fraction)),
        vocab_size=300,
        min_seconds=0.0,
    )
    assert [each.name.split(": ")[1] for each in ratios] == ["crossing", "call"] * len(bridge.CASES)
    assert all(len(each.values) == 3 and min(each.values) > 0 for each in ratios)
    # Drawing vLLM's noise is no cost of the bridge, nor has a padded step a goal.
    assert [each.name for each in ratios if each.goal is not None] == [
        "greedy: crossing",
        "target-only: crossing",
        "p/q: crossing",
    ]
    assert seen[0] == ("measure greedy", 0.0)
    assert all(0 <= fraction <= 1 for _, fraction in seen)
    assert json.loads(json.dumps([each.fields() for each in ratios]))[0]["goal"] == bridge.GOAL
    Console(width=100).print(bridge_table(ratios, bridge.SHAPE, bridge.DEFINITIONS))
    text = capsys.readouterr().out
    assert "greedy, 61 rows: crossing" in text
    assert max(map(len, text.splitlines())) <= 100
