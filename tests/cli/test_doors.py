"""The workers' folder: gone when its parent ends, and after a kill when the next one starts."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvhandoff.cli.doors import doors_folder

PARENT = """
import sys
from kvhandoff.cli.doors import doors_folder
with doors_folder() as folder:
    (folder / "0.sock").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@contextmanager
def parent() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process that has a folder."""
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_it_is_ours_alone_while_it_lasts() -> None:
    with doors_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        with doors_folder() as other:
            assert folder.exists()
            assert other != folder
    assert not folder.exists()


def test_what_a_killed_parent_has_left_is_removed(tmp_path: Path) -> None:
    with parent() as (process, left), parent() as (_, living):
        with doors_folder():
            assert left.exists()
            assert living.exists()
        process.kill()
        process.wait()
        assert left.exists()
        with doors_folder():
            assert not left.exists()
            assert (living / "0.sock").exists()


def test_what_nobody_s_end_is_proven_of_stays(tmp_path: Path) -> None:
    """A folder whose owner may just be making it, and one that is elsewhere."""
    being_made, elsewhere = tmp_path / "kvhandoff-workers-1", tmp_path / "elsewhere"
    being_made.mkdir()
    (being_made / "owner.new").touch()
    elsewhere.mkdir()
    (elsewhere / "owner").touch()
    (tmp_path / "kvhandoff-workers-2").symlink_to(elsewhere)
    with doors_folder():
        pass
    assert (being_made / "owner.new").exists()
    assert (elsewhere / "owner").exists()
