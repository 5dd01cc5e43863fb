"""Forms in which programs written for torch compile blocks and cut stages."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import disttrain
from disttrain import checkpoint, fsdp2, pipelining, tp
from disttrain.dtensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor, local_map
from disttrain.errors import ShardingError
from disttrain.process_group import World
from disttrain.testing import run_threads


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"3": nn.Linear(4, 4)})
        self.register_module("norm", None)
        self.register_module("embedding", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers["3"](x)


def _alone() -> World:
    return World(disttrain.HashStore(), 0, 1, backend="fake", timeout_s=1.0)


def test_keys_of_what_a_stage_lacks_are_passed_over() -> None:
    with disttrain.process_group.entered_world(_alone()):
        mesh = disttrain.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        plan = {name: tp.ColwiseParallel() for name in ("embedding", "layers.*", "norm.inner")}
        stage = tp.parallelize_module(Stage(), mesh, plan)
        assert isinstance(stage.layers["3"].weight, disttrain.dtensor.DTensor)
        with pytest.raises(ShardingError, match="the key 'nrom' of the plan matches no module"):
            tp.parallelize_module(Stage(), mesh, {"nrom": tp.ColwiseParallel()})


def test_a_block_is_compiled_before_it_is_sharded() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    with disttrain.process_group.entered_world(_alone()):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(4, 4), nn.SiLU())
        x = torch.randn(2, 4)
        expected = block(x)
        block.compile(backend=backend, fullgraph=True)
        fsdp2.fully_shard(block, mesh=disttrain.init_device_mesh("cpu", (1,)))
        output = block(x)
        output.sum().backward()
        assert torch.allclose(output, expected)
        assert block[0].weight.grad is not None
        assert len(graphs) == 1


class Halved(tp.ColwiseParallel):
    """As torch's styles are derived from: its own input step, the rest inherited."""

    @staticmethod
    def _prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh):  # type: ignore[no-untyped-def]
        tensor = DTensor.from_local(inputs[0] / 2, device_mesh, input_layouts, run_check=False)
        return tensor.redistribute(placements=desired_input_layouts, async_op=True)

    def _apply(self, module: nn.Module, device_mesh: disttrain.DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            self._partition_linear_fn,
            functools.partial(self._prepare_input_fn, self.input_layouts, self.desired_input_layouts),
            functools.partial(self._prepare_output_fn, self.output_layouts, self.use_local_output),
        )


def _with_a_style_of_its_own(original: nn.Module, x: torch.Tensor) -> None:
    rank, mesh = disttrain.get_rank(), disttrain.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = copy.deepcopy(original)
    expected = model(x / 2)
    tp.parallelize_module(model, mesh, {"0": Halved()})
    torch.testing.assert_close(model(x), expected.chunk(2, dim=-1)[rank])


def test_steps_of_a_style_are_put_in_place_of_torchs() -> None:
    run_threads(2, _with_a_style_of_its_own, nn.Sequential(nn.Linear(4, 6)), torch.randn(3, 4))


def _experts_on_their_own_mesh(alone: nn.Module) -> None:
    rank = disttrain.get_rank()
    whole = disttrain.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    mesh = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    model, alone = copy.deepcopy(alone), copy.deepcopy(alone)
    expert = model[1].weight

    def placement(parameter: nn.Parameter) -> object:
        if parameter is not expert:
            return None
        return SimpleNamespace(placement=Shard(1), mesh_info=SimpleNamespace(mesh=mesh["edp"]))

    fsdp2.fully_shard(model, mesh=whole, shard_placement_fn=placement)
    assert model[0].weight.placements == (Shard(0),)
    assert model[1].weight.placements == (Shard(1),)
    assert (model[0].weight.to_local().shape, model[1].weight.to_local().shape) == ((1, 4), (4, 2))
    x = torch.arange(4.0).repeat(2, 1) + rank
    model(x).square().mean().backward()
    gradients = [weight.grad.full_tensor() for weight in (model[0].weight, model[1].weight)]
    for group, weight, found in zip((whole, mesh["edp"]), alone.parameters(), gradients, strict=True):
        others = group.get_group().ranks
        sum(alone(x - rank + other).square().mean() for other in others).div(len(others)).backward(inputs=[weight])
        torch.testing.assert_close(weight.grad, found)


def test_parameters_of_a_group_lie_on_meshes_of_their_own() -> None:
    layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    run_threads(4, _experts_on_their_own_mesh, nn.Sequential(*layers))


def test_a_graph_makes_local_maps() -> None:
    class Inner(nn.Module):
        def __call__(self, q: DTensor) -> torch.Tensor:
            placements = (q.placements,)
            return local_map(super().__call__, placements, placements, device_mesh=q.device_mesh)(q)

        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return q.sin()

    with disttrain.process_group.entered_world(_alone()):
        x = distribute_tensor(torch.randn(4, 4), disttrain.init_device_mesh("cpu", (1,)), [Shard(0)])
        block = nn.Sequential(Inner())
        expected = block(x).to_local()
        block.compile(backend="eager", fullgraph=True)
        torch.testing.assert_close(block(x).to_local(), expected)


def _kept_dict() -> None:
    mesh = disttrain.init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fsdp2.fully_shard(layer, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for layer in model:
        layer.reset_parameters()
    kept = checkpoint.get_model_state_dict(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(kept[name].to_local(), parameter.to_local())


def test_a_state_dict_taken_before_training_shows_what_is_trained() -> None:
    run_threads(2, _kept_dict)


def test_a_stage_asks_torchs_callbacks_for_meshes() -> None:
    with disttrain.process_group.entered_world(_alone()):
        mesh = disttrain.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        asked = []

        def get_mesh(names: tuple[str, ...], layout: object) -> disttrain.DeviceMesh:
            asked.append((names, layout))
            return mesh

        for callback in (get_mesh, lambda names: mesh):
            stage = pipelining.PipelineStage(nn.Linear(1, 1), 0, 1, torch.device("cpu"), get_mesh=callback)
            assert stage.find_mesh(("tp",)) is mesh
        assert asked == [(("tp",), None)]


class Latent(nn.Module):
    """A layer of the module's input, and one of another input, of as many features or fewer."""

    def __init__(self, latent: int) -> None:
        super().__init__()
        self.latent = latent
        self.query = nn.Linear(4, 4, bias=False)
        self.key = nn.Linear(latent, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.query(x) * 2 + self.key(x.tanh()[..., : self.latent])


def _with_other_inputs(original: nn.Module, x: torch.Tensor) -> None:
    rank, mesh = disttrain.get_rank(), disttrain.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, alone = copy.deepcopy(original), copy.deepcopy(original)
    plan = {
        "": tp.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "query": tp.ColwiseParallel(use_local_output=False),
        "key": tp.ColwiseParallel(use_local_output=False),
    }
    tp.parallelize_module(model, mesh, plan)
    for _ in range(2):
        model.zero_grad()
        alone.zero_grad()
        output, expected = model(x.chunk(2, dim=1)[rank]), alone(x)
        torch.testing.assert_close(output.full_tensor(), expected)
        output.square().sum().backward()
        expected.square().sum().backward()
        for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)


@pytest.mark.parametrize("latent", [2, 4])
def test_layers_that_take_another_input_are_left_alone(latent: int) -> None:
    run_threads(2, _with_other_inputs, Latent(latent), torch.randn(1, 4, 4))
