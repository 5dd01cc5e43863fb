"""Checkpoints on real ranks: saved by any number of them, loaded by any other, on any mesh, bit by bit."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from disttrain import get_rank, get_world_size, init_device_mesh
from disttrain.checkpoint import (
    Checkpointer,
    LocalStorage,
    RngState,
    load,
    rng_state,
    save,
    set_training_state,
    training_state,
)
from disttrain.checkpoint.loading import spreading
from disttrain.checkpoint.storage.base import ReadableFile
from disttrain.dtensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from disttrain.errors import CheckpointCorruptError, CheckpointError
from disttrain.fsdp2 import fully_shard
from disttrain.process_group import World
from disttrain.testing import RankPool

SHAPES = [(), (0, 3), (1,), (7,), (5, 3), (2, 9, 4), (13, 1)]
DTYPES = [torch.bfloat16, torch.bool, torch.float32, torch.int64]


def whole(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The same values on every rank and in every run."""
    generator = torch.Generator().manual_seed(len(shape) * 100 + sum(shape))
    return torch.randint(0, 2 if dtype == torch.bool else 200, shape, generator=generator).to(dtype)


def placements_for(dice: random.Random, num_axes: int, num_dims: int) -> list[Placement]:
    options: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(num_dims))]
    return [dice.choice(options) for _ in range(num_axes)]


def sharded_state(seed: int, *, filled: bool) -> dict[str, Any]:
    """Tensors that lie at random, alike on all ranks, on a mesh of one or two axes; and plain ones and values."""
    dice = random.Random(seed)
    size = get_world_size()
    mesh = init_device_mesh("cpu", dice.choice([(size,), (2, size // 2)] if size % 2 == 0 else [(size,), (1, size)]))
    state: dict[str, Any] = {"step": 42 if filled else 0, "plain": torch.full((5,), 3.0 if filled else 0.0)}
    for shape in SHAPES:
        for dtype in DTYPES:
            values = whole(shape, dtype) if filled else torch.zeros(shape, dtype=dtype)
            tensor = distribute_tensor(values, mesh, placements_for(dice, mesh.ndim, len(shape)), src_data_rank=None)
            state[f"{dtype}{list(shape)}"] = tensor
    return state


def save_sharded(path: str, seed: int) -> None:
    save(sharded_state(seed, filled=True), path)


def load_sharded(path: str, seed: int) -> None:
    state = sharded_state(seed, filled=False)
    load(state, path)
    assert (state["step"], state["plain"].tolist()) == (42, [3.0] * 5)
    for shape in SHAPES:
        for dtype in DTYPES:
            assert torch.equal(state[f"{dtype}{list(shape)}"].full_tensor(), whole(shape, dtype)), (shape, dtype)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(3))
def test_any_mesh_loads_what_any_mesh_saved(rank_pool: RankPool, tmp_path: Path, seed: int) -> None:
    """4 -> 2 -> 3 -> 1 -> 4 ranks, each with placements of its own."""
    for number, (num_saving, num_loading) in enumerate([(4, 2), (2, 3), (3, 1), (1, 4), (4, 4)]):
        path = str(tmp_path / f"save{number}")
        rank_pool.run(num_saving, save_sharded, {"path": path, "seed": 10 * seed + number})
        rank_pool.run(num_loading, load_sharded, {"path": path, "seed": 10 * seed + number + 1})


class CountedFile:
    def __init__(self, file: ReadableFile, counter: Counting) -> None:
        self.file = file
        self.counter = counter
        self.num_bytes = file.num_bytes

    def read_at(self, offset: int, buffer: memoryview) -> int:
        with self.counter.mutex:
            self.counter.num_bytes += len(buffer)
        return self.file.read_at(offset, buffer)


class Counting(LocalStorage):
    """Counts the bytes that are read, but for the manifest's."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.mutex = threading.Lock()

    @contextmanager
    def open_file(self, path: Path) -> Iterator[ReadableFile]:
        with super().open_file(path) as file:
            yield file if path.suffix == ".json" else CountedFile(file, self)


def save_large(path: str) -> None:
    mesh = init_device_mesh("cpu", (get_world_size(),))
    rows = torch.arange(6 * 4096, dtype=torch.float32).view(-1, 1).expand(-1, 1024)
    save({"w": distribute_tensor(rows, mesh, [Shard(0)], src_data_rank=None)}, path)


def load_large(path: str) -> int:
    mesh = init_device_mesh("cpu", (get_world_size(),))
    weight = distribute_tensor(torch.zeros(6 * 4096, 1024), mesh, [Shard(0)], src_data_rank=None)
    storage = Counting()
    load({"w": weight}, path, storage=storage)
    local = weight.to_local()
    assert local[:, 0].equal(torch.arange(len(local)) + get_rank() * float(len(local)))
    assert local[:, -1].equal(local[:, 0])
    return storage.num_bytes


def test_each_rank_reads_only_what_it_needs(rank_pool: RankPool, tmp_path: Path) -> None:
    """96 MiB by 4 ranks, loaded by 3: 32 MiB each, in whole blocks of 1 MiB."""
    path = str(tmp_path / "save")
    rank_pool.run(4, save_large, {"path": path})
    needed_bytes = 32 << 20
    for num_bytes in rank_pool.run(3, load_large, {"path": path}):
        assert needed_bytes <= num_bytes <= 1.1 * needed_bytes


def replicated_state(value: float) -> dict[str, torch.Tensor]:
    """24 MiB on all ranks, and 24 MiB in halves, each on two of four ranks."""
    mesh = init_device_mesh("cpu", (2, get_world_size() // 2))
    halves = torch.full((6, 1 << 20), value)
    return {
        "plain": torch.full((6 << 20,), value),
        "halves": distribute_tensor(halves, mesh, [Replicate(), Shard(0)], src_data_rank=None),
    }


def save_replicated(path: str) -> None:
    save(replicated_state(7.0), path)


def load_replicated(path: str, shares_reads: bool) -> int:
    state, storage = replicated_state(0.0), Counting()
    load(state, path, storage=storage, shares_reads=shares_reads)
    assert all(tensor.eq(7).all() for tensor in (state["plain"], state["halves"].to_local()))
    return storage.num_bytes


def test_what_all_ranks_want_is_read_once(rank_pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "save")
    rank_pool.run(4, save_replicated, {"path": path})
    shared = rank_pool.run(4, load_replicated, {"path": path, "shares_reads": True})
    assert 48 << 20 <= sum(shared) <= 1.01 * (48 << 20)
    assert max(shared) <= 1.3 * (12 << 20)
    each = rank_pool.run(4, load_replicated, {"path": path, "shares_reads": False})
    assert all(36 << 20 <= num_bytes <= 1.01 * (36 << 20) for num_bytes in each)


def fail_to_share(path: str, victim: int, what: str) -> str:
    """One rank lacks memory, a group, a thread or a copy. Returns what is raised."""
    state = replicated_state(0.0)
    with pytest.MonkeyPatch.context() as patch:
        if get_rank() == victim:

            def refuse(*_args: Any, **_kwargs: Any) -> Any:
                raise RuntimeError(f"no {what} here")

            owner, name = {
                "memory": (spreading, "aligned_memory"),
                "group": (World, "shared_group"),
                "thread": (ThreadPoolExecutor, "submit"),
                "copy": (spreading, "scatter"),
            }[what]
            patch.setattr(owner, name, refuse)
        with pytest.raises(CheckpointError) as raised:
            load(state, path)
    load(state, path)
    assert state["plain"].eq(7).all()
    return raised.value.problem


@pytest.mark.sweep(2)
@pytest.mark.parametrize("what", ["memory", "group", "thread", "copy"])
def test_a_rank_that_cannot_take_part_fails_the_load_and_keeps_nobody_waiting(
    rank_pool: RankPool, tmp_path: Path, what: str
) -> None:
    path = str(tmp_path / "save")
    rank_pool.run(4, save_replicated, {"path": path})
    problems = rank_pool.run(4, fail_to_share, {"path": path, "victim": 1, "what": what})
    assert problems == [f"on rank 1: RuntimeError: no {what} here."] * 4


class Model(nn.Module):
    """Sizes that 2, 3 and 4 ranks divide unevenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 7)
        self.second = nn.Linear(7, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def sharded_model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)  # every rank the same, so that ranks may come and go
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All parameters and moments, whole."""
    found = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = value.full_tensor() if isinstance(value, DTensor) else value
    return {name: tensor.detach() for name, tensor in found.items()}


def save_training(directory: str) -> dict[str, torch.Tensor]:
    """Save after 3 steps, go on to 5."""
    model, optimizer = sharded_model(0)
    train(model, optimizer, range(3))
    Checkpointer(directory).save(3, training_state(model, optimizer))
    train(model, optimizer, range(3, 5))
    return everything(model, optimizer)


def resume_training(directory: str) -> dict[str, torch.Tensor]:
    """Load into a fresh optimizer, go on to 5."""
    model, optimizer = sharded_model(1)
    state = training_state(model, optimizer)
    assert Checkpointer(directory).load(state) == 3
    set_training_state(model, optimizer, state)
    train(model, optimizer, range(3, 5))
    return everything(model, optimizer)


@pytest.mark.parametrize("num_resuming", [4, 3, 1])
def test_adamw_goes_on_bit_by_bit(rank_pool: RankPool, tmp_path: Path, num_resuming: int) -> None:
    """On as many ranks: the very same bits. On others, gradients are averaged over other numbers of equal terms."""
    undisturbed = rank_pool.run(4, save_training, {"directory": str(tmp_path)})[0]
    for resumed in rank_pool.run(num_resuming, resume_training, {"directory": str(tmp_path)}):
        assert set(resumed) == set(undisturbed)
        for name, tensor in undisturbed.items():
            if num_resuming == 4:
                assert resumed[name].equal(tensor), name
            else:
                torch.testing.assert_close(resumed[name], tensor)


def save_generators(path: str) -> float:
    torch.manual_seed(get_rank())
    np.random.seed(get_rank())
    save({"rng": RngState()}, path)
    return float(torch.rand(()))


def load_generators(path: str) -> float:
    load({"rng": RngState()}, path)
    assert rng_state()["generators"].rank == get_rank()
    return float(torch.rand(()))


def test_each_rank_has_its_own_generators(rank_pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "save")
    drawn = rank_pool.run(2, save_generators, {"path": path})
    assert rank_pool.run(2, load_generators, {"path": path}) == drawn
    more = rank_pool.run(4, load_generators, {"path": path})
    assert more[:2] == drawn
    assert len(set(more)) == 4
    assert rank_pool.run(4, load_generators, {"path": path}) == more


class FullOnOneRank(LocalStorage):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def write_file(self, path: Path, parts: Iterable[memoryview]) -> None:
        if get_rank() == self.rank and path.suffix == ".safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        super().write_file(path, parts)


def fail_on_one_rank(directory: str, failing_rank: int) -> tuple[str, int | None]:
    good = Checkpointer(directory)
    good.save(1, {"w": torch.ones(100), "v": torch.ones(100)})
    state = sharded_state(0, filled=True)
    try:
        Checkpointer(directory, storage=FullOnOneRank(failing_rank)).save(2, state)
    except CheckpointError as error:
        return error.problem, good.latest()
    return "", good.latest()


@pytest.mark.parametrize("failing_rank", [0, 2])
def test_a_full_disk_on_one_rank_is_everybodys_error(rank_pool: RankPool, tmp_path: Path, failing_rank: int) -> None:
    arguments = {"directory": str(tmp_path), "failing_rank": failing_rank}
    found = rank_pool.run(3, fail_on_one_rank, arguments, timeout_s=100.0)
    assert found == [found[0]] * 3
    assert found[0][0].startswith(f"on rank {failing_rank}: OSError: [Errno 28] No space left on device")
    assert found[0][1] == 1
    assert [name for name in os.listdir(tmp_path) if not name.startswith(".claim-")] == ["step-00000001"]


def load_damaged(path: str) -> tuple[str, str]:
    try:
        load(sharded_state(0, filled=False), path)
    except CheckpointCorruptError as error:
        return error.problem, type(error.__cause__).__name__
    return "", ""


def test_a_flip_that_one_rank_sees_is_everybodys_error(rank_pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "save"
    rank_pool.run(3, save_sharded, {"path": str(path), "seed": 0})
    for file in sorted(path.glob("*.safetensors")):
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
        found = rank_pool.run(3, load_damaged, {"path": str(path)}, timeout_s=100.0)
        assert len({problem for problem, _ in found}) == 1
        assert f"{file} does not have the bytes of" in found[0][0]
        raw[-1] ^= 1
        file.write_bytes(raw)


class Broken(LocalStorage):
    """Fails on one rank, at each read of much."""

    @contextmanager
    def open_file(self, path: Path) -> Iterator[ReadableFile]:
        with super().open_file(path) as file:
            yield BrokenFile(file) if path.suffix == ".safetensors" and get_rank() == 1 else file


class BrokenFile:
    def __init__(self, file: ReadableFile) -> None:
        self.file = file
        self.num_bytes = file.num_bytes

    def read_at(self, offset: int, buffer: memoryview) -> int:
        if len(buffer) > 1 << 20:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self.file.read_at(offset, buffer)


def load_broken(path: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(replicated_state(0.0), path, storage=Broken())
    state = replicated_state(0.0)
    load(state, path)
    assert state["plain"].eq(7).all()
    return caught.value.problem


def test_who_fails_to_read_for_others_keeps_nobody_waiting(rank_pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "save")
    rank_pool.run(4, save_replicated, {"path": path})
    found = rank_pool.run(4, load_broken, {"path": path}, timeout_s=100.0)
    assert len(set(found)) == 1
    assert found[0].startswith(f"on rank 1: {path}/rank-0000")
    assert found[0].endswith("cannot be read: [Errno 5] Input/output error.")
