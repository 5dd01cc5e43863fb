"""What a network costs is measured by groups of ranks, and known alike on all ranks of a mesh."""

from __future__ import annotations

import torch

import disttrain
from disttrain.fsdp2 import TransferCost, TransferPolicy
from disttrain.process_group import current_world
from disttrain.testing.pytest_plugin import on_ranks
from tests.multirank import models
from tests.multirank.test_fsdp2_transfers import trained
from tests.surroundings.hosts_of_groups import set_spans_hosts


@on_ranks(4)
def test_copies_on_several_hosts_are_averaged_by_one_plan() -> None:
    """The groups that hold copies have measured for themselves; their ranks share parameters with the other ones'."""
    mesh = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    group = mesh.get_group(0)
    set_spans_hosts(between=(group, current_world().default_group))
    group.transfer_cost = TransferCost((0.02, 1e-6)[mesh.get_local_rank(1)], 1e9)
    flat = trained(models.TinyModel(num_blocks=6).init(0), TransferPolicy("flat", together=1), mesh=mesh)
    chosen = trained(models.TinyModel(num_blocks=6).init(0), None, mesh=mesh)
    assert all(map(torch.equal, flat, chosen))
