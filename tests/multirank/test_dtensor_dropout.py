"""Dropout of DTensors on real ranks: each has a random generator of its own, as threads have not."""

from __future__ import annotations

import torch

import disttrain
from disttrain.dtensor import Partial, Replicate, Shard
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.shardings import collectives_of, laid_out, mesh_of, normal


@on_ranks(2, 3)
def test_dropout_is_the_single_processes() -> None:
    mesh = mesh_of((disttrain.get_world_size(),))
    whole = normal(5, 4)
    torch.manual_seed(3)
    expected, mask = torch.native_dropout(whole, 0.4, True)
    following = torch.rand(())
    gradient = torch.ops.aten.native_dropout_backward(whole, mask, 1 / 0.6)
    for placement in (Replicate(), Shard(0), Shard(1), Partial()):
        given = laid_out(whole, mesh, [placement])
        torch.manual_seed(3)
        found: list[torch.Tensor] = []
        moved = collectives_of(lambda given=given, found=found: found.extend(torch.native_dropout(given, 0.4, True)))
        assert moved == []
        torch.testing.assert_close(found[0].full_tensor(), expected)
        assert torch.equal(found[1].full_tensor(), mask)
        # Whatever is drawn next is the same as well.
        assert torch.rand(()) == following
        back = torch.ops.aten.native_dropout_backward(given, found[1], 1 / 0.6)
        torch.testing.assert_close(back.full_tensor(), gradient)
