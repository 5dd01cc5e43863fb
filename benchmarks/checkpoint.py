"""Checkpoints of one process against what the disk takes, and against torch.distributed.checkpoint; in turns, medians.

    python benchmarks/checkpoint.py [--mib 2048] [--rounds 5] [--directory DIR]

"plain" writes the same bytes with four threads to four files through the page cache and syncs them, "plain direct" does
so with O_DIRECT, as the plain read does: what the machine itself takes, from and to memory in large pages, of which a
disk takes more at once. Before each read the files are dropped from the page cache. "stall" is the time until an
asynchronous save gives the caller its tensors back, when it has been used before; that of small tensors is the
processor's time of the calling thread. Bytes read: three ranks load what four have saved. "4 ranks, replicated": all
want the same bytes, and read them for each other, or each for itself. The load of the machine is that at the beginning
and at the end.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from harness import OURS, TORCH, command_line, finish, row

from disttrain import barrier, get_rank, get_world_size, init_device_mesh
from disttrain.checkpoint import Checkpointer, LocalStorage, load, save
from disttrain.checkpoint.storage.local_file import aligned_memory
from disttrain.dtensor import Shard, distribute_tensor
from disttrain.testing import RankPool, run_threads

NUM_FILES = 4
NUM_SMALL = 10_000
NUM_SMALL_STAGED = 2_000
NUM_RANKS = 4
PIECE_BYTES = 16 << 20
State = dict[str, torch.Tensor]


def large_state(mib: int) -> State:
    return {f"layer{number}": torch.rand(mib * (1 << 18) // 16) for number in range(16)}


def small_state() -> State:
    return {f"small{number}": torch.rand(64) for number in range(NUM_SMALL)}


def write_plainly(folder: Path, data: memoryview, flags: int) -> None:
    """The same number of bytes, by as many threads as files."""
    folder.mkdir()
    size = len(data) // NUM_FILES

    def write(number: int) -> None:
        descriptor = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT | flags)
        for start in range(number * size, (number + 1) * size, PIECE_BYTES):
            os.write(descriptor, data[start : min(start + PIECE_BYTES, (number + 1) * size)])
        os.fsync(descriptor)
        os.close(descriptor)

    with ThreadPoolExecutor(NUM_FILES) as pool:
        list(pool.map(write, range(NUM_FILES)))


def read_plainly(folder: Path, data: memoryview) -> None:
    """By as many threads as files, past the page cache."""
    size = len(data) // NUM_FILES

    def read(number: int) -> None:
        descriptor = os.open(folder / str(number), os.O_RDONLY | os.O_DIRECT)
        for start in range(number * size, (number + 1) * size, PIECE_BYTES):
            piece = data[start : min(start + PIECE_BYTES, (number + 1) * size)]
            os.preadv(descriptor, [piece], start - number * size)
        os.close(descriptor)

    with ThreadPoolExecutor(NUM_FILES) as pool:
        list(pool.map(read, range(NUM_FILES)))


def forget(folder: Path) -> None:
    """Let the page cache drop these files."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def quietly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        call(*args, **kwargs)


def torch_save(state: State, folder: Path) -> None:
    writer = torch_checkpoint.FileSystemWriter(folder, thread_count=NUM_FILES)
    quietly(torch_checkpoint.save, state, storage_writer=writer, no_dist=True)


def torch_load(state: State, folder: Path) -> None:
    quietly(torch_checkpoint.load, state, checkpoint_id=folder, no_dist=True)


def seconds(call: Callable[..., Any], *args: Any) -> float:
    start_s = time.perf_counter()
    call(*args)
    return time.perf_counter() - start_s


def one_round(directory: Path, state: State, memory: memoryview, small: State) -> dict[str, float]:
    taken = {}
    writes: dict[str, Callable[[Path], Any]] = {
        "write: plain": lambda folder: write_plainly(folder, memory, 0),
        "write: plain direct": lambda folder: write_plainly(folder, memory, os.O_DIRECT),
        f"write: {OURS}": lambda folder: save(state, folder),
        "write: torch": lambda folder: torch_save(state, folder),
    }
    reads: dict[str, Callable[[Path], Any]] = {
        "plain direct": lambda folder: read_plainly(folder, memory),
        OURS: lambda folder: load(state, folder),
        "torch": lambda folder: torch_load(state, folder),
    }
    for name, write in writes.items():
        side, folder = name.removeprefix("write: "), directory / "save"
        taken[name] = seconds(write, folder)
        forget(folder)
        if side in reads:
            taken[f"read: {side.removesuffix(' direct')}"] = seconds(reads[side], folder)
        shutil.rmtree(folder)
    for side, write, read in ((OURS, save, load), (TORCH, torch_save, torch_load)):
        folder = directory / "small"
        taken[f"{NUM_SMALL} small tensors, write: {side}"] = seconds(write, small, folder)
        taken[f"{NUM_SMALL} small tensors, read: {side}"] = seconds(read, small, folder)
        shutil.rmtree(folder)
    return taken


def stalls(directory: Path, state: State, rounds: int) -> dict[str, list[float]]:
    """The first asynchronous save's and the others', when nothing else is under way; and a copy of the same bytes."""
    copies = {name: tensor.clone() for name, tensor in state.items()}
    taken: dict[str, list[float]] = {"stall: first": [], "stall: warm": [], "stall: copy in memory": []}
    with Checkpointer(directory / "async", keep=1) as checkpointer:
        for step in range(rounds + 2):
            start_s = time.perf_counter()
            pending = checkpointer.async_save(step, state)
            stall_s = time.perf_counter() - start_s
            pending.result()
            # Two places take turns, and each is made when it is first needed.
            taken["stall: first" if step < 1 else "stall: warm"].append(stall_s)
            taken["stall: copy in memory"].append(
                seconds(lambda: [copies[name].copy_(tensor) for name, tensor in state.items()])
            )
    shutil.rmtree(directory / "async")
    return taken


def small_stalls(directory: Path) -> list[float]:
    """The host's work in asynchronous saves of small tensors, when there is a plan and room."""
    state = dict(list(small_state().items())[:NUM_SMALL_STAGED])
    taken = []
    with Checkpointer(directory / "async", keep=1) as checkpointer:
        for step in range(10):
            start_s = time.thread_time()
            pending = checkpointer.async_save(step, state)
            taken.append(time.thread_time() - start_s)
            pending.result()
    shutil.rmtree(directory / "async")
    return taken[2:]


def load_alike(folder: str, num_elements: int, rounds: int) -> dict[str, list[float]]:
    """A rank's part: load what all ranks want, in both ways in turn; the slowest rank's time is everybody's."""
    state = {f"layer{number}": torch.zeros(num_elements // 16) for number in range(16)}
    taken: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, shares_reads in (("read for each other", True), ("read for itself", False)):
            if get_rank() == 0:
                forget(Path(folder))
            barrier()
            start_s = time.perf_counter()
            load(state, folder, shares_reads=shares_reads)
            barrier()
            taken.setdefault(f"{NUM_RANKS} ranks, replicated: {name}", []).append(time.perf_counter() - start_s)
    return taken


def shared_reads(directory: Path, state: State, rounds: int) -> dict[str, list[float]]:
    folder = directory / "alike"
    save(state, folder)
    num_elements = sum(tensor.numel() for tensor in state.values())
    with RankPool() as pool:
        arguments = {"folder": str(folder), "num_elements": num_elements, "rounds": rounds}
        taken: dict[str, list[float]] = pool.run(NUM_RANKS, load_alike, arguments)[0]
    shutil.rmtree(folder)
    return taken


class Counting(LocalStorage):
    """Counts the bytes of tensors that are read."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.mutex = threading.Lock()

    @contextmanager
    def open_file(self, path: Path) -> Iterator[Any]:
        with super().open_file(path) as file:
            yield _Counted(file, self) if path.suffix == ".safetensors" else file


class _Counted:
    def __init__(self, file: Any, counter: Counting) -> None:
        self._file, self._counter, self.num_bytes = file, counter, file.num_bytes

    def read_at(self, offset: int, buffer: memoryview) -> int:
        with self._counter.mutex:
            self._counter.num_bytes += len(buffer)
        return self._file.read_at(offset, buffer)


def read_ratio(directory: Path) -> float:
    """Bytes read by the rank that reads most, over those that it needs."""
    rows = 6 * 4096

    def body(is_saving: bool) -> float:
        mesh = init_device_mesh("cpu", (get_world_size(),))
        weight = distribute_tensor(torch.zeros(rows, 1024), mesh, [Shard(0)], src_data_rank=None)
        if is_saving:
            save({"w": weight}, directory / "resharded")
            return get_rank()
        counting = Counting()
        load({"w": weight}, directory / "resharded", storage=counting)
        return counting.num_bytes / weight.to_local().nbytes

    run_threads(4, body, True)
    return max(run_threads(3, body, False))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the disk that is measured; default: the temporary one")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(dir=arguments.directory))
    state, small = large_state(arguments.mib), small_state()
    memory = aligned_memory(arguments.mib << 20)
    for start in range(0, len(memory), PIECE_BYTES):
        memory[start : start + PIECE_BYTES] = os.urandom(1 << 20) * (PIECE_BYTES >> 20)
    taken: dict[str, list[float]] = {}
    try:
        for _ in range(arguments.rounds):
            for name, time_s in one_round(directory, state, memory, small).items():
                taken.setdefault(name, []).append(time_s)
        taken |= stalls(directory, state, arguments.rounds)
        taken[f"stall of {NUM_SMALL_STAGED} small tensors, CPU: {OURS}"] = small_stalls(directory)
        taken |= shared_reads(directory, state, arguments.rounds)
        ratio = read_ratio(directory)
    finally:
        shutil.rmtree(directory)
    by_case: dict[str, dict[str, list[float]]] = {}
    for name, times_s in taken.items():
        case, _, side = name.rpartition(": ")
        by_case.setdefault(case, {})[side] = times_s
    rows = [row(case, "s", sides) for case, sides in by_case.items()]
    rows.append(row("bytes read over bytes needed, from 4 ranks to 3", "ratio", {OURS: [ratio]}))
    finish(rows, arguments.json)


if __name__ == "__main__":
    main()
