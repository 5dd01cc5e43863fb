"""Make the corpus: run every case on real processes over Gloo, and keep the files that its flight recorders leave.

    python -m tests.flight_corpus.make [NAME ...]

Ranks are forked from this process, which has imported torch once. A run is over when all ranks have ended, or a while
after the first has dumped because it waited for too long: the watchdogs of the others, and `faulthandler` in those that
cannot run Python, have had their time then. What names this machine is taken out (`anonymous.py`).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch._dynamo  # noqa: F401 -- what torch imports late is no part of a run

import disttrain
from disttrain.store import TCPStore
from tests.flight_corpus import anonymous
from tests.flight_corpus.case import Case
from tests.flight_corpus.cases import CASES, RUNS

SOFT_LIMIT_S: Final = 2.0
SETTLE_S: Final = 5.0
"""After the first dump of a hang."""
SIGNAL_AFTER_S: Final = 3.0
MAX_RUN_S: Final = 90.0
NUM_AT_ONCE: Final = 3


@dataclass
class Running:
    """A case under way: its folder, its ranks by process, its store's process."""

    case: Case
    folder: Path
    ranks: dict[int, int]
    store: int
    started_s: float
    dumped_s: float = 0.0
    is_signalled: bool = False

    def is_over(self) -> bool:
        """Look at the ranks; tell them to dump when it is time."""
        now_s = time.monotonic()
        for process in list(self.ranks):
            ended, _ = os.waitpid(process, os.WNOHANG)
            if ended:
                del self.ranks[process]
        has_begun = len(list(self.folder.glob("*.ring"))) == self.case.num_ranks
        is_due = has_begun and now_s > self.started_s + SIGNAL_AFTER_S
        if self.case.is_signalled and not self.is_signalled and is_due:
            self.is_signalled = True
            for process in self.ranks:
                os.kill(process, signal.SIGUSR2)
        if not self.dumped_s and any(self.folder.glob("*.flight")):
            self.dumped_s = now_s
        settle_s = 3.0 if self.is_signalled else SETTLE_S + self.case.timeout_s * (self.case.timeout_s < MAX_RUN_S / 6)
        has_settled = self.dumped_s > 0 and now_s > self.dumped_s + settle_s
        return not self.ranks or has_settled or now_s > self.started_s + MAX_RUN_S

    def keep(self) -> None:
        """Copy what there is, before the ranks that are left clean up after themselves."""
        kept = self.folder.with_suffix(".kept")
        shutil.copytree(self.folder, kept)
        for process in (*self.ranks, self.store):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        for file in sorted(kept.iterdir()):
            anonymous.rewrite(file)
        with tarfile.open(RUNS / f"{self.case.name}.tar.xz", "w:xz") as archive:
            for file in sorted(kept.iterdir()):
                found = archive.gettarinfo(file, file.name)
                entry = found.replace(mtime=0, uid=0, gid=0, uname="", gname="")
                with file.open("rb") as stream:
                    archive.addfile(entry, stream)
        shutil.rmtree(kept)
        shutil.rmtree(self.folder)


class Forked(Exception):
    """Raised in a process that is a rank, so that it leaves the frames of its parent as a script's own end would."""

    def __init__(self, case: Case, rank: int, folder: Path, port: int) -> None:
        super().__init__(case.name, rank)
        self.case, self.rank, self.folder, self.port = case, rank, folder, port


def start(case: Case, work: Path) -> Running:
    """Fork the store and the ranks of `case`. Raises Forked in each rank."""
    folder = work / case.name
    folder.mkdir()
    reading, writing = os.pipe()
    store = os.fork()
    if not store:
        serve(writing)
    port = int(os.read(reading, 16))
    os.close(reading)
    os.close(writing)
    ranks = {}
    for rank in range(case.num_ranks):
        process = os.fork()
        if not process:
            raise Forked(case, rank, folder, port)
        ranks[process] = rank
    return Running(case, folder, ranks, store, time.monotonic())


def serve(writing: int) -> None:
    """Be a store until killed; write its port."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writing, str(store.port).encode())
    while True:
        signal.pause()


def be_rank(forked: Forked) -> None:
    """Run the case as one of its ranks; the recorder's hooks see how it ends."""
    case = forked.case
    os.environ.update(
        RANK=str(forked.rank),
        WORLD_SIZE=str(case.num_ranks),
        LOCAL_RANK=str(forked.rank),
        MASTER_ADDR="127.0.0.1",
        DISTTRAIN_STORE=f"127.0.0.1:{forked.port}",
        DISTTRAIN_FLIGHT_DIR=str(forked.folder),
        DISTTRAIN_FLIGHT_SOFT_LIMIT_S=str(SOFT_LIMIT_S),
    )
    log = os.open(forked.folder.parent / f"{case.name}.{forked.rank}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    disttrain.init_process_group("gloo", timeout=case.timeout_s)
    case.run(forked.rank)


def make(cases: list[Case], work: Path) -> None:
    """Run them, a few at a time. Raises Forked in each rank."""
    waiting, running = list(cases), list[Running]()
    while waiting or running:
        while waiting and len(running) < NUM_AT_ONCE:
            running.append(start(waiting.pop(0), work))
        time.sleep(0.05)
        for run in [run for run in running if run.is_over()]:
            run.keep()
            running.remove(run)
            print(run.case.name, "hung" if run.ranks else "ended", flush=True)


def main() -> Forked | None:
    """Returns: what this process is to be, if it is a rank."""
    names = sys.argv[1:]
    unknown = set(names) - {case.name for case in CASES}
    if unknown:
        sys.exit(f"there is no case {', '.join(sorted(unknown))}")
    RUNS.mkdir(exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="flight-corpus-"))
    try:
        make([case for case in CASES if not names or case.name in names], work)
    except Forked as forked:
        return forked
    print("logs:", work)
    return None


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if (part := main()) is not None:
        be_rank(part)
