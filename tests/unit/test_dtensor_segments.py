"""`torch.segment_reduce` of tensors and segments that are cut in any way, uneven and empty parts among them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import disttrain
from disttrain.dtensor import Partial, Placement, Replicate, Shard
from disttrain.testing import run_threads
from tests.cases.dtensors import laid

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule")
Lay = Callable[[torch.Tensor, Sequence[Placement]], Any]


@dataclass(frozen=True)
class Case:
    """A call, and how its operands lie."""

    mesh_shape: tuple[int, ...]
    data: torch.Tensor
    placements: list[Placement]
    segments: torch.Tensor
    segment_placements: list[Placement]
    options: dict[str, Any]
    kind: str

    def run(self, lay: Lay) -> list[torch.Tensor]:
        """The result, and the gradient of its elements with as many weights."""
        data = lay(self.data, self.placements).detach().requires_grad_()
        segments = lay(self.segments, self.segment_placements)
        result = torch.segment_reduce(data, **{self.kind: segments}, **self.options)
        weights = torch.arange(1, 1 + result.numel()).reshape(result.shape).to(result.dtype)
        weighted = result * lay(weights, [Replicate()] * len(self.mesh_shape))
        return [result.detach(), *torch.autograd.grad(weighted.sum(), data)]


def case_of(seed: int, kind: str) -> Case:
    draw = random.Random(seed)
    mesh_shape = draw.choice([(2,), (3,), (1, 2), (2, 1), (1, 3)])
    axis = draw.choice([0, 0, 1, 2])
    outer = tuple(draw.choice([1, 2, 3, 4]) for _ in range(axis))
    size, num_segments = draw.choice([0, 1, 2, 3, 5, 7, 8]), draw.choice([1, 2, 3, 4, 5])
    shape = (*outer, size, *(draw.choice([1, 2, 3]) for _ in range(draw.choice([0, 0, 1, 2]))))
    generator = torch.Generator().manual_seed(seed)
    # Whole numbers of eighths: exact in whatever order they are summed.
    data = torch.randint(-16, 17, shape, generator=generator).double() / 8
    cuts = torch.randint(0, size + 1, (*outer, num_segments - 1), generator=generator).sort(-1).values
    edges = torch.cat([torch.zeros(*outer, 1), cuts, torch.full((*outer, 1), size)], -1).long()
    segments = edges if kind == "offsets" else edges.diff(dim=-1)

    def placements(tensor: torch.Tensor) -> list[Placement]:
        partial = Partial(draw.choice(["sum", "max", "min"]))
        kinds = [*(Shard(dim) for dim in range(tensor.ndim)), *(Shard(dim) for dim in range(tensor.ndim))]
        return [draw.choice([*kinds, Replicate(), partial]) for _ in mesh_shape]

    options = {
        "reduce": draw.choice(["sum", "mean", "max", "min", "prod"]),
        "axis": axis,
        "initial": draw.choice([None, None, 0, 1, 2.5]),
        "unsafe": draw.random() < 0.5,
    }
    return Case(mesh_shape, data, placements(data), segments, placements(segments), options, kind)


@pytest.mark.parametrize("kind", ["lengths", "offsets"])
@pytest.mark.parametrize("first", [0, 10, 20, 30])
def test_any_segments(first: int, kind: str) -> None:
    for seed in range(first, first + 10):
        case = case_of(seed, kind)
        expected = case.run(lambda tensor, _: tensor)

        def body(case: Case = case, expected: list[torch.Tensor] = expected) -> None:
            mesh = disttrain.init_device_mesh("cpu", case.mesh_shape)
            found = case.run(lambda tensor, placements: laid(tensor, mesh, placements))
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one.full_tensor(), other, equal_nan=True)  # type: ignore[operator]

        run_threads(torch.Size(case.mesh_shape).numel(), body)
