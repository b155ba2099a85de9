"""Atomic replacement of directories and files, and locks between processes."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from fledge.io import files
from fledge.io.files import (
    exclusive_lock,
    read_consistent,
    replace_directory,
    replace_text,
    restore_interrupted,
    sibling_path,
)
from support.commands import python
from support.files import listing

# -- whole or not at all ----------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Simulates the end of the process at this point."""


def write(directory: Path, content: str) -> None:
    with replace_directory(directory) as new:
        (new / "a").write_text(content)
        (new / "b").write_text(content)


def read(directory: Path) -> list[str]:
    def both(place: Path) -> list[str]:
        return [(place / n).read_text() for n in ("a", "b")] if place.exists() else []

    return read_consistent(directory, both)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Killed])
def test_an_exception_inside_keeps_the_old_content(tmp_path, error):
    for before in ([], ["old", "old"]):
        with pytest.raises(error), replace_directory(tmp_path / "d") as new:
            (new / "a").write_text("half")
            raise error("stop")
        assert read(tmp_path / "d") == before
        assert listing(tmp_path) == (["d"] if before else [])
        write(tmp_path / "d", "old")


def test_a_file_that_is_no_longer_written_is_removed(tmp_path):
    write(tmp_path / "d", "old")
    with replace_directory(tmp_path / "d") as new:
        (new / "c").write_text("new")
    assert listing(tmp_path / "d") == ["c"] and listing(tmp_path) == ["d"]


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("after", [False, True], ids=["before it", "after it"])
def test_a_kill_at_either_rename_leaves_old_or_new_whole(tmp_path, monkeypatch, call, after):
    """The process ends before or after the first rename (old content away) or the second (new content in place)."""
    write(tmp_path / "d", "old")
    rename, calls = Path.rename, []

    def dying(self, target):
        calls.append(self)
        if len(calls) == call and not after:
            raise Killed
        rename(self, target)
        if len(calls) == call:
            raise Killed

    monkeypatch.setattr(Path, "rename", dying)
    with pytest.raises(Killed):
        write(tmp_path / "d", "new")
    monkeypatch.undo()
    assert (tmp_path / "d").exists() == ((call, after) in {(1, False), (2, True)})
    content = "new" if (call, after) == (2, True) else "old"
    assert read(tmp_path / "d") == [content, content]
    write(tmp_path / "d", "newer")
    assert read(tmp_path / "d") == ["newer", "newer"] and listing(tmp_path) == ["d"]


TWO_KILLS = """
import os, signal, sys
from pathlib import Path
from fledge.io.files import read_consistent, replace_directory

os.fsync = lambda handle: None  # slow, and only needed for power cuts

def write(directory, content):
    with replace_directory(directory) as new:
        (new / "a").write_text(content)
        (new / "b").write_text(content)

def content_of(directory):
    (content,) = {read_consistent(directory, lambda place: (place / name).read_text()) for name in ("a", "b")}
    return content

def killed_before(point, directory, content):  # returns whether file operation number `point` exists
    if (pid := os.fork()) == 0:
        done = 0
        def watch(event, given):
            nonlocal done
            done += event == "open" or event.startswith("os.")
            if done == point:
                os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(watch)
        write(directory, content)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == signal.SIGKILL

first, found, more = 0, set(), True
while more:
    first, second, killed = first + 1, 0, True
    while killed and more:
        second += 1
        directory = Path(sys.argv[1], f"{first} {second}", "d")
        write(directory, "old")
        more = killed_before(first, directory, "new")
        before = content_of(directory)
        killed = killed_before(second, directory, "newer")
        assert content_of(directory) in (before, "newer"), (first, second)
        found.add((before, content_of(directory)))
        write(directory, "last")
        assert content_of(directory) == "last" and os.listdir(directory.parent) == ["d"]
assert found == {(a, b) for a in ("old", "new") for b in (a, "newer")}
"""


def test_two_kills_anywhere_lose_nothing(tmp_path):
    """A process that replaces a directory is killed at any file operation, and so is the next one: the old or the new
    content is always complete."""
    with python(TWO_KILLS, tmp_path) as process:
        assert process.wait(timeout=300) == 0


def test_directories_left_by_crashes_are_replaced(tmp_path):
    for name in ("d", ".d.fledge-old", ".d.fledge-new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(name)
    write(tmp_path / "d", "new")
    assert read(tmp_path / "d") == ["new", "new"] and listing(tmp_path) == ["d"]


def test_content_is_flushed_before_it_is_renamed(tmp_path, monkeypatch):
    """A rename may reach the disk before the renamed content, so the content is flushed before the rename."""
    flush, flushed = files._fsync, []

    def noting(path):
        flush(path)
        flushed.append((path.name, (tmp_path / "d").exists()))

    monkeypatch.setattr(files, "_fsync", noting)
    write(tmp_path / "d", "new")
    assert sorted(flushed) == sorted([("a", False), ("b", False), (".d.fledge-new", False), (tmp_path.name, True)])


def test_a_disk_that_fills_during_a_flush_keeps_the_old_content(tmp_path, monkeypatch):
    write(tmp_path / "d", "old")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(OSError, match="no space to save"):
        write(tmp_path / "d", "new")
    monkeypatch.undo()
    assert read(tmp_path / "d") == ["old", "old"] and listing(tmp_path) == ["d"]


def test_other_errors_keep_their_message(tmp_path):
    with pytest.raises(PermissionError, match="not yours"), replace_directory(tmp_path / "d"):
        raise PermissionError(errno.EACCES, "not yours")


def test_a_directory_behind_a_link_is_replaced_there(tmp_path):
    write(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for content in ("new", "newer"):
        write(tmp_path / "link", content)
        assert read(tmp_path / "link") == read(tmp_path / "real") == [content, content]
    assert (tmp_path / "link").is_symlink() and listing(tmp_path) == ["link", "real"]


# -- readers ----------------------------------------------------------------------------------------------------------


def test_a_reader_finds_complete_content_during_replacements(tmp_path):
    """A reader finds complete content at any moment of a replacement, and does not make the writer fail."""
    write(tmp_path / "d", "0")
    ended = threading.Event()

    def replace_often() -> None:
        for i in range(1, 150):
            write(tmp_path / "d", str(i))
            time.sleep(0.002)
        ended.set()

    writer = threading.Thread(target=replace_often)
    writer.start()
    found = []
    while writer.is_alive():
        a, b = read(tmp_path / "d")
        assert a == b
        found.append(int(a))
    writer.join()
    assert ended.is_set() and found == sorted(found) and len(set(found)) > 1
    assert read(tmp_path / "d") == ["149", "149"] and listing(tmp_path) == ["d"]


def test_reading_is_repeated_if_the_directory_was_replaced_meanwhile(tmp_path):
    write(tmp_path / "d", "old")
    seen = []

    def slowly(place: Path) -> str:
        seen.append((place / "a").read_text())
        if len(seen) == 1:
            write(tmp_path / "d", "new")
            raise FileNotFoundError("the old one is gone")
        return seen[-1]

    assert read_consistent(tmp_path / "d", slowly) == "new" and seen == ["old", "new"]


def test_reading_a_directory_that_is_replaced_repeatedly_raises(tmp_path):
    write(tmp_path / "d", "old")
    with pytest.raises(ValueError, match=r"d was replaced 5 times while it was read; try again"):
        read_consistent(tmp_path / "d", lambda place: write(tmp_path / "d", "new"))


def test_an_error_of_the_reader_is_raised_without_a_retry(tmp_path):
    calls = []

    def fails(place: Path) -> None:
        calls.append(place)
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        read_consistent(tmp_path / "none", fails)
    assert calls == [tmp_path / "none"]


def test_only_restore_interrupted_renames_the_old_content(tmp_path):
    write(tmp_path / "d", "old")
    (tmp_path / "d").rename(sibling_path(tmp_path / "d", "old"))
    assert read(tmp_path / "d") == ["old", "old"] and listing(tmp_path) == [".d.fledge-old"]
    restore_interrupted(tmp_path / "d")
    assert read(tmp_path / "d") == ["old", "old"] and listing(tmp_path) == ["d"]


# -- small files ------------------------------------------------------------------------------------------------------


def test_a_text_is_replaced_and_no_neighbour_is_touched(tmp_path):
    neighbours = {"r.json.new": "mine", "r.json.old": "mine", "r.json.tmp": "mine"}
    for name, text in neighbours.items():
        (tmp_path / name).write_text(text)
    for text in ("old", "new é"):
        replace_text(tmp_path / "r.json", text)
        assert (tmp_path / "r.json").read_text(encoding="utf-8") == text
    assert listing(tmp_path) == sorted(["r.json", *neighbours])
    assert all((tmp_path / name).read_text() == text for name, text in neighbours.items())


def test_a_text_behind_a_link_is_written_through_it(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "real").write_text("old")
    (tmp_path / "link").symlink_to(Path("disk") / "real")
    replace_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / "real").read_text() == "new"
    assert listing(tmp_path / "disk") == ["real"] and listing(tmp_path) == ["disk", "link"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_text_that_does_not_fit_leaves_the_old_one(tmp_path, monkeypatch, call):
    replace_text(tmp_path / "r.json", "old")
    monkeypatch.setattr(os, call, lambda *given: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(OSError, match=r"no space to write .*r\.json \(No space left on device\); free some disk space"):
        replace_text(tmp_path / "r.json", "new")
    assert (tmp_path / "r.json").read_text() == "old" and listing(tmp_path) == ["r.json"]


KILLED = """
import os, signal, sys
from fledge.io.files import replace_text
os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
replace_text(sys.argv[1], "half")
"""


@pytest.mark.parametrize("planted", [None, Path.symlink_to, Path.hardlink_to, lambda path, other: path.mkdir()])
def test_what_a_killed_writer_left_is_replaced(planted, tmp_path):
    """A link or a directory that somebody put there instead is not written to."""
    file, other = tmp_path / ("r" * 255), tmp_path / "other"
    other.write_text("mine")
    with python(KILLED, file) as process:
        assert process.wait(timeout=60) == -signal.SIGKILL
    (left,) = tmp_path.glob(".fledge-new-*")
    if planted:
        left.unlink()
        planted(left, other)
    replace_text(file, "whole")
    assert file.read_text() == "whole" and other.read_text() == "mine"
    assert left.is_dir() or listing(tmp_path) == sorted(["other", file.name])


@pytest.mark.parametrize("error", [errno.EWOULDBLOCK, errno.ENOLCK])
def test_writers_of_one_file_do_not_share_a_temporary_file(error, tmp_path, monkeypatch):
    """Nor do writers on a file system without locks."""
    monkeypatch.setattr(fcntl, "flock", lambda *given: (_ for _ in ()).throw(OSError(error, "No")))
    used, write = [], files.replace_parts
    monkeypatch.setattr(files, "replace_parts", lambda file, parts, temporary: used.append(temporary) or write(
        file, parts, temporary
    ))  # fmt: skip
    for text in ("old", "new"):
        replace_text(tmp_path / "r.json", text)
    assert used[0] != used[1] and (tmp_path / "r.json").read_text() == "new" and listing(tmp_path) == ["r.json"]


# -- locks ------------------------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from fledge.io.files import exclusive_lock
with exclusive_lock(Path(sys.argv[1]), "the run"):
    print("held", flush=True)
    time.sleep(600)
"""
COUNTER = """
import sys
from pathlib import Path
from fledge.io.files import exclusive_lock
counter, done = Path(sys.argv[1]), 0
while done < 40:
    try:
        with exclusive_lock(counter.parent / "deep" / "lock", "the counter"):
            counter.write_text(str(int(counter.read_text()) + 1))
        done += 1
    except ValueError:
        pass
"""


def test_a_second_process_is_told_who_holds_the_lock(tmp_path):
    lock = tmp_path / "lock"
    with python(HOLDER, lock) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            told = rf"the run is in use: process {holder.pid} on .* since 2.*; wait"
            for _ in range(2):
                with pytest.raises(ValueError, match=told), exclusive_lock(lock, "the run"):
                    pytest.fail("two processes hold the lock")
        finally:
            holder.send_signal(signal.SIGKILL)
    assert lock.exists(), "a killed process leaves the lock file"
    with exclusive_lock(lock, "the run"):
        assert f"process {os.getpid()} on" in lock.read_text()
    assert listing(tmp_path) == []


def test_a_lock_excludes_other_processes(tmp_path):
    """Three processes repeatedly create and remove the lock file and its directory, and only one holds the lock."""
    (tmp_path / "n").write_text("0")
    several = [python(COUNTER, tmp_path / "n") for _ in range(3)]
    assert [process.wait(timeout=120) for process in several] == [0, 0, 0]
    assert (tmp_path / "n").read_text() == "120"


def test_a_lock_does_not_follow_links(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "lock").symlink_to(tmp_path / "mine")
    told = r"the run cannot be written: its lock .*lock cannot be opened"
    with pytest.raises(ValueError, match=told), exclusive_lock(tmp_path / "lock", "the run"):
        pytest.fail("the lock was taken")
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda *given: (_ for _ in ()).throw(OSError(errno.ENOSYS, "Not implemented")))
    told = []
    with exclusive_lock(tmp_path / "lock", "the run", told.append):
        assert told == [
            "the file system of the run does not support locks (Not implemented): "
            "do not start another job that writes it"
        ]
