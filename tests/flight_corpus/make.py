"""Make the corpus: run every case on real processes, and keep the files that its flight recorders leave.

    python -m tests.flight_corpus.make [NAME ...]
    python -m tests.flight_corpus.make --backend nccl [--to FOLDER] [--limit-s 180]     on a machine with GPUs

Ranks are forked from this process, which has imported torch once and leaves GPUs alone. Where there are fewer of these
than ranks, several ranks have one, and NCCL takes each for a host of its own (`gpu_of`). A run is over when all ranks
have ended, or a while after the first has dumped because it waited for too long: the watchdogs of the others, and
`faulthandler` in those that cannot run Python, have had their time then. What names this machine is taken out
(`anonymous.py`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch._dynamo

import disttrain
from disttrain.store import TCPStore
from tests.flight_corpus import anonymous
from tests.flight_corpus.case import GLOO, NCCL, Case
from tests.flight_corpus.cases import CASES, RUNS

SOFT_LIMIT_S: Final = {GLOO: 2.0, NCCL: 6.0}
"""NCCL takes seconds to connect."""
SETTLE_S: Final = 5.0
"""After the first dump of a hang."""
SIGNAL_AFTER_S: Final = 3.0
MAX_RUN_S: Final = 90.0
NUM_AT_ONCE: Final = {GLOO: 3, NCCL: 6}


@dataclass
class Running:
    """A case under way: its folder, where its archive will lie, its ranks by process, its store's process."""

    case: Case
    folder: Path
    archives: Path
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
        if self.case.backend == NCCL:
            settle_s += SOFT_LIMIT_S[NCCL]  # A rank may end that has waited for nothing, while others hang.
        has_settled = self.dumped_s > 0 and now_s > self.dumped_s + settle_s
        return not self.ranks or has_settled or now_s > self.started_s + MAX_RUN_S

    def end(self) -> None:
        """Kill what is left of it."""
        for process in (*self.ranks, self.store):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)

    def keep(self) -> None:
        """Copy what there is, before the ranks that are left clean up after themselves."""
        kept = self.folder.with_suffix(".kept")
        try:
            shutil.copytree(self.folder, kept)
        finally:
            self.end()
        for file in sorted(kept.iterdir()):
            anonymous.rewrite(file)
        with tarfile.open(self.archives / f"{self.case.name}.tar.xz", "w:xz") as archive:
            for file in sorted(kept.iterdir()):
                found = archive.gettarinfo(file, file.name)
                entry = found.replace(mtime=0, uid=0, gid=0, uname="", gname="", deep=False)
                with file.open("rb") as stream:
                    archive.addfile(entry, stream)
        shutil.rmtree(kept)
        shutil.rmtree(self.folder)


class Forked(Exception):
    """Raised in a process that is a rank, so that it leaves the frames of its parent as a script's own end would."""

    def __init__(self, case: Case, rank: int, folder: Path, port: int) -> None:
        super().__init__(case.name, rank)
        self.case, self.rank, self.folder, self.port = case, rank, folder, port


def start(case: Case, work: Path, archives: Path) -> Running:
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
    return Running(case, folder, archives, ranks, store, time.monotonic())


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
        DISTTRAIN_FLIGHT_RING_DIR=str(forked.folder.parent / "rings"),
        DISTTRAIN_FLIGHT_SOFT_LIMIT_S=str(SOFT_LIMIT_S[case.backend]),
    )
    log = os.open(forked.folder.parent / f"{case.name}.{forked.rank}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    device = None
    if case.backend == NCCL:
        num_gpus = torch.cuda.device_count()
        if num_gpus < case.num_ranks:
            # Else NCCL refuses two ranks of one GPU.
            os.environ["NCCL_HOSTID"] = f"host-{forked.rank}"
        device = torch.device("cuda", gpu_of(case, forked.rank, num_gpus))
        torch.cuda.set_device(device)
    disttrain.init_process_group(GLOO if device is None else None, timeout=case.timeout_s, device_id=device)
    case.run(forked.rank)
    if case.backend == NCCL:
        torch.cuda.synchronize()  # As every script ends: somebody reads a result.


def gpu_of(case: Case, rank: int, num_gpus: int) -> int:
    """Which GPU a rank computes on: its own, as far as there are enough.

    Kernels of several processes take turns on a GPU, so where one rank is to blame it has the last GPU to itself.
    """
    if num_gpus >= case.num_ranks or num_gpus == 1 or len(case.ranks) != 1:
        return rank % num_gpus
    return num_gpus - 1 if rank in case.ranks else rank % (num_gpus - 1)


def make(cases: list[Case], work: Path, archives: Path, limit_s: float, num_at_once: int) -> None:
    """Run them, so many at a time. Raises Forked in each rank."""
    waiting, running = list(cases), list[Running]()
    end_s = time.monotonic() + limit_s
    try:
        while (waiting or running) and time.monotonic() < end_s:
            while waiting and len(running) < num_at_once:
                running.append(start(waiting.pop(0), work, archives))
            time.sleep(0.05)
            for run in [run for run in running if run.is_over()]:
                running.remove(run)
                run.keep()
                print(run.case.name, "hung" if run.ranks else "ended", flush=True)
    except Forked:
        running.clear()  # They are the parent's.
        raise
    finally:
        for run in running:
            run.end()
    if left := [*(run.case for run in running), *waiting]:
        print("no time was left for", *(case.name for case in left))


def main() -> Forked | None:
    """Returns: what this process is to be, if it is a rank."""
    parser = argparse.ArgumentParser(prog="python -m tests.flight_corpus.make", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases; default: all of the backend")
    parser.add_argument("--backend", choices=(GLOO, NCCL), default=GLOO)
    parser.add_argument("--to", type=Path, default=RUNS, help="where the archives will lie")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="how long all runs may take together")
    parser.add_argument("--at-once", type=int, help="how many runs are under way together")
    given = parser.parse_args()
    cases = [case for case in CASES if case.backend == given.backend]
    if unknown := set(given.names) - {case.name for case in cases}:
        parser.error(f"over {given.backend} there is no case {', '.join(sorted(unknown))}")
    given.to.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="flight-corpus-"))
    try:
        chosen = [case for case in cases if not given.names or case.name in given.names]
        make(chosen, work, given.to, given.limit_s, given.at_once or NUM_AT_ONCE[given.backend])
    except Forked as forked:
        return forked
    print("logs:", work)
    return None


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if (part := main()) is not None:
        be_rank(part)
