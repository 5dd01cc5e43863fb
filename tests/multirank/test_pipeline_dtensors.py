"""DTensors between stages: a mesh with an axis for the pipeline, and one for tensor parallel."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from disttrain.mesh import DeviceMesh, init_device_mesh
from disttrain.pipelining import PipelineSchedule, PipelineStage, make_schedule
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.pipelines import DIM, rows

# How each stage's weight lies. What stages return is then cut, a sum whose parts the ranks hold, or whole.
LAYOUTS: list[Placement] = [Shard(0), Shard(1), Shard(0), Replicate()]


class Stage(nn.Module):
    def __init__(self, weight: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [placement]))
        self.seen: set[Placement] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, DTensor):
            x = distribute_tensor(x, self.weight.device_mesh, [Replicate()])
        self.seen.add(x.placements[0])
        return x @ self.weight.t()


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    output = output.full_tensor() if isinstance(output, DTensor) else output
    return (output.tanh() - target).square().mean()


def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(DIM, DIM, dtype=torch.float64, generator=generator) / 2 for _ in LAYOUTS]


def _train(name: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    plan = make_schedule(name, 2, 4, 2)
    own = plan.placement.stages[mesh.get_local_rank("pp")]
    stages = {index: Stage(weights()[index], mesh["tp"], LAYOUTS[index]) for index in own}
    group = mesh.get_group("pp")
    made = [PipelineStage(stage, index, 4, "cpu", group=group) for index, stage in stages.items()]
    runner = PipelineSchedule(made, plan, _loss)
    x, y = rows(8), rows(8, seed=2)
    losses: list[torch.Tensor] = []
    for _ in range(2):
        runner.step(*((x,) if 0 in own else ()), target=y if 3 in own else None, losses=losses, return_outputs=False)
    expected = [weight.requires_grad_() for weight in weights()]
    output = x
    for weight in expected:
        output = output @ weight.t()
    loss = _loss(output, y)
    loss.backward()
    if 3 in own:
        torch.testing.assert_close(torch.stack(losses).mean(), loss.detach(), rtol=1e-12, atol=1e-12)
    for index, stage in stages.items():
        grad = stage.weight.grad
        assert isinstance(grad, DTensor)
        torch.testing.assert_close(grad.full_tensor(), 2 * expected[index].grad, rtol=1e-11, atol=1e-11)
        assert stage.seen == {[Replicate(), Shard(1), Partial(), Shard(1)][index]}


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBV", "InterleavedZeroBubble"])
def test_cut_sums_and_wholes(name: str) -> None:
    run_threads(4, _train, name)


@on_ranks(4)
def test_on_processes() -> None:
    assert disttrain.get_world_size() == 4
    _train("ZBV")
