"""A file is written whole or not at all."""

import os

import pytest

from fly_jax.files import write_whole


def test_a_failure_leaves_what_was_there_and_nothing_beside_it(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"before")

    def fail(file):
        file.write(b"half")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write_whole(path, fail)
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["a"]


def test_a_link_is_followed_and_permissions_stay(tmp_path):
    (tmp_path / "real").write_bytes(b"before")
    (tmp_path / "real").chmod(0o600)
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", b"after")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"after"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o600


def test_a_new_file_has_the_permissions_of_any_other(tmp_path):
    write_whole(tmp_path / "ours", b"")
    (tmp_path / "other").write_bytes(b"")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_file_that_is_there_is_kept_if_asked(tmp_path):
    path = tmp_path / "results"
    write_whole(path, b"first", replace=False)
    with pytest.raises(FileExistsError):
        write_whole(path, b"second", replace=False)
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["results"]
