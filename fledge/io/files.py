"""Atomic replacement of directories and small files, checks of output paths, and locks that exclude other processes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

READ_ATTEMPTS = 5  # how often `read_consistent` reads a directory that is replaced during every read
LOCKS_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # raised by file systems mounted without locks
TEMPORARY = ".fledge-new-"


class DiskFullError(OSError):
    """A full disk. The message is for people and starts with the cause, without the errno."""

    def __str__(self) -> str:
        return str(self.strerror)


@contextlib.contextmanager
def replace_directory(directory: Path) -> Iterator[Path]:
    """Context manager: yields an empty directory to write into, and renames it to `directory` when the block succeeds.

    Only one process at a time may replace a directory (see `exclusive_lock`). Processes that read through
    `read_consistent` see either the complete old content or the complete new content, even after a crash at any
    moment. If `directory` is a symbolic link, the link's target is replaced. If the block raises, the old content
    stays. A full disk raises OSError with the cause and a remedy.
    """
    directory = Path(os.path.realpath(directory))
    new, old = sibling_path(directory, "new"), sibling_path(directory, "old")
    restore_interrupted(directory)
    shutil.rmtree(old, ignore_errors=True)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        yield new
        for path in new.rglob("*"):
            _fsync(path)
        _fsync(new)
    except BaseException as e:
        shutil.rmtree(new, ignore_errors=True)
        full = disk_full_errno(e)
        if full is None:
            raise
        raise DiskFullError(
            full,
            f"no space to save {directory} ({os.strerror(full)}); the previous content is unchanged. Free some disk "
            "space; fledge train --resume then continues the training",
        ) from e
    if directory.exists():
        directory.rename(old)
    new.rename(directory)
    _fsync(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore_interrupted(directory: Path) -> None:
    """Restores the old content of a directory whose replacement was interrupted between its two renames.

    Deletes nothing. Only the process that may replace the directory calls this; readers use `read_consistent`.
    """
    old = sibling_path(directory, "old")
    if old.exists() and not directory.exists():
        old.rename(directory)


def read_consistent(directory: Path, read: Callable[[Path], T]) -> T:
    """Returns `read(path)`, where `path` holds one complete version of a directory that `replace_directory` writes.

    `path` is the directory itself, or the renamed old version if a replacement is between its two renames or was
    interrupted there. Writes nothing. If the directory was replaced during the call, the result or exception of `read`
    is discarded and the new content is read. Raises ValueError if that happens READ_ATTEMPTS times in a row.
    """
    directory = Path(directory)
    for _ in range(READ_ATTEMPTS):
        before = path, _ = _version(directory)
        try:
            result = read(path)
        except Exception:
            if _version(directory) == before:
                raise
        else:
            if _version(directory) == before:
                return result
    raise ValueError(
        f"{directory} was replaced {READ_ATTEMPTS} times while it was read; try again when its run saves less often"
    )


def _version(directory: Path) -> tuple[Path, tuple[int, ...] | None]:
    """The path of a directory's content, and an identifier that changes on replacement (None: no content exists)."""
    for path in (directory, sibling_path(directory, "old")):
        with contextlib.suppress(OSError):
            stat = path.stat()
            return path, (stat.st_dev, stat.st_ino, stat.st_ctime_ns)  # the inode number alone can be reused
    return directory, None


def cache_directory(given: str | None = None) -> Path:
    """The directory of tokenized data and compiled code: the given directory, FLEDGE_CACHE, or `fledge` in the user's
    cache directory."""
    if named := given or os.environ.get("FLEDGE_CACHE"):
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")).absolute() / "fledge"


def sibling_path(path: Path, suffix: str) -> Path:
    """The hidden path `.NAME.fledge-SUFFIX` in the same directory as `path`, reserved for fledge."""
    path = Path(os.path.realpath(path))  # Path(".") has an empty name
    return path.parent / f".{path.name}.fledge-{suffix}"


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_text(file: str | Path, text: str) -> None:
    """Writes a small UTF-8 file atomically (see `replace_file`)."""
    replace_file(file, [text.encode()])


def replace_file(file: str | Path, parts: Iterable[bytes]) -> None:
    """Writes a file of several parts atomically (see `replace_parts`). If `file` is a symbolic link, the link's target
    is replaced.

    The temporary file's name follows from `file`: the next writer removes the temporary file of a killed writer.
    """
    import fcntl

    file = Path(os.path.realpath(file))
    with contextlib.ExitStack() as stack:
        try:
            handle = os.open(file.parent, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends, or has written the file
            temporary = file.with_name(TEMPORARY + hashlib.sha256(os.fsencode(file.name)).hexdigest()[:16])
            temporary.unlink(missing_ok=True)
        except OSError:  # another process may be writing the same file
            temporary = file.with_name(TEMPORARY + secrets.token_hex(8))
        replace_parts(file, parts, temporary)


def replace_parts(file: Path, parts: Iterable[bytes | memoryview], temporary: Path) -> None:
    """Writes a file of several parts atomically: to `temporary`, a path in the same directory, which is then renamed. A
    temporary file left by a killed process is replaced. A full disk raises OSError with the cause and a remedy; the old
    content of `file` stays."""
    try:
        with open(temporary, "wb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o666)) as f:
            for part in parts:
                f.write(part)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(file)
    except BaseException as e:
        temporary.unlink(missing_ok=True)
        if (full := disk_full_errno(e)) is None:
            raise
        raise DiskFullError(full, f"no space to write {file} ({os.strerror(full)}); free some disk space") from e


def remove_temporary_files(directory: Path) -> None:
    """Removes the temporary files of `replace_file` calls that were killed. Only the writing process may call this."""
    for file in directory.glob(TEMPORARY + "*"):
        file.unlink()


def sha256_of(file: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def disk_full_errno(error: BaseException | None) -> int | None:
    """The errno if an exception, or an exception in the chain of causes, reports a full disk; otherwise None.

    torch.save raises a RuntimeError whose context is the OSError, torch.distributed.checkpoint an exception with the
    failures of all ranks.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return error.errno
        for failure, _ in getattr(error, "failures", {}).values():
            if (full := disk_full_errno(failure)) is not None:
                return full
        error = error.__cause__ or error.__context__
    return None


def check_output_path(path: str | Path, flag: str, *, directory: bool = False) -> Path:
    """Checks, before a job starts, that a file (or a directory) can be written at `path`, and returns the path.

    `flag` names the option in messages. Raises ValueError if the path is empty, exists as anything but a file (or a
    directory), or cannot be written.
    """
    if not str(path):
        raise ValueError(f"{flag} is empty; give it a path")
    path = Path(path)
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{flag} {path} is a broken symbolic link; remove it or choose another name")
    existing = existing_parent(path)
    if existing == path and not (path.is_dir() if directory else path.is_file()):
        kind = "a directory" if path.is_dir() else "a file" if path.is_file() else "a device, pipe or socket"
        raise ValueError(f"{flag} {path} is {kind}; choose another name")
    if existing != path and not existing.is_dir():
        raise ValueError(f"{flag} {path} cannot be created: {existing} is not a directory; choose another name")
    written = [existing]
    if path.is_file():
        written.append(Path(os.path.realpath(path)).parent)  # the directory of the temporary file or the lock
    if locked := next((p for p in written if not os.access(p, os.W_OK)), None):
        raise ValueError(f"{flag} {path} cannot be written: no write permission for {locked}; choose another name")
    return path


def existing_parent(path: Path) -> Path:
    """The path if it exists, else the nearest existing parent."""
    return next(p for p in (path, *path.absolute().parents) if p.exists())


class InUse(ValueError):
    """Another process holds a lock."""


@contextlib.contextmanager
def exclusive_lock(lock: Path, resource: str, warn: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Context manager: holds an exclusive lock on the file `lock` while the block runs.

    `resource` names the protected resource, for messages. The operating system releases the lock when the process ends
    for any reason, so a lock file left behind locks nothing. Raises InUse, naming the owning process, if another
    process holds the lock, and ValueError if the lock file cannot be opened. If the file system does not support locks,
    `warn` is called with a message and the block runs without a lock.
    """
    handle = _acquire(lock, resource, warn)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


def _acquire(lock: Path, resource: str, warn: Callable[[str], None]) -> int:
    """Opens and locks the file, writes the owner into it, and returns the file descriptor."""
    import fcntl  # not available on Windows, where drafts can still be read

    while True:
        lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            # NFS only locks files opened for writing; O_NOFOLLOW because the target of a link would be overwritten
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            continue  # a different process removed the parent directory again
        except OSError as e:
            raise ValueError(f"{resource} cannot be written: its lock {lock} cannot be opened ({e.strerror})") from e
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            owner = os.read(handle, 200).decode(errors="replace").strip() or "another process is writing it"
            os.close(handle)
            raise InUse(f"{resource} is in use: {owner}; wait until that process has ended, or stop it") from e
        except OSError as e:
            if e.errno not in LOCKS_UNSUPPORTED:
                os.close(handle)
                raise
            warn(
                f"the file system of {resource} does not support locks ({e.strerror}): do not start another job that "
                "writes it"
            )
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), lock.stat()):
                since = time.strftime("%Y-%m-%d %H:%M:%S")
                owner = f"process {os.getpid()} on {socket.gethostname()} has been writing it since {since}\n"
                with contextlib.suppress(OSError):  # on a full disk the lock works without the owner's name
                    os.ftruncate(handle, 0)
                    os.write(handle, owner.encode())
                return handle
        os.close(handle)  # the previous owner removed the file between our open and our flock
