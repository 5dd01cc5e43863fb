"""One job at a time saves to a directory: it claims it, and looks after its claim at each save. Torch-free.

A claim is a folder `.claim-NUMBER.tmp-ID` in the directory, held as a save under way is held: by a lock, which ends
with its process, however that ends. Claims have an order; each job first makes its own and then looks at the others:

- One before it that is held belongs to a living job: the later job withdraws and is refused.
- One that is not held is dead, and is removed.
- One after it that is held may have been made without seeing this one, by a job that chose its number at the same
  time. Only when that has looked around it says whose it is: then it stands, and this job is refused; or it withdraws.
- Where nobody can know (no locks there), the later job takes over: it removes the claims before its own. The earlier
  job finds that out at its next save, at the latest before that is committed, and is refused.

So of jobs that begin at the same time one stays: each waits for later ones only, and the last waits for none. All
claims of one process are one job's. The order is that of tickets in Lamport's bakery (CACM 17/8, 1974), where the
choice of a number is guarded, too.
"""

from __future__ import annotations

import json
import os
import socket
import time
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path
from uuid import uuid4

import xxhash

from disttrain.checkpoint.storage.base import HOLD_SUFFIX, Storage, read_small
from disttrain.checkpoint.storage.folders import CLAIM
from disttrain.checkpoint.storage.locks import UNNAMED
from disttrain.errors import CheckpointError

_OWNER = "owner.json"
_PROCESS_DIGITS = 16
_LOOK_S = 10.0
"""The time that another job may look around; it reads a folder."""

_AGAIN_S = 0.01
_ANOTHER = "another job"
_ANOTHER_PLACE = "Give each job a directory of its own, or end the other job."


class Claim:
    """The right of this process, rank 0 of its job, to save steps in `directory`; made at the first save."""

    def __init__(self, storage: Storage, directory: Path) -> None:
        self._storage = storage
        self._directory = directory
        self._held = ExitStack()
        self._pid = os.getpid()
        self._end: weakref.finalize[..., Claim] | None = None
        self.name = ""

    def ensure(self) -> None:
        """Claim the directory, unless that has been done. Raises CheckpointError when a living job has it; OSError."""
        if self.name:
            return
        self._pid = os.getpid()
        others = _claims(self._storage, self._directory)
        number = 1 + max((int(other[1]) for other in others), default=0)
        self.name = f".claim-{number:06d}.tmp-{_this_process()}{uuid4().hex[:_PROCESS_DIGITS]}"
        path = self._directory / self.name
        try:
            self._held.enter_context(self._storage.hold(path))
            self._end = weakref.finalize(self, _withdraw, self._storage, path, self._held, self._pid)
            self._storage.make_folder(path)
            self._look_at_others()
            owner = json.dumps({"host": socket.gethostname(), "pid": self._pid}).encode()
            self._storage.write_file(path / _OWNER, [memoryview(owner)])
        except BaseException:
            self.close()
            raise

    def _look_at_others(self) -> None:
        for other, _, process in _claims(self._storage, self._directory):
            if process == _process_of(self.name):
                continue
            path = self._directory / other
            is_held = self._storage.is_held(path)
            if is_held and (other < self.name or self._stands(path)):
                who = _owner(self._storage, path) or _ANOTHER
                raise CheckpointError("save", f"{who} saves to {self._directory} as well.", _ANOTHER_PLACE)
            if is_held is False:
                self._storage.remove_unless_held(path)
            elif is_held is None and other < self.name:
                with suppress(FileNotFoundError):  # only its lock was left, or another has removed it
                    self._storage.remove_folder(path)

    def _stands(self, later: Path) -> bool:
        """Wait until a later claim is told whose it is, or goes."""
        ends_s = time.monotonic() + _LOOK_S
        while self._storage.is_held(later) and time.monotonic() < ends_s:
            if _owner(self._storage, later):
                return True
            time.sleep(_AGAIN_S)
        return bool(self._storage.is_held(later))

    def outlive(self) -> None:
        """Lets the claim stay when this process ends, for a writer that goes on; the next job removes it."""
        if self._end is not None:
            self._end.detach()
            self._end = None

    def close(self) -> None:
        """Let others have the directory. Idempotent."""
        if self.name:
            self.outlive()
            _withdraw(self._storage, self._directory / self.name, self._held, self._pid)
            self.name = ""


def check_claim(storage: Storage, directory: Path, name: str) -> None:
    """Raises CheckpointError when the claim of this name is not good any more; OSError."""
    claims = _claims(storage, directory)
    # A later one that is held is about to withdraw.
    later = [
        other
        for other, _, process in claims
        if other > name and process != _process_of(name) and storage.is_held(directory / other) is None
    ]
    if later or all(other != name for other, _, _ in claims):
        who = (later and _owner(storage, directory / later[-1])) or _ANOTHER
        raise CheckpointError("save", f"{who} has taken over {directory}.", _ANOTHER_PLACE)


def _claims(storage: Storage, directory: Path) -> list[tuple[str, str, str]]:
    """Name, number and process of each, in order. One that is being made, or died then, has a lock only, if that."""
    names = (name.removesuffix(HOLD_SUFFIX).removesuffix(UNNAMED) for name in storage.names(directory))
    matches = map(CLAIM.fullmatch, names)
    return sorted({(match[0], match[1], _process_of(match[0])) for match in matches if match is not None})


def _process_of(name: str) -> str:
    return name.rpartition("-")[2][:_PROCESS_DIGITS]


def _owner(storage: Storage, claim: Path) -> str:
    """The owner of a claim, in words; nothing as long as it does not stand."""
    try:
        owner = json.loads(read_small(storage, claim / _OWNER))
        return f"{_ANOTHER} (process {owner['pid']} on {owner['host']})"
    except (OSError, ValueError, KeyError, TypeError):  # it is being made, or has gone
        return ""


def _this_process() -> str:
    """16 hex digits, different for each process on each machine since its start."""
    with open("/proc/self/stat", "rb") as file:
        started = file.read().rpartition(b")")[2].split()[19]
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return xxhash.xxh3_64_hexdigest(b"%s %d %s %s" % (boot, os.getpid(), started, socket.gethostname().encode()))


def _withdraw(storage: Storage, path: Path, stack: ExitStack, pid: int) -> None:
    if os.getpid() != pid:
        return
    # What cannot be removed now is not held any more, and the next job removes it.
    with suppress(OSError):
        storage.remove_folder(path)
    stack.close()
