"""What `estimate` says is what real ranks hold and send."""

from __future__ import annotations

import torch

import disttrain
from disttrain.dtensor import CommDebugMode
from disttrain.fsdp2 import MixedPrecisionPolicy, estimate, fully_shard
from disttrain.testing.pytest_plugin import on_ranks
from tests.multirank import models


@on_ranks(2, 3, 4)
def test_ranks_hold_and_send_what_was_said() -> None:
    check(disttrain.init_device_mesh("cpu", (disttrain.get_world_size(),)))


@on_ranks(4)
def test_ranks_with_copies_hold_and_send_what_was_said() -> None:
    check(disttrain.init_device_mesh("cpu", (2, 2)))


def check(mesh: disttrain.DeviceMesh) -> None:
    size, rank = disttrain.get_world_size(), disttrain.get_rank()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = models.TinyModel().init(0)
    said = estimate(model, mesh, blocks=model.blocks, mp_policy=policy)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    comms = CommDebugMode()
    for step in range(3):
        optimizer.zero_grad()
        with comms:
            models.loss_of(model, models.own_rows(models.batch(step), rank, size)).backward()
        optimizer.step()
    num_shards = mesh.shape[-1]
    given = comms.get_comm_bytes()
    sent = {each.operation: each.sent_bytes for each in said.traffic}
    assert sum(each.num_calls for each in said.traffic) == comms.get_total_counts()
    # An all-gather is given a rank's part, which goes to all others; a reduce-scatter the whole, of which it keeps one.
    assert sent.pop("all_gather") == given.pop("all_gather_into_tensor") * (num_shards - 1)
    assert sent.pop("reduce_scatter") == given.pop("reduce_scatter_tensor") * (num_shards - 1) // num_shards
    assert sent == given  # of two copies, each sends and is sent all
    parameters = {p.to_local().untyped_storage().data_ptr(): p.to_local().untyped_storage() for p in model.parameters()}
    assert said.parameters_bytes == sum(storage.nbytes() for storage in parameters.values())
    kept = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    held = torch.tensor([sum(value.to_local().nbytes for value in kept)])
    disttrain.all_reduce(held, disttrain.ReduceOp.MAX)
    assert said.optimizer_bytes == held.item()
