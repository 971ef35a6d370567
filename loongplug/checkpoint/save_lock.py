"""A lock that lets one run at a time write into a folder, with the name of its holder.

The truth on one host is the kernel's lock on the file, which ends with its process however that
ends, and which processes that the run forks do not inherit. The text tells of the holder; it
decides where the kernel knows nothing: another host's, or a file system without locks.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from loongplug.checkpoint.common_errors import write_error

LOCK_FILE = ".loongplug_lock"
_HELD = (errno.EACCES, errno.EAGAIN)
_LONGEST = 2**16
_SETTLED_SECONDS = 1.0  # until a lock is read again, where the kernel cannot lock the file
_TOLD_SECONDS = 2.0  # in which a run that got the lock at the same moment writes its name


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that has a lock."""

    host: str
    process: int
    born: str  # tells it from a later process with the same number
    since: str
    job: str  # torchrun's name of the job, the same after a restart; "" where it has none

    def __str__(self) -> str:
        return f"process {self.process} on {self.host} since {self.since}"


@contextmanager
def save_lock(folder: Path, *, rank: int) -> Iterator[None]:
    """While entered, no other run writes into ``folder``; rank 0 holds the lock, which it makes.

    For all ranks, before anything is changed in ``folder``; no collectives. A lock that a dead
    process left on this host, or an earlier attempt of this torchrun job anywhere, is taken over.

    Raises:
        ValueError: on rank 0, where another run has the lock, or may have it on another host; or
            where the folder cannot be written to.
    """
    if rank != 0:
        yield
        return
    path = folder / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = _acquire(path)
    except OSError as error:
        raise write_error(folder, error) from error
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # while the kernel's lock holds: no other run may lock the file meanwhile
        os.close(held)


def _acquire(path: Path) -> int:
    while True:
        held = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            locked = _kernel_lock(held, path)
            if not _is_the_file(held, path):  # the run that had it has just removed it
                os.close(held)
                continue
            # Not by path: the kernel's lock ends when any opening of the file is closed here.
            _check_holder(_parsed(os.pread(held, _LONGEST, 0)), path, locked=locked)
            mine = json.dumps(asdict(_this_process())) + "\n"
            os.ftruncate(held, 0)
            os.pwrite(held, mine.encode(), 0)
            os.fsync(held)
            if not locked:
                time.sleep(_SETTLED_SECONDS)
                if path.read_text(encoding="utf-8") != mine:
                    raise _refusal(path, _read(path))
        except BaseException:
            with suppress(OSError):
                os.close(held)
            raise
        return held


def _kernel_lock(held: int, path: Path) -> bool:
    """Whether the kernel has locked the file for this process; False where it knows no locks.

    Raises:
        ValueError: another process has it.
    """
    try:
        fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _HELD:
            return False
        until = time.monotonic() + _TOLD_SECONDS
        while (holder := _read(path)) is None and time.monotonic() < until:
            time.sleep(0.05)
        raise _refusal(path, holder) from error
    return True


def _is_the_file(held: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(held), os.stat(path))
    except FileNotFoundError:
        return False


def _check_holder(holder: Holder | None, path: Path, *, locked: bool) -> None:
    """Refuse a lock whose holder may live, although the kernel does not say so."""
    mine = _this_process()
    if holder is None or (holder.job and holder.job == mine.job):
        return
    if holder.host == mine.host and (locked or holder.born != _born(holder.process)):
        return
    raise _refusal(path, holder)


def _refusal(path: Path, holder: Holder | None) -> ValueError:
    who = "another process" if holder is None else str(holder)
    remove = ""
    if holder is not None and holder.host != socket.gethostname():
        remove = f", or, if that run is no more, remove {path}"
    return ValueError(
        f"{path.parent} is in use by another run ({who}), whose files this one would mix with its "
        f"own: wait until it has ended, give another folder{remove}."
    )


def _this_process() -> Holder:
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return Holder(
        host=socket.gethostname(),
        process=os.getpid(),
        born=_born(os.getpid()),
        since=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        job="" if job == "none" else job,  # torchrun's word for a job without a name
    )


def _born(process: int) -> str:
    """When a process of this host began, in the kernel's ticks; "" where it is not there."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _read(path: Path) -> Holder | None:
    try:
        return _parsed(path.read_bytes())
    except OSError:
        return None


def _parsed(text: bytes) -> Holder | None:
    """The holder that a lock's text names; None where it names none, or is not (yet) whole."""
    try:
        found = json.loads(text)
        return Holder(**{name: found[name] for name in Holder.__annotations__})
    except (ValueError, TypeError, KeyError):
        return None
