"""The second set: kinds that the first has, in other models, on other layouts, with faults at other points.

It was made when the analyzer was already what it is, and judged before anything was mended: docs/flight_verdicts.md.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import tempfile
import threading
import time

import torch
import torch.nn.functional as F
from torch import nn

import disttrain
from disttrain import tp
from disttrain.dtensor import Replicate, Shard, distribute_tensor
from disttrain.flight_recorder.analysis.verdict import Cause, Kind
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard
from disttrain.pipelining import PipelineStage, make_schedule
from disttrain.pipelining.runtime.schedule_runtime import PipelineSchedule
from tests.flight_corpus.case import Cases, labelled
from tests.flight_corpus.steps import group_of, train
from tests.flight_corpus.tensors import device, ones
from tests.flight_corpus.training import DIM, Hook, Layer

CASES: Cases = []
FOREVER_S = 1000


class Block(nn.Module):
    """A gated feed-forward part with a norm; calls `hook` with the number of its pass."""

    def __init__(self, hook: Hook | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.gate, self.down = nn.Linear(DIM, 32), nn.Linear(DIM, 32), nn.Linear(32, DIM)
        self._hook, self._num_passes = hook, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._num_passes += 1
        if self._hook is not None:
            self._hook(self._num_passes)
        x = self.norm(x)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def tensor_parallel(num_steps: int, hook: Hook | None = None, before_step: Hook | None = None) -> None:
    """Two blocks, cut along `tp`, their parameters sharded along `dp`, on a mesh of 2 x 2."""
    torch.manual_seed(1)
    mesh = disttrain.init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(Block(), Block(hook)).to(device())
    for block in model:
        plan = {"up": tp.ColwiseParallel(), "gate": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
        tp.parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(num_steps):
        if before_step is not None:
            before_step(number)
        model(ones(4, DIM)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded_pipeline(rank: int, num_steps: int, hook: Hook | None = None) -> None:
    """Two stages of two ranks each, which share their stage's parameters."""
    mesh = disttrain.init_device_mesh(device().type, (2, 2), mesh_dim_names=("pp", "dp"))
    place = mesh["pp"].get_local_rank()
    layer = fully_shard(Layer(hook).to(device()), mesh=mesh["dp"])
    stage = PipelineStage(layer, place, 2, device(), group=mesh["pp"].get_group())
    runner = PipelineSchedule(stage, make_schedule("1F1B", 2, 4, 1), F.mse_loss)
    for _ in range(num_steps):
        runner.step(*([ones(8, DIM)] if place == 0 else []), target=0 * ones(8, DIM))
        disttrain.all_reduce(ones(1))


@labelled(CASES, Kind.RANK_ABSENT, 3, cause=Cause.IN_PYTHON, num_ranks=4, says="augment")
def block_sleeps(rank: int) -> None:
    def augment(num_passes: int) -> None:
        if rank == 3 and num_passes == 3:
            time.sleep(FOREVER_S)

    tensor_parallel(5, augment)


@labelled(CASES, Kind.RANK_ABSENT, 2, cause=Cause.RAISED, num_ranks=4, says="OverflowError")
def batch_raises_on_a_mesh(rank: int) -> None:
    def load(number: int) -> None:
        if rank == 2 and number == 3:
            raise OverflowError("sample 1812")

    tensor_parallel(6, before_step=load)


@labelled(CASES, Kind.RANK_ABSENT, 2, cause=Cause.STOPPED, num_ranks=4)
def stage_of_four_stopped_in_backward(rank: int) -> None:
    def stop(_grad: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    layer = Layer().to(device())
    if rank == 2:
        layer.linear.weight.register_hook(stop)
    stage = PipelineStage(layer, rank, 4, device())
    runner = PipelineSchedule(stage, make_schedule("GPipe", 4, 4, 1), F.mse_loss)
    runner.step(*([ones(8, DIM)] if rank == 0 else []), target=0 * ones(8, DIM))


@labelled(CASES, Kind.RANK_ABSENT, 1, cause=Cause.DEAD, num_ranks=4)
def killed_in_a_sharded_pipeline(rank: int) -> None:
    def die(num_passes: int) -> None:
        if rank == 1 and num_passes == 7:
            os.kill(os.getpid(), signal.SIGKILL)

    sharded_pipeline(rank, 4, die)


@labelled(CASES, Kind.RANK_ABSENT, 3, cause=Cause.ENDED, num_ranks=4)
def one_batch_less(rank: int) -> None:
    """Copies of shards: a mesh of two axes for one model."""
    mesh = disttrain.init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(Block(), Block()).to(device())
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(4 if rank == 3 else 5):
        model(ones(2, DIM)).sum().backward()


@labelled(CASES, Kind.MISMATCHED_OPERATION, 2, num_ranks=4, says="one_rank_prints")
def one_rank_prints_a_parameter(rank: int) -> None:
    mesh = disttrain.init_device_mesh(device().type, (4,), mesh_dim_names=("dp",))
    weight = distribute_tensor(ones(16, 4), mesh, [Shard(0)])
    bias = distribute_tensor(ones(4), mesh, [Replicate()])
    for number in range(5):
        total = (weight * 2 + bias).sum().full_tensor()
        if rank == 2 and number == 3:
            print(weight.full_tensor(), total)
        train(1, mesh.get_group())


@labelled(CASES, Kind.MISMATCHED_SIZES, 1, num_ranks=4)
def one_rank_clips(rank: int) -> None:
    """A norm beyond a limit, which only one rank has."""
    for number in range(6):
        gradient = ones(64) * (number if rank == 1 else 1)
        if gradient.sum() > 200:
            disttrain.all_reduce(gradient.square().sum())
        disttrain.all_reduce(gradient)


@labelled(CASES, Kind.MISMATCHED_ROOT, 3, num_ranks=4)
def another_source_of_objects(rank: int) -> None:
    for number in range(4):
        config = [{"step": number}]
        disttrain.broadcast_object_list(config, src=3 if rank == 3 and number == 2 else 0)
    disttrain.barrier()


@labelled(CASES, Kind.MISMATCHED_OPERATION, 2, num_ranks=4)
def expert_without_tokens(rank: int) -> None:
    """It leaves out the exchange, since it has nothing to give."""
    for number in range(4):
        if not (rank == 2 and number == 2):
            disttrain.all_to_all_single(ones(8), ones(8))
        disttrain.all_gather_into_tensor(ones(16), ones(4))


@labelled(CASES, Kind.RANK_ABSENT, 0, cause=Cause.IN_PYTHON, num_ranks=4, says="evaluate")
def first_rank_evaluates(rank: int) -> None:
    def evaluate() -> None:
        end_s = time.monotonic() + FOREVER_S
        while time.monotonic() < end_s:
            torch.linalg.svd(torch.rand(48, 48))

    train(10)
    if rank == 0:
        evaluate()
    disttrain.barrier()


@labelled(CASES, Kind.RANK_ABSENT, 1, cause=Cause.IN_IO, num_ranks=4, says="save")
def save_to_a_pipe_without_a_reader(rank: int) -> None:
    def save() -> None:
        with tempfile.TemporaryDirectory() as folder:
            pipe = f"{folder}/pipe"
            os.mkfifo(pipe)
            with open(pipe, "wb") as stream:
                stream.write(b"weights")

    train(5)
    if rank == 1:
        save()
    train(5)


@labelled(CASES, Kind.MISMATCHED_DTYPE, 3, num_ranks=4)
def one_rank_computes_in_bfloat16(rank: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if rank == 3 else torch.float16)
    model = fully_shard(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM)), mp_policy=policy)
    for _ in range(3):
        model(ones(2, DIM)).float().sum().backward()


@labelled(CASES, Kind.MISSING_RECEIVE, 2, num_ranks=4)
def halo_without_a_neighbour(rank: int) -> None:
    """Rank 2 takes itself for the last one."""
    for number in range(3):
        if rank < 3:
            disttrain.send(ones(1 << 20), rank + 1)
        if rank > 0 and not (rank == 2 and number == 1):
            disttrain.recv(ones(1 << 20), rank - 1)
    disttrain.barrier()


@labelled(CASES, Kind.DIFFERENT_GROUPS, 3, num_ranks=4)
def groups_of_another_stride(rank: int) -> None:
    """Columns of a grid, but for a rank that takes its row."""
    train(3)
    pair = group_of(2, 3) if rank == 3 else group_of(rank % 2, rank % 2 + 2)
    train(2, pair)
    disttrain.barrier()


@labelled(CASES, Kind.RANK_ABSENT, 2, cause=Cause.HOLDS_LOCK, num_ranks=4, says="parse")
def expression_that_backtracks_in_a_mesh(rank: int) -> None:
    def parse(number: int) -> None:
        if rank == 2 and number == 2:
            re.fullmatch(r"(\w+\s?)*:", "word " * 30)

    tensor_parallel(4, before_step=parse)


@labelled(CASES, Kind.RANK_ABSENT, 0, cause=Cause.IN_PYTHON, num_ranks=4, says="next_batch")
def loader_thread_that_died(rank: int) -> None:
    batches: queue.Queue[int] = queue.Queue(2)

    def load() -> None:
        for number in range(4):
            batches.put(number)

    def next_batch() -> int:
        return batches.get()

    if rank == 0:
        threading.Thread(target=load, daemon=True).start()
    for _ in range(8):
        if rank == 0:
            next_batch()
        train(1)


@labelled(CASES, Kind.STRAGGLER, 2, num_ranks=4)
def slow_every_second_step_of_a_mesh(rank: int) -> None:
    def load(number: int) -> None:
        if rank == 2 and number % 2:
            time.sleep(0.5)

    tensor_parallel(12, before_step=load)


@labelled(CASES, Kind.STRAGGLER, 1, num_ranks=4)
def slow_stage(rank: int) -> None:
    def work(_num_passes: int) -> None:
        if rank == 1:
            time.sleep(0.2)

    stage = PipelineStage(Layer(work).to(device()), rank, 4, device())
    runner = PipelineSchedule(stage, make_schedule("1F1B", 4, 4, 1), F.mse_loss)
    for _ in range(5):
        runner.step(*([ones(8, DIM)] if rank == 0 else []), target=0 * ones(8, DIM))


@labelled(CASES, Kind.NOTHING_WRONG, num_ranks=4)
def blocks_on_a_mesh(_rank: int) -> None:
    tensor_parallel(6)


@labelled(CASES, Kind.NOTHING_WRONG, num_ranks=4)
def sharded_stages(rank: int) -> None:
    sharded_pipeline(rank, 4)


@labelled(CASES, Kind.NOTHING_WRONG, num_ranks=4, is_signalled=True)
def signalled_while_one_saves(rank: int) -> None:
    """Rank 0 takes a moment at each tenth step, as for a save."""
    for number in range(60):
        time.sleep(0.1)
        if rank == 0 and number % 10 == 9:
            time.sleep(0.3)
        train(1)
