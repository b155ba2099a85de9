"""Directories and files that are replaced whole or not at all, and locks between processes."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from fledge import files
from fledge.files import beside, held, mend, reading, replace_text, replacing
from support.commands import python
from support.files import listing

# -- whole or not at all ----------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for the process ending here."""


def write(directory: Path, content: str) -> None:
    with replacing(directory) as new:
        (new / "a").write_text(content)
        (new / "b").write_text(content)


def read(directory: Path) -> list[str]:
    def both(place: Path) -> list[str]:
        return [(place / n).read_text() for n in ("a", "b")] if place.exists() else []

    return reading(directory, both)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Killed])
def test_an_exception_inside_leaves_what_was_there(tmp_path, error):
    for before in ([], ["old", "old"]):
        with pytest.raises(error), replacing(tmp_path / "d") as new:
            (new / "a").write_text("half")
            raise error("stop")
        assert read(tmp_path / "d") == before
        assert listing(tmp_path) == (["d"] if before else [])
        write(tmp_path / "d", "old")


def test_a_file_that_is_no_longer_written_goes(tmp_path):
    write(tmp_path / "d", "old")
    with replacing(tmp_path / "d") as new:
        (new / "c").write_text("new")
    assert listing(tmp_path / "d") == ["c"] and listing(tmp_path) == ["d"]


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("after", [False, True], ids=["before it", "after it"])
def test_a_kill_at_either_rename_leaves_old_or_new_whole(tmp_path, monkeypatch, call, after):
    """The process ends before or after the first (old away) or the second (new in place) rename."""
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
from fledge.files import reading, replacing

os.fsync = lambda handle: None  # slow, and for power cuts alone

def write(directory, content):
    with replacing(directory) as new:
        (new / "a").write_text(content)
        (new / "b").write_text(content)

def content_of(directory):
    (content,) = {reading(directory, lambda place: (place / name).read_text()) for name in ("a", "b")}
    return content

def killed_before(point, directory, content):  # whether there was such a point, at which files are touched
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
    """Of a process that replaces a directory, and of the next one that does: the old content is there, or the new."""
    with python(TWO_KILLS, tmp_path) as process:
        assert process.wait(timeout=300) == 0


def test_what_crashes_left_beside_is_no_hindrance(tmp_path):
    for name in ("d", ".d.fledge-old", ".d.fledge-new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(name)
    write(tmp_path / "d", "new")
    assert read(tmp_path / "d") == ["new", "new"] and listing(tmp_path) == ["d"]


def test_all_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    """A rename may reach the disk before the content it points to, so a power cut must find the content there."""
    flush, flushed = files._flush, []

    def noting(path):
        flush(path)
        flushed.append((path.name, (tmp_path / "d").exists()))

    monkeypatch.setattr(files, "_flush", noting)
    write(tmp_path / "d", "new")
    assert sorted(flushed) == sorted([("a", False), ("b", False), (".d.fledge-new", False), (tmp_path.name, True)])


def test_a_disk_that_fills_as_the_file_is_flushed(tmp_path, monkeypatch):
    write(tmp_path / "d", "old")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(OSError, match="no room to save"):
        write(tmp_path / "d", "new")
    monkeypatch.undo()
    assert read(tmp_path / "d") == ["old", "old"] and listing(tmp_path) == ["d"]


def test_other_errors_keep_their_own_words(tmp_path):
    with pytest.raises(PermissionError, match="not yours"), replacing(tmp_path / "d"):
        raise PermissionError(errno.EACCES, "not yours")


def test_a_directory_behind_a_link_is_replaced_there(tmp_path):
    write(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for content in ("new", "newer"):
        write(tmp_path / "link", content)
        assert read(tmp_path / "link") == read(tmp_path / "real") == [content, content]
    assert (tmp_path / "link").is_symlink() and listing(tmp_path) == ["link", "real"]


# -- readers ----------------------------------------------------------------------------------------------------------


def test_a_reader_beside_a_writer_finds_whole_content_and_disturbs_nothing(tmp_path):
    """Whatever moment of a replacement it reads at; the writer, who would notice a rename by another, ends well."""
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


def test_a_result_that_a_replacement_came_between_is_dropped(tmp_path):
    write(tmp_path / "d", "old")
    seen = []

    def slowly(place: Path) -> str:
        seen.append((place / "a").read_text())
        if len(seen) == 1:
            write(tmp_path / "d", "new")
            raise FileNotFoundError("the old one is gone")
        return seen[-1]

    assert reading(tmp_path / "d", slowly) == "new" and seen == ["old", "new"]


def test_a_directory_that_is_replaced_over_and_over_ends_the_reading(tmp_path):
    write(tmp_path / "d", "old")
    with pytest.raises(ValueError, match=r"d was replaced 5 times while it was read; try again"):
        reading(tmp_path / "d", lambda place: write(tmp_path / "d", "new"))


def test_a_readers_own_error_is_its_own(tmp_path):
    calls = []

    def fails(place: Path) -> None:
        calls.append(place)
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        reading(tmp_path / "none", fails)
    assert calls == [tmp_path / "none"]


def test_only_mending_puts_the_old_content_back(tmp_path):
    write(tmp_path / "d", "old")
    (tmp_path / "d").rename(beside(tmp_path / "d", "old"))
    assert read(tmp_path / "d") == ["old", "old"] and listing(tmp_path) == [".d.fledge-old"]
    mend(tmp_path / "d")
    assert read(tmp_path / "d") == ["old", "old"] and listing(tmp_path) == ["d"]


# -- small files ------------------------------------------------------------------------------------------------------


def test_a_text_is_replaced_whole_and_no_neighbour_is_touched(tmp_path):
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
    with pytest.raises(OSError, match=r"no room to write .*r\.json \(No space left on device\); free some space"):
        replace_text(tmp_path / "r.json", "new")
    assert (tmp_path / "r.json").read_text() == "old" and listing(tmp_path) == ["r.json"]


# -- locks ------------------------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from fledge.files import held
with held(Path(sys.argv[1]), "the run"):
    print("held", flush=True)
    time.sleep(600)
"""
COUNTER = """
import sys
from pathlib import Path
from fledge.files import held
counter, done = Path(sys.argv[1]), 0
while done < 40:
    try:
        with held(counter.parent / "deep" / "lock", "the counter"):
            counter.write_text(str(int(counter.read_text()) + 1))
        done += 1
    except ValueError:
        pass
"""


def test_a_second_process_is_told_who_holds_a_lock_until_that_dies(tmp_path):
    lock = tmp_path / "lock"
    with python(HOLDER, lock) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            told = rf"the run is in use: process {holder.pid} on .* since 2.*; wait"
            for _ in range(2):
                with pytest.raises(ValueError, match=told), held(lock, "the run"):
                    pytest.fail("two hold it")
        finally:
            holder.send_signal(signal.SIGKILL)
    assert lock.exists(), "as the kill leaves it"
    with held(lock, "the run"):
        assert f"process {os.getpid()} on" in lock.read_text()
    assert listing(tmp_path) == []


def test_a_lock_keeps_its_promise_whoever_comes_and_goes(tmp_path):
    """Its file is made and removed all the while, and with it a directory that is made for it."""
    (tmp_path / "n").write_text("0")
    several = [python(COUNTER, tmp_path / "n") for _ in range(3)]
    assert [process.wait(timeout=120) for process in several] == [0, 0, 0]
    assert (tmp_path / "n").read_text() == "120"


def test_a_lock_writes_through_no_link(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "lock").symlink_to(tmp_path / "mine")
    told = r"the run cannot be written: its lock .*lock cannot be opened"
    with pytest.raises(ValueError, match=told), held(tmp_path / "lock", "the run"):
        pytest.fail("it was held")
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda *given: (_ for _ in ()).throw(OSError(errno.ENOSYS, "Not implemented")))
    told = []
    with held(tmp_path / "lock", "the run", told.append):
        assert told == ["the file system of the run has no locks (Not implemented): start no other job that writes it"]
