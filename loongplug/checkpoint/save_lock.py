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
from pathlib import Path

from loongplug.checkpoint.common_errors import write_error

LOCK_FILE = ".loongplug_lock"
_HELD = (errno.EACCES, errno.EAGAIN)
_LONGEST = 2**16
_SETTLED_SECONDS = 1.0  # until a lock is read again, where the kernel cannot lock the file
_TOLD_SECONDS = 2.0  # in which a run that got the lock at the same moment writes its name


@contextmanager
def save_lock(folder: Path, *, rank: int) -> Iterator[None]:
    """While entered, no other run writes into ``folder``; rank 0 holds the lock, which it makes.

    For all ranks, before anything is changed in ``folder``; no collectives. A lock that a dead
    process left on this host, or an earlier attempt of this torchrun job anywhere, is taken over.
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
            _check_holder(_holder(held), path, locked=locked)
            mine = (json.dumps(_this_process()) + "\n").encode()
            os.ftruncate(held, 0)
            os.pwrite(held, mine, 0)
            os.fsync(held)
            if not locked:
                time.sleep(_SETTLED_SECONDS)
                found = path.read_bytes() if path.exists() else b""
                if found != mine:
                    raise _refusal(path, _parsed(found))
        except BaseException:
            with suppress(OSError):
                os.close(held)
            raise
        return held


def _kernel_lock(held: int, path: Path) -> bool:
    """Whether the kernel has locked the file for this process; False where it knows no locks."""
    try:
        fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _HELD:
            return False
        until = time.monotonic() + _TOLD_SECONDS
        while not (holder := _holder(held)) and time.monotonic() < until:
            time.sleep(0.05)
        raise _refusal(path, holder) from error
    return True


def _check_holder(holder: dict[str, str], path: Path, *, locked: bool) -> None:
    """Refuse a lock whose holder may live, although the kernel does not say so."""
    mine = _this_process()
    if not holder or (mine["job"] and holder["job"] == mine["job"]):
        return
    gone = locked or holder["born"] != _born(holder["process"])
    if not (holder["host"] == mine["host"] and gone):
        raise _refusal(path, holder)


def _is_the_file(held: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(held), os.stat(path))
    except FileNotFoundError:
        return False


def _refusal(path: Path, holder: dict[str, str]) -> ValueError:
    who, remove = "another process", ""
    if holder:
        who = f"process {holder['process']} on {holder['host']} since {holder['since']}"
        if holder["host"] != socket.gethostname():
            remove = f", or, if that run is no more, remove {path}"
    return ValueError(
        f"{path.parent} is in use by another run ({who}), whose files this one would mix with its "
        f"own: wait until it has ended, give another folder{remove}."
    )


def _this_process() -> dict[str, str]:
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return {
        "host": socket.gethostname(),
        "process": str(os.getpid()),
        "born": _born(str(os.getpid())),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        # torchrun's name of the job, the same after a restart; its word for none is "none".
        "job": "" if job == "none" else job,
    }


def _born(process: str) -> str:
    """When a process of this host began, which tells it from a later one of its number; or ""."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _holder(held: int) -> dict[str, str]:
    return _parsed(os.pread(held, _LONGEST, 0))


def _parsed(text: bytes) -> dict[str, str]:
    """The holder that a lock's text names; empty where it names none, or is not (yet) whole."""
    try:
        found = json.loads(text)
        return {name: str(found[name]) for name in ("host", "process", "born", "since", "job")}
    except (ValueError, TypeError, KeyError):
        return {}
