"""Groups of ours in the hands of what is torch's: its functions in Python take them, its C++ what `to_torch` makes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

import disttrain
from disttrain import tp
from disttrain.store import PrefixStore
from disttrain.testing.pytest_plugin import on_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, by which torch makes some optimizers
    from torch.distributed.optim import ZeroRedundancyOptimizer


def registered(name: str) -> tuple[int, int]:
    """Leave the pool's world and join one that torch knows too."""
    world = disttrain.current_world()
    store, rank, size = world.store.clone(), world.rank, world.world_size
    disttrain.destroy_process_group()
    disttrain.init_process_group(store=PrefixStore(name, store), rank=rank, world_size=size, timeout=30)
    return rank, size


class Counter(Joinable, JoinHook):
    """Counts with all ranks that still have inputs."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.count = group, torch.zeros(1)

    def __call__(self) -> None:
        Join.notify_join_context(self)
        self.count += 1
        disttrain.all_reduce(torch.ones(1), group=self.group)

    def main_hook(self) -> None:
        disttrain.all_reduce(torch.ones(1), group=self.group)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return self

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.group


@on_ranks(2, 3)
def test_torchs_functions_take_groups_of_ours() -> None:
    rank, size = registered("functions")
    part: Any = disttrain.new_group([size - 1, 0])
    groups: list[Any] = [disttrain.group.WORLD, *([part] if rank in (0, size - 1) else [])]
    for group in groups:
        ranks = list(group.ranks)
        assert dist.get_rank(group) == ranks.index(rank)
        assert dist.get_process_group_ranks(group) == ranks
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == sum(ranks) + len(ranks)
        dist.broadcast(tensor.fill_(rank), src=ranks[-1], group=group)
        assert tensor.item() == ranks[-1]
        with distributed_c10d._coalescing_manager(group, async_ops=True) as coalesced:
            dist.all_reduce(tensor, group=group)
        coalesced.wait()
        assert tensor.item() == ranks[-1] * len(ranks)
        leaf = torch.ones(1, requires_grad=True)
        all_reduce(leaf * (ranks.index(rank) + 1), group=group).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.item() == len(ranks) * (ranks.index(rank) + 1)
        counter = Counter(group)
        with Join([counter]):
            for _ in range(2 + ranks.index(rank)):
                counter()
        assert counter.count.item() == 2 + ranks.index(rank)
    if rank in (0, size - 1):
        disttrain.destroy_process_group(part)
        with pytest.raises(ValueError, match="not registered"):
            dist.get_rank(part)
    disttrain.destroy_process_group()
    assert not dist.is_initialized()


@on_ranks(2, 3)
def test_ddp_and_its_optimizer_on_a_part_of_the_ranks() -> None:
    rank, size = registered("ddp")
    part = disttrain.new_group(range(size - 1, -1, -1)[:2])
    assert disttrain.to_torch(None) is None
    if rank < size - 2:
        assert disttrain.to_torch(part) is dist.GroupMember.NON_GROUP_MEMBER
        return
    made = disttrain.to_torch(part)
    assert disttrain.to_torch(made) is made
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=made)
    model.register_comm_hook(part, allreduce_hook)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=part, lr=0.5)
    before = model.module.weight.detach().clone()
    model(torch.full((1, 2), float(rank + 1))).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.module.weight, before - 0.5 * (size + size - 1) / 2)


@on_ranks(4)
def test_ddp_of_cut_modules_trains_as_one_process_does() -> None:
    rank, _ = registered("cut")
    mesh = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    alone, cut = (torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)) for _ in range(2))
    cut.load_state_dict(alone.state_dict())
    tp.parallelize_module(cut, mesh["tp"], {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()})
    tp._pre_dp_module_transform(cut)
    model = DistributedDataParallel(cut, process_group=disttrain.to_torch(mesh.get_group("dp")))
    batch = torch.linspace(-1, 1, 32).view(8, 4)
    for each, rows in ((alone, batch), (model, batch.chunk(2)[rank // 2])):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            each(rows).square().mean().backward()
            optimizer.step()
    found, expected = dict(cut.named_parameters()), dict(alone.named_parameters())
    assert list(found) == list(expected)
    for name, dim in (("0.weight", 0), ("0.bias", 0), ("2.weight", 1)):
        torch.testing.assert_close(found[name], expected[name].chunk(2, dim)[rank % 2])
    torch.testing.assert_close(found["2.bias"], expected["2.bias"])
