"""Asynchronous saves beside training on GPUs, against torch.distributed.checkpoint's with pinned staging, in one run.

    disttrain-launch --standalone --nproc-per-node gpu benchmarks/checkpoint_gpu.py --directory DIR --out results.json

A model under `fully_shard` whose parameters and moments take `--gib` of each rank. "stall": how long the call keeps the
host, of the first save and of later ones, and for torch also how long the host then waits until the optimizer may step
(ours waits on the GPU). "beside": a step while a save is under way, over one without. "commit": from the call to the
whole save. "synchronous": `save`, in turns with plain writes of the same bytes. The slowest rank's figures; torch saves
each rank's local tensors under names of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.distributed.checkpoint as torch_checkpoint
from harness import flags_of, keep
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import disttrain
from disttrain.checkpoint import Checkpointer, training_state
from disttrain.dtensor import DTensor
from disttrain.fsdp2 import fully_shard

WIDTH = 4096
LAYERS_PER_BLOCK = 4
BYTES_PER_PARAMETER = 12
PIECE_BYTES = 16 << 20
NUM_WRITERS = 4


def build(gib: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    per_block = LAYERS_PER_BLOCK * WIDTH * WIDTH
    num_blocks = max(1, round(gib * (1 << 30) * disttrain.get_world_size() / BYTES_PER_PARAMETER / per_block))
    blocks = []
    for _ in range(num_blocks):
        with torch.device(disttrain.current_world().device):
            layers = [
                layer for _ in range(LAYERS_PER_BLOCK) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU())
            ]
        blocks.append(fully_shard(nn.Sequential(*layers)))
    model = fully_shard(nn.Sequential(*blocks))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


class Training:
    """Steps, timed one by one."""

    def __init__(self, gib: float, batch: int) -> None:
        self.model, self.optimizer = build(gib)
        self.rows = torch.randn(batch, WIDTH, device=disttrain.current_world().device)

    def step(self, before_optimizer: Callable[[], Any] = lambda: None) -> float:
        """Milliseconds, the GPU's work included."""
        start_s = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.rows).square().mean().backward()
        before_optimizer()
        self.optimizer.step()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start_s)

    def local_state(self) -> dict[str, torch.Tensor]:
        """This rank's tensors under names that no other rank has."""
        state = training_state(self.model, self.optimizer)
        found = dict(state["model"])
        for name, entry in state["optimizer"].items():
            found |= {f"{name}/{key}": value for key, value in entry["state"].items()}
        own = f"rank{disttrain.get_rank()}"
        return {
            f"{own}/{name}": (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
            for name, tensor in found.items()
        }


def slowest(value: float) -> float:
    """The largest of all ranks' values."""
    worst = torch.tensor(value, device=disttrain.current_world().device)
    disttrain.all_reduce(worst, disttrain.ReduceOp.MAX)
    return float(worst)


def everywhere(is_done: bool) -> bool:
    """Whether all ranks' saves have ended."""
    return slowest(0.0 if is_done else 1.0) == 0


class Side:
    """One way to save: how to begin, what the optimizer must wait for on the host, and how to know that it is over."""

    def begin(self, training: Training, step: int) -> None:
        raise NotImplementedError

    def staged(self) -> None:
        raise NotImplementedError

    def is_over(self) -> bool:
        raise NotImplementedError


class Ours(Side):
    def __init__(self, directory: Path) -> None:
        self.checkpointer = Checkpointer(directory / "ours", keep=1)
        self.pending: Any = None

    def begin(self, training: Training, step: int) -> None:
        state = training_state(training.model, training.optimizer)
        self.pending = self.checkpointer.async_save(step, state, training.optimizer)

    def staged(self) -> None:
        """The optimizer's stream waits, not the host."""

    def is_over(self) -> bool:
        return bool(self.pending.done())


class Torchs(Side):
    def __init__(self, directory: Path) -> None:
        self.directory = directory / "torch"
        self.stager = DefaultStager(StagingOptions())
        self.response: Any = None

    def begin(self, training: Training, step: int) -> None:
        shutil.rmtree(self.directory / f"{step - 1}", ignore_errors=True)
        self.response = torch_checkpoint.async_save(
            training.local_state(),
            storage_writer=torch_checkpoint.FileSystemWriter(self.directory / f"{step}", thread_count=NUM_WRITERS),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self.stager,
        )

    def staged(self) -> None:
        self.response.staging_completion.result()

    def is_over(self) -> bool:
        is_over = bool(self.response.upload_completion.done())
        if is_over:
            # A save that has failed is no fast one.
            self.response.upload_completion.result()
        return is_over


def measure_save(training: Training, side: Side, number: int) -> dict[str, Any]:
    """Begin a save, and step until it is over on all ranks."""
    disttrain.barrier()
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    side.begin(training, number)
    stall_s = time.perf_counter() - start_s
    waited = []

    def wait() -> None:
        begin_s = time.perf_counter()
        side.staged()
        waited.append(time.perf_counter() - begin_s)

    steps_ms = [training.step(wait)]
    while not everywhere(side.is_over()):
        steps_ms.append(training.step())
    return {
        "stall_s": slowest(stall_s),
        "host_waits_before_optimizer_s": slowest(waited[0]),
        "first_step_ms": slowest(steps_ms[0]),
        "beside_ms": slowest(statistics.median(steps_ms)),
        "commit_s": slowest(time.perf_counter() - start_s),
        "num_steps_beside": len(steps_ms),
    }


def plain_write_s(folder: Path, num_bytes: int) -> float:
    """The same number of bytes from the host's memory, by several threads, with O_DIRECT and fsync; slowest rank."""
    folder.mkdir(parents=True, exist_ok=True)
    piece = torch.empty(PIECE_BYTES + PIECE_BYTES, dtype=torch.uint8, pin_memory=True).fill_(7)
    shift = -piece.data_ptr() % 4096
    data = memoryview(piece[shift : shift + PIECE_BYTES].numpy().data)
    disttrain.barrier()
    start_s = time.perf_counter()

    def write(number: int) -> None:
        path = folder / f"plain-{disttrain.get_rank()}-{number}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        for _ in range(num_bytes // NUM_WRITERS // PIECE_BYTES):
            os.write(descriptor, data)
        os.fsync(descriptor)
        os.close(descriptor)

    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        list(pool.map(write, range(NUM_WRITERS)))
    taken_s = slowest(time.perf_counter() - start_s)
    for number in range(NUM_WRITERS):
        (folder / f"plain-{disttrain.get_rank()}-{number}").unlink()
    return taken_s


def synchronous_save_s(training: Training, side: Ours, step: int) -> float:
    disttrain.barrier()
    start_s = time.perf_counter()
    side.checkpointer.save(step, training_state(training.model, training.optimizer))
    return slowest(time.perf_counter() - start_s)


def tell(text: str) -> None:
    if disttrain.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=7.8)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--synchronous", type=int, default=3, help="synchronous saves and plain writes, in turns")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--sides", nargs="+", default=["disttrain", "torch"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    disttrain.init_process_group()
    training = Training(args.gib, args.batch)
    for _ in range(3):
        training.step()
    num_bytes = sum(tensor.nbytes for tensor in training.local_state().values())
    report: dict[str, Any] = {
        "torch_version": torch.__version__,
        "gpus": f"{disttrain.get_world_size()} x {torch.cuda.get_device_name()}",
        "arguments": flags_of(args),
        "gib_per_rank": num_bytes / (1 << 30),
    }
    makers: dict[str, Callable[[Path], Side]] = {"disttrain": Ours, "torch": Torchs}
    if "torch" in args.sides:
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    for name in args.sides:
        alone_ms = slowest(statistics.median(training.step() for _ in range(20)))
        side = makers[name](args.directory)
        saves = []
        for number in range(args.saves):
            saves.append(measure_save(training, side, number))
            tell(f"{name}: committed after {saves[-1]['commit_s']:.2f} s")
        warm = saves[2:]  # two places take turns, and each is made when it is first needed
        report[name] = {
            "step_alone_ms": alone_ms,
            "first_stall_s": saves[0]["stall_s"] + saves[0]["host_waits_before_optimizer_s"],
            "warm_stall_s": statistics.median(s["stall_s"] + s["host_waits_before_optimizer_s"] for s in warm),
            "beside": statistics.median(s["beside_ms"] for s in warm) / alone_ms,
            "commit_s": statistics.median(s["commit_s"] for s in warm),
            "saves": saves,
        }
        if isinstance(side, Ours):
            side.checkpointer.close()
            plain_s, synchronous_s = [], []
            for number in range(args.synchronous):
                plain_s.append(plain_write_s(args.directory, num_bytes))
                synchronous_s.append(synchronous_save_s(training, side, args.saves + number))
                tell(f"plain {plain_s[-1]:.2f} s, synchronous {synchronous_s[-1]:.2f} s")
            report["plain_write_s"] = statistics.median(plain_s)
            report[name]["synchronous_s"] = statistics.median(synchronous_s)
        disttrain.barrier()
        shutil.rmtree(args.directory, ignore_errors=True)
    if disttrain.get_rank() == 0:
        tell(json.dumps(report, indent=1))
        if args.out:
            keep(report, args.out)
    if "torch" in args.sides:
        torch.distributed.destroy_process_group()
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
