"""Views and shape operators of DTensors: the same values and gradients as on plain tensors, and no needless moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import disttrain
from disttrain.dtensor import Partial, Placement, Shard, StridedShard
from disttrain.testing import run_threads
from tests.cases.dtensors import check_same, counted, placements_of

View = Callable[[torch.Tensor], Any]

SHAPE = (4, 3, 5)
VIEWS: dict[str, View] = {
    "view": lambda t: t.view(12, 5),
    "view inner": lambda t: t.view(4, 15),
    "view flat": lambda t: t.view(-1),
    "view split": lambda t: t.view(2, 2, 3, 5, 1),
    "view other": lambda t: t.view(6, 2, 5),
    "reshape": lambda t: t.transpose(0, 1).reshape(12, 5),
    "flatten": lambda t: t.flatten(1),
    "unflatten": lambda t: t.unflatten(0, (2, 2)),
    "permute": lambda t: t.permute(2, 0, -2),
    "transpose": lambda t: t.transpose(0, -1),
    "movedim": lambda t: t.movedim(0, 2),
    "squeeze": lambda t: t.unsqueeze(1).squeeze(),
    "squeeze dims": lambda t: t.unsqueeze(0).unsqueeze(-1).squeeze((0, -1)),
    "unsqueeze": lambda t: t.unsqueeze(-2),
    "expand": lambda t: t.unsqueeze(1).expand(2, -1, 6, -1, -1),
    "broadcast_to": lambda t: t.broadcast_to(2, *SHAPE),
    "select": lambda t: t[2],
    "select last": lambda t: t[..., -1],
    "slice": lambda t: t[1:3],
    "slice steps": lambda t: t[:, :, 1::2],
    "slice empty": lambda t: t[2:2],
    "slice nearly all": lambda t: t[:-1, 1:],
    "narrow": lambda t: t.narrow(2, 1, 3),
    "split": lambda t: t.split(2),
    "split last": lambda t: t.split([1, 0, 4], -1),
    "split of one": lambda t: t.split(10),
    "chunk": lambda t: t.chunk(2, 0),
    "unbind": lambda t: t.unbind(1),
    "diagonal": lambda t: t.diagonal(1, 0, 2),
    "unfold": lambda t: t.unfold(2, 3, 1),
    "as_strided": lambda t: t.as_strided((2, 3), (5, 1), 7),
    "alias": torch.ops.aten.alias,
    "flip": lambda t: t.flip(0),
    "roll": lambda t: t.roll(1, 2),
    "roll flat": lambda t: t.roll(4),
    "repeat": lambda t: t.repeat(2, 1, 3, 1),
    "tile": lambda t: t.tile((2,)),
    "cat": lambda t: torch.cat([t, t], 0),
    "cat uneven": lambda t: torch.cat([t[:, :, :2], t, t[:, :, 4:]], 2),
    "stack": lambda t: torch.stack([t, t], 1),
    "pad": lambda t: torch.nn.functional.pad(t, (1, 0, 0, 2)),
    "pad with": lambda t: torch.nn.functional.pad(t, (1, -1), value=2.0),
    "tril": lambda t: t.tril(),
    "triu": lambda t: t.triu(1),
}
# On two axes: those that cut one dim, neighbours in either order, and what is partial.
CUTS_2D: list[tuple[Placement, ...]] = [
    (Shard(0), Shard(0)),
    (Shard(0), StridedShard(0, 2)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Partial(), Shard(0)),
]


@pytest.mark.parametrize("mesh_shape", [(1,), (3,), (2, 2), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_every_layout(name: str, mesh_shape: tuple[int, ...]) -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", mesh_shape)
        layouts = CUTS_2D if mesh.ndim == 2 else placements_of(mesh, len(SHAPE), ("sum", "max"))
        for placements in layouts:
            check_same(VIEWS[name], [counted(*SHAPE)], mesh, [placements])

    run_threads(torch.Size(mesh_shape).numel(), body)
