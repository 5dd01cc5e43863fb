"""Beside torch.distributed: what is written for it works on our transports, and its jobs become ours."""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import disttrain
from disttrain.errors import BackendError, GroupError
from disttrain.store import PrefixStore, Store
from disttrain.testing.pytest_plugin import on_ranks


def registered(name: str = "registered", **arguments: Any) -> tuple[Store, int, int]:
    """Leave the pool's world and join one that torch knows too."""
    world = disttrain.current_world()
    store, rank, size = world.store.clone(), world.rank, world.world_size
    disttrain.destroy_process_group()
    disttrain.init_process_group(
        store=PrefixStore(name, store), rank=rank, world_size=size, timeout=30, register_with_torch=True, **arguments
    )
    return store, rank, size


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def data() -> torch.Tensor:
    return torch.randn(24, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@on_ranks(2, 3)
def test_ddp_trains_as_one_process_does() -> None:
    _, rank, size = registered()
    alone, wrapped = model(), DistributedDataParallel(model())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (alone, wrapped)]
    for batch in data().chunk(4):
        for each, part, optimizer in zip((alone, wrapped), (batch, batch.chunk(size)[rank]), optimizers, strict=True):
            optimizer.zero_grad()
            each(part).square().mean().backward()
            optimizer.step()
    for ours, expected in zip(wrapped.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)


@on_ranks(2)
def test_both_apis_share_one_group() -> None:
    store, rank, size = registered()
    assert dist.is_initialized()
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, size, "gloo")
    gc.collect()  # C++ holds the store's other half; ours must live as long
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    disttrain.all_reduce(tensor)
    assert tensor.item() == 6.0
    assert disttrain.current_world().default_group.to_torch() is dist.group.WORLD
    assert disttrain.from_torch() is disttrain.current_world().default_group
    # torch makes groups of its own over our store.
    made = dist.new_group([1, 0])
    gathered = [torch.empty(1) for _ in range(size)]
    dist.all_gather(gathered, torch.tensor([float(rank)]), group=made)
    assert sorted(value.item() for value in gathered) == [0.0, 1.0]
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    disttrain.destroy_process_group()
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="has not been initialized"):
        dist.get_rank()
    # And once more: nothing is left of the first.
    disttrain.init_process_group(
        store=PrefixStore("again", store), rank=rank, world_size=size, timeout=30, register_with_torch=True
    )
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size
    # torch may also let go first.
    dist.destroy_process_group()
    disttrain.destroy_process_group()
    assert not disttrain.is_initialized()


@on_ranks(3)
def test_a_part_of_the_world_as_torchs_group() -> None:
    _, rank, _ = registered()
    pair = disttrain.new_group([2, 0], sort_ranks=False)
    if isinstance(pair, disttrain.ProcessGroup):
        torchs = pair.to_torch()
        assert (dist.get_rank(torchs), dist.get_world_size(torchs)) == ([2, 0].index(rank), 2)
        assert dist.get_process_group_ranks(torchs) == [2, 0]
        tensor = torch.tensor([float(rank)])
        dist.broadcast(tensor, src=2, group=torchs)
        assert tensor.item() == 2.0
        assert disttrain.from_torch(torchs) is pair
        disttrain.destroy_process_group(pair)
        with pytest.raises(ValueError, match="is not initialized"):
            dist.get_backend(torchs)
    disttrain.barrier()
    dist.barrier()


@on_ranks(2)
def test_distributed_sampler_gives_each_rank_its_part() -> None:
    _, rank, size = registered()
    dataset = TensorDataset(torch.arange(10))
    loader = DataLoader(dataset, batch_size=5, sampler=DistributedSampler(dataset, shuffle=False))
    assert [batch.tolist() for (batch,) in loader] == [list(range(rank, 10, size))]


@on_ranks(2)
def test_torchs_own_dtensor_sees_the_world() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    _, rank, size = registered()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(8.0).view(4, 2)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(sharded.to_local(), whole.chunk(size)[rank])
    assert sharded.sum().full_tensor().item() == 28.0


def sharded_by_torch() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    made = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(made[0], mesh=mesh)  # type: ignore[index]
    fully_shard(made, mesh=mesh)
    return made


@on_ranks(2)
def test_torchs_own_fsdp_trains_as_one_process_does() -> None:
    _, rank, size = registered()
    alone, sharded = model(), sharded_by_torch()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (alone, sharded)]
    for batch in data().chunk(4):
        for each, part, optimizer in zip((alone, sharded), (batch, batch.chunk(size)[rank]), optimizers, strict=True):
            optimizer.zero_grad()
            each(part).square().mean().backward()
            optimizer.step()
    for ours, expected in zip(sharded.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor().detach(), expected.detach())  # type: ignore[operator]


@on_ranks(2)
def test_torchs_own_checkpoints_are_saved_and_loaded() -> None:
    from torch.distributed import checkpoint

    store, rank, _ = registered()
    sharded = sharded_by_torch()
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            store.set("folder", folder)
        path = store.get("folder").decode()
        checkpoint.save({"model": sharded.state_dict()}, checkpoint_id=path)
        with torch.no_grad():
            for parameter in sharded.parameters():
                parameter.to_local().zero_()  # type: ignore[operator]
        checkpoint.load({"model": sharded.state_dict()}, checkpoint_id=path)
        disttrain.barrier()
    for ours, expected in zip(sharded.parameters(), model().parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor().detach(), expected.detach())  # type: ignore[operator]


@on_ranks(2, 3)
def test_a_job_of_torch_distributed_becomes_ours() -> None:
    world = disttrain.current_world()
    rank, size = world.rank, world.world_size
    port = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port[0] = server.port
    disttrain.all_reduce(port)  # After a broadcast who has it may leave while others have not met it yet.
    disttrain.destroy_process_group()
    torch_store = dist.TCPStore("127.0.0.1", int(port.item()), is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=torch_store, rank=rank, world_size=size)
    try:
        for _ in range(2):
            group = disttrain.from_torch()
            assert (disttrain.get_rank(), disttrain.get_world_size()) == (rank, size)
            assert group.backend_name == "cpu:gloo"
            tensor = torch.tensor([rank + 1.0])
            disttrain.all_reduce(tensor)
            dist.all_reduce(tensor)
            assert tensor.item() == size * size * (size + 1) / 2
            made = dist.new_group([1, 0])
            if rank < 2:
                part = disttrain.from_torch(made)
                assert (part.ranks, disttrain.from_torch(made) is part) == (
                    tuple(dist.get_process_group_ranks(made)),
                    True,
                )
                gathered = torch.empty(2)
                disttrain.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=part)
                assert gathered.tolist() == [float(member) for member in part.ranks]
            else:
                with pytest.raises(GroupError, match="not a member"):
                    disttrain.from_torch(made)
            # A group of our own, over our own store.
            own = disttrain.new_group()
            disttrain.all_reduce(tensor, group=own)
            assert tensor.item() == size**3 * (size + 1) / 2
            disttrain.destroy_process_group()
            assert not disttrain.is_initialized()
            dist.barrier()  # what torch made is still torch's
    finally:
        dist.destroy_process_group()
    if rank == 0:
        del server


@on_ranks(2)
def test_each_mistake_gets_one_clear_error() -> None:
    world = disttrain.current_world()
    store, rank, size = world.store.clone(), world.rank, world.world_size
    disttrain.destroy_process_group()
    with pytest.raises(GroupError, match=r"torch\.distributed is not initialised"):
        disttrain.from_torch()
    disttrain.init_process_group(
        store=PrefixStore("alone", store), rank=rank, world_size=size, timeout=30, register_with_torch=False
    )
    assert not dist.is_initialized()
    part = disttrain.new_group()
    assert isinstance(part, disttrain.ProcessGroup)
    with pytest.raises(GroupError, match=r"Call init_process_group without register_with_torch=False"):
        part.to_torch()
    disttrain.destroy_process_group()
    with pytest.raises(BackendError, match="torch can share Gloo and NCCL only"):
        disttrain.init_process_group(
            "fake", store=PrefixStore("fake", store), rank=rank, world_size=size, register_with_torch=True
        )
    assert not disttrain.is_initialized()
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    disttrain.init_process_group(store=PrefixStore("ours", store), rank=rank, world_size=size)
    try:
        with pytest.raises(GroupError, match="by somebody else"):
            disttrain.current_world().default_group.to_torch()
        with pytest.raises(GroupError, match="shares no transports"):
            disttrain.from_torch()
    finally:
        dist.destroy_process_group()


def joined(name: str) -> tuple[int, int]:
    """Leave the pool's world and join one as scripts do."""
    world = disttrain.current_world()
    store, rank, size = world.store.clone(), world.rank, world.world_size
    disttrain.destroy_process_group()
    disttrain.init_process_group(store=PrefixStore(name, store), rank=rank, world_size=size, timeout=30)
    return rank, size


@on_ranks(2, 3)
def test_what_asks_torch_finds_the_job_without_a_word() -> None:
    rank, size = joined("unasked")
    world = disttrain.current_world()
    assert not world.default_group.is_connected("cpu")  # known, and not connected for that
    assert (dist.is_initialized(), dist.get_rank(), dist.get_world_size()) == (True, rank, size)
    calls = CallLog()
    world.add_observer(calls)
    # As torchmetrics does: a barrier, sizes, then values.
    dist.barrier()
    gathered = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(gathered, torch.full((2,), float(rank)))
    assert torch.stack(gathered).mean().item() == (size - 1) / 2
    mean = torch.tensor([10.0 * rank])
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert mean.item() == 5.0 * (size - 1)
    objects: list[Any] = [{"from": rank}]
    dist.broadcast_object_list(objects, src=size - 1)
    assert objects == [{"from": size - 1}]
    everyones: list[Any] = [None] * size
    dist.all_gather_object(everyones, rank)
    assert everyones == list(range(size))
    assert calls.operations[:3] == ["barrier", "all_gather", "all_reduce"]
    with pytest.raises(ValueError, match="to be on GPU"):  # as in any job of torch's on CPUs
        nn.SyncBatchNorm(2)(torch.ones(4, 2))
    world.remove_observer(calls)
    disttrain.destroy_process_group()
    assert not dist.is_initialized()


class CallLog:
    """The names of the calls that pass the door."""

    def __init__(self) -> None:
        self.operations: list[str] = []

    def enqueued(self, call: disttrain.process_group.Call) -> None:
        self.operations.append(call.operation)

    def completed(self, call: disttrain.process_group.Call, error: disttrain.errors.DisttrainError | None) -> None:
        pass


@on_ranks(2, 3)
def test_torchs_collectives_give_torchs_results() -> None:
    rank, size = joined("all of them")
    own, everyone = torch.tensor([float(rank)]), torch.arange(float(size))
    following, previous = (rank + 1) % size, (rank - 1) % size

    summed = own.clone()
    work = dist.all_reduce(summed, async_op=True)
    assert work is not None
    assert work.get_future().wait()[0] is not None
    assert work.wait()
    assert summed.item() == everyone.sum()
    broadcast = own.clone()
    dist.broadcast(broadcast, src=size - 1)
    assert broadcast.item() == size - 1
    reduced = own.clone()
    dist.reduce(reduced, dst=0)
    assert reduced.item() == (everyone.sum() if rank == 0 else rank)
    whole = torch.empty(size)
    dist.all_gather_into_tensor(whole, own)
    assert torch.equal(whole, everyone)
    part = torch.empty(1)
    dist.reduce_scatter_tensor(part, everyone.clone())
    assert part.item() == rank * size
    parts = [torch.empty(1) for _ in range(size)] if rank == 0 else None
    dist.gather(own, parts, dst=0)
    assert parts is None or torch.equal(torch.cat(parts), everyone)
    dist.scatter(part, [value.view(1) for value in everyone * 2] if rank == 0 else None, src=0)
    assert part.item() == 2 * rank
    exchanged = torch.empty(size)
    dist.all_to_all_single(exchanged, everyone + 10 * rank)
    assert torch.equal(exchanged, everyone * 10 + rank)
    received = torch.empty(1)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, own, following), dist.P2POp(dist.irecv, received, previous)])
    assert all(message.wait() for message in works)
    assert received.item() == previous
    if rank == 0:
        dist.send(own + 7, dst=1)
    elif rank == 1:
        assert dist.recv(received) == 0
        assert received.item() == 7.0
    dist.monitored_barrier()
    with dist._coalescing_manager(async_ops=True) as together:
        first, second = own.clone(), own.clone() + 1
        dist.all_reduce(first)
        dist.all_reduce(second)
    together.wait()
    assert (first.item(), second.item()) == (everyone.sum(), everyone.sum() + size)


@on_ranks(2)
def test_torchs_functional_collectives_run_too() -> None:
    from torch.distributed import _functional_collectives as functional

    rank, size = joined("functional")
    group = dist.group.WORLD
    assert group is not None
    values = torch.arange(4.0) + rank
    summed = functional.all_reduce(values, "sum", group)
    assert torch.equal(functional.wait_tensor(summed), torch.arange(4.0) * size + 1)
    gathered = functional.wait_tensor(functional.all_gather_tensor(values, 0, group))
    assert torch.equal(gathered, torch.cat([torch.arange(4.0), torch.arange(4.0) + 1]))
    scattered = functional.wait_tensor(functional.reduce_scatter_tensor(values, "sum", 0, group))
    assert torch.equal(scattered, (torch.arange(4.0) * size + 1).chunk(size)[rank])
    assert torch.equal(disttrain.process_group.functional.all_reduce(values, "sum", group), summed)
    with pytest.raises(GroupError, match=r"all_reduce: the group is a torch\..*, and none of this job's\. Make it by"):
        disttrain.process_group.functional.all_reduce(values, "sum", dist.new_group([0, 1]))


@on_ranks(2)
def test_a_script_may_still_initialise_torch_itself() -> None:
    rank, size = joined("both")
    disttrain.barrier()
    original = dist.distributed_c10d.init_process_group
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        disttrain.current_world().store.set("port", str(server.port))
    port = int(disttrain.current_world().store.get("port"))
    torch_store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=torch_store, rank=rank, world_size=size)
    assert dist.init_process_group is not original  # torch's own again
    for reduce in (dist.all_reduce, disttrain.all_reduce):
        reduce(tensor := torch.ones(2))
        assert tensor.tolist() == [2.0, 2.0]
    with pytest.raises(GroupError, match="shares no transports"):
        disttrain.from_torch()
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("gloo", store=torch_store, rank=rank, world_size=size)
    disttrain.barrier()
    dist.destroy_process_group()
    disttrain.barrier()
