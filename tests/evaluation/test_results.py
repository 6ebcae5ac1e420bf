"""The results file: a stopped run goes on, and never with what belongs to another run."""

import json

import pytest
from records import one_by_one, tasks

from fly_jax.errors import UserError
from fly_jax.evaluation.results import open_results
from fly_jax.evaluation.run import plan

ARGUMENTS = {"config": {"max_tokens": 8, "fly": ("a",)}, "tasks": tasks(3), "versions": {"jax": "1"}}


def test_what_is_finished_is_found_again(tmp_path):
    first = open_results(tmp_path / "new" / "folder", **ARGUMENTS, resume=False)
    records = one_by_one([1, 0])
    for record in records:
        first.append(record)
    again = open_results(tmp_path / "new" / "folder", **ARGUMENTS, resume=True)
    assert again.records == records
    assert again.has((1, 0, 1))
    assert not again.has((1, 0, 2))
    assert not again.has((2, 0, 1))


def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path):
    first = open_results(tmp_path, **ARGUMENTS, resume=False)
    records = one_by_one([1, 0])
    first.append(records[0])
    with first.path.open("a") as file:
        file.write(json.dumps(records[1])[:40])
    again = open_results(tmp_path, **ARGUMENTS, resume=True)
    again.append(records[1])
    assert open_results(tmp_path, **ARGUMENTS, resume=True).records == records


def test_resuming_nothing_starts(tmp_path):
    assert open_results(tmp_path, **ARGUMENTS, resume=True).records == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resume": False}, "is there already: pass --resume to go on with it, or name another --output"),
        ({"config": {"max_tokens": 9, "fly": ("a",)}}, "was made with max_tokens 8, now it is 9"),
        ({"versions": {"jax": "2"}}, "was made with jax '1', now it is '2'"),
        ({"tasks": tasks(2)}, "is of other tasks"),
    ],
)
def test_another_run_is_refused(tmp_path, changes, message):
    open_results(tmp_path, **ARGUMENTS, resume=False)
    with pytest.raises(UserError, match=message):
        open_results(tmp_path, **{**ARGUMENTS, "resume": True, **changes})


@pytest.mark.parametrize("content", ["", "{\n", '{"my": "own"}', '{"format": "another"}\n'])
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / "results.jsonl").write_text(content)
    with pytest.raises(UserError, match="Name another --output"):
        open_results(tmp_path, **ARGUMENTS, resume=True)
    assert (tmp_path / "results.jsonl").read_text() == content


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/folder cannot be written to"):
        open_results(tmp_path / "file" / "folder", **ARGUMENTS, resume=False)


def test_tasks_come_again_until_there_are_enough_batches():
    units = plan(5, [1, 4], [0], min_batches=3)
    assert [unit.first for unit in units] == [0, 1, 2, 3, 4, 0, 4, 8]
    assert [(unit.tasks, unit.num_scored) for unit in units[5:]] == [
        ((0, 1, 2, 3), 4),
        ((4, 0, 1, 2), 1),
        ((3, 4, 0, 1), 0),
    ]


def test_every_task_is_scored_once_a_batch_size_and_seed_and_every_batch_is_full():
    units = plan(5, [1, 2, 8], [0, 7])
    for batch_size in (1, 2, 8):
        for seed in (0, 7):
            own = [unit for unit in units if (unit.batch_size, unit.seed) == (batch_size, seed)]
            assert [i for unit in own for i in unit.tasks[: unit.num_scored]] == [0, 1, 2, 3, 4]
            assert {len(unit.tasks) for unit in own} == {batch_size}
    assert len({tuple(unit.key) for unit in units}) == len(units) == 2 * (5 + 3 + 1)
    assert units[-1].tasks == (0, 1, 2, 3, 4, 0, 1, 2)
