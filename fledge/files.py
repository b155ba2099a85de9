"""Files and directories that are replaced whole or left as they were, and locks that keep a second job off them."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

READS = 5  # of a directory that is replaced each time it is read
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems mounted without locks
TEMPORARY = ".fledge-new-"


# -- directories --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """Yields a fresh directory to write into, which takes the place of `directory` when the block ends well.

    Only one process at a time may do this to a directory (see `held`). Processes that read through `reading` find the
    old content or the new, never a part, also after a crash at any moment. Where `directory` is a symbolic link, the
    directory it leads to is replaced. A full disk raises OSError with the cause and the cure, and leaves the old
    content.
    """
    directory = Path(os.path.realpath(directory))
    new, old = beside(directory, "new"), beside(directory, "old")
    mend(directory)
    shutil.rmtree(old, ignore_errors=True)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        yield new
        for file in new.iterdir():
            _flush(file)
        _flush(new)
    except BaseException as e:
        shutil.rmtree(new, ignore_errors=True)
        full = disk_full(e)
        if full is None:
            raise
        raise OSError(
            full,
            f"no room to save {directory} ({os.strerror(full)}); what was there is untouched. Free some "
            "space; training then goes on with fledge train --resume",
        ) from e
    if directory.exists():
        directory.rename(old)
    new.rename(directory)
    _flush(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def mend(directory: Path) -> None:
    """Puts the old content back where a replacement was stopped between its two renames. Deletes nothing.

    For the process that may replace the directory; one that only reads uses `reading`.
    """
    old = beside(directory, "old")
    if old.exists() and not directory.exists():
        old.rename(directory)


def reading(directory: Path, read: Callable[[Path], T]) -> T:
    """Returns `read(place)`, where `place` holds the whole content of a directory that `replacing` writes.

    `place` is the directory, or its old content where a replacement is between its two renames or was stopped there.
    Nothing is written. A result (or error) that a replacement came between is dropped, and the new content read.
    Raises ValueError where every one of some attempts is disturbed.
    """
    directory = Path(directory)
    for _ in range(READS):
        before = place, _ = _state(directory)
        try:
            found = read(place)
        except Exception:
            if _state(directory) == before:
                raise
        else:
            if _state(directory) == before:
                return found
    raise ValueError(
        f"{directory} was replaced {READS} times while it was read; try again when its run saves less often"
    )


def _state(directory: Path) -> tuple[Path, tuple[int, ...] | None]:
    """Where a directory's content lies, and what is another after it was replaced; None where there is nothing."""
    for place in (directory, beside(directory, "old")):
        with contextlib.suppress(OSError):
            found = place.stat()
            return place, (found.st_dev, found.st_ino, found.st_ctime_ns)  # an inode alone may be used again
    return directory, None


def beside(path: Path, which: str) -> Path:
    """A place next to a file or directory that nobody else has a use for."""
    path = Path(os.path.realpath(path))  # "." has no name
    return path.parent / f".{path.name}.fledge-{which}"


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- small files ----------------------------------------------------------------------------------------------------


def replace_text(file: str | Path, text: str) -> None:
    """Writes a small file whole, or leaves it as it was. Where it is a symbolic link, the file it leads to is written.

    The text is first written beside it under a new name, so that no other file is touched. A full disk raises OSError
    with the cause and the cure.
    """
    file = Path(os.path.realpath(file))
    temporary = file.with_name(TEMPORARY + secrets.token_hex(8))
    try:
        with temporary.open("x", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(file)
    except BaseException as e:
        temporary.unlink(missing_ok=True)
        if (full := disk_full(e)) is None:
            raise
        raise OSError(full, f"no room to write {file} ({os.strerror(full)}); free some space") from e


def remove_abandoned(directory: Path) -> None:
    """Removes what `replace_text` left where the process was killed. For the one process that writes there."""
    for file in directory.glob(TEMPORARY + "*"):
        file.unlink()


def disk_full(error: BaseException | None) -> int | None:
    """The errno of a full disk that an exception is, or hides: torch.save makes a RuntimeError of it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return error.errno
        error = error.__cause__ or error.__context__
    return None


# -- locks ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def held(lock: Path, what: str, say: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Keeps every other process that asks for the same lock file away from `what` while the block runs.

    The system releases the lock when the process ends, however it ends, so a file left behind locks nothing. Raises
    ValueError, naming the process, where another one holds it. Where the file system has no locks, `say` is told, and
    the block runs without one.
    """
    handle = _locked(lock, what, say)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


def _locked(lock: Path, what: str, say: Callable[[str], None]) -> int:
    """Opens and locks the file, with a line in it that says who has it."""
    import fcntl  # Linux and macOS have it; Windows has not, where drafts can be read all the same

    while True:
        lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            # writable, or NFS locks nothing; through no link, since it is written
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            continue  # its directory was new, and removed by the process that made it
        except OSError as e:
            raise ValueError(f"{what} cannot be written: its lock {lock} cannot be opened ({e.strerror})") from e
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            holder = os.read(handle, 200).decode(errors="replace").strip() or "another process is writing it"
            os.close(handle)
            raise ValueError(f"{what} is in use: {holder}; wait until that has ended, or stop it") from e
        except OSError as e:
            if e.errno not in NO_LOCKS:
                os.close(handle)
                raise
            say(f"the file system of {what} has no locks ({e.strerror}): start no other job that writes it")
        if _is_open_as(lock, handle):
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            holder = f"process {os.getpid()} on {socket.gethostname()} has been writing it since {since}\n"
            with contextlib.suppress(OSError):  # on a full disk it locks all the same
                os.ftruncate(handle, 0)
                os.write(handle, holder.encode())
            return handle
        os.close(handle)  # the process that held it removed it between


def _is_open_as(path: Path, handle: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False
