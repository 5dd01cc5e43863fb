"""A cut module is a module: it is copied, frozen, hooked, cast, saved and recomputed as any other."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.dtensor import DTensor, Replicate, Shard
from disttrain.mesh import DeviceMesh
from disttrain.testing import run_threads
from disttrain.tp import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from tests.cases.tensor_parallel import (
    Block,
    Decoder,
    GatedMLP,
    block_plan,
    check_gradients,
    decoder_plan,
    gathered,
    same_as_alone,
    scattered,
)

NUM_RANKS = 2
X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


Body = Callable[[DeviceMesh, nn.Module, nn.Module], None]


def on_two(body: Body, kind: Callable[[], nn.Module] = Block) -> None:
    """Call it on two ranks, with two copies of one module: the one to be cut, and the one in one process."""
    torch.manual_seed(0)
    made = kind().double()

    def on_rank() -> None:
        mesh = disttrain.init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
        body(mesh, copy.deepcopy(made), copy.deepcopy(made))

    run_threads(NUM_RANKS, on_rank)


def called(module: nn.Module, x: torch.Tensor, mesh: DeviceMesh, sequence: bool) -> torch.Tensor:
    return gathered(1)(module(scattered(1)(x, mesh)), mesh) if sequence else module(x)


def check(module: nn.Module, reference: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    for one in (module, reference):
        one.zero_grad()
    own, other = (X.clone().requires_grad_() for _ in range(2))
    found, expected = called(module, own, mesh, sequence), reference(other)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    check_gradients(module, reference)
    torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_copy_is_a_module_of_its_own(sequence: bool) -> None:
    def body(mesh: DeviceMesh, module: nn.Module, reference: nn.Module) -> None:
        parallelize_module(module, mesh, block_plan(2, sequence=sequence))
        check(module, reference, mesh, sequence)
        copied, copied_reference = copy.deepcopy(module), copy.deepcopy(reference)
        with torch.no_grad():
            for one in (copied, copied_reference):
                for parameter in one.parameters():
                    parameter.mul_(0.5)
        check(copied, copied_reference, mesh, sequence)
        check(module, reference, mesh, sequence)

    on_two(body)


@pytest.mark.parametrize("sequence", [False, True])
def test_state_dicts_go_around(sequence: bool) -> None:
    def body(mesh: DeviceMesh, module: nn.Module, reference: nn.Module) -> None:
        parallelize_module(module, mesh, block_plan(2, sequence=sequence))
        state = {name: value.clone() for name, value in module.state_dict().items()}
        assert list(state) == list(reference.state_dict())
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        module.load_state_dict(state)
        check(module, reference, mesh, sequence)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        module.load_state_dict(state, assign=True)
        module.requires_grad_()
        check(module, reference, mesh, sequence)

    on_two(body)


FROZEN: list[Callable[[str], bool]] = [
    lambda name: True,
    lambda name: "gate" in name or "key" in name,
    lambda name: name.endswith("weight"),
    lambda name: name.endswith("bias"),
    lambda name: "down" not in name,
    lambda name: "norm" in name,
]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("place", range(len(FROZEN)))
@pytest.mark.parametrize("trains_input", [False, True])
def test_some_parameters_are_frozen(sequence: bool, place: int, trains_input: bool) -> None:
    def body(mesh: DeviceMesh, module: nn.Module, reference: nn.Module) -> None:
        for one in (module, reference):
            for name, parameter in one.named_parameters():
                parameter.requires_grad_(not FROZEN[place](name))
        parallelize_module(module, mesh, block_plan(2, sequence=sequence))
        own_x, other_x = (X.clone().requires_grad_(trains_input) for _ in range(2))
        found, expected = called(module, own_x, mesh, sequence), reference(other_x)
        torch.testing.assert_close(found, expected)
        assert found.requires_grad == expected.requires_grad
        if expected.requires_grad:
            found.square().sum().backward()
            expected.square().sum().backward()
            check_gradients(module, reference)
        if trains_input:
            torch.testing.assert_close(own_x.grad, other_x.grad)

    on_two(body)


class Adapted(nn.Module):
    """A frozen layer and a trained correction of low rank."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("sequence", [False, True])
def test_corrections_of_low_rank(sequence: bool) -> None:
    def adapted() -> nn.Module:
        mlp = GatedMLP(8, 12).requires_grad_(False)
        mlp.gate, mlp.up = Adapted(mlp.gate), Adapted(mlp.up)
        return mlp

    def body(mesh: DeviceMesh, module: nn.Module, reference: nn.Module) -> None:
        plan: dict[str, Any] = {
            "gate.layer": ColwiseParallel(),
            "gate.up": ColwiseParallel(),
            "up.layer": ColwiseParallel(),
            "up.up": ColwiseParallel(),
            "[gu]*.down": ColwiseParallel(output_layouts=Replicate()),
            "down": RowwiseParallel(output_layouts=Shard(1) if sequence else None),
        }
        if sequence:
            plan[""] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        parallelize_module(module, mesh, plan)
        check(module, reference, mesh, sequence)
        check(module, reference, mesh, sequence)

    on_two(body, adapted)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(sequence: bool, mode: Callable[[], Any]) -> None:
    def body(mesh: DeviceMesh, module: nn.Module, reference: nn.Module) -> None:
        parallelize_module(module, mesh, decoder_plan(2, sequence=sequence))
        for one in (module, reference):
            one.eval()
        tokens = torch.arange(16).view(2, 8)
        with mode():
            found, expected = module(tokens), reference(tokens)
            torch.testing.assert_close(found, expected)
            assert not found.requires_grad
        # And then with gradients again, whatever was planned before.
        module(tokens).square().sum().backward()
        reference(tokens).square().sum().backward()
        check_gradients(module, reference)

    on_two(body, Decoder)


# A full backward hook makes an input of its own, of which nothing is known.
@pytest.mark.parametrize("sequence", [False, True])
def test_hooks_of_cut_layers_are_called(sequence: bool) -> None:
    names = ["attention_norm", "attention.query", "attention.out", "mlp.gate", "mlp.up", "mlp.down", "mlp_norm"]

    def body(mesh: DeviceMesh, module: nn.Module, reference: nn.Module) -> None:
        parallelize_module(module, mesh, block_plan(2, sequence=sequence))
        calls: dict[nn.Module, list[tuple[str, str]]] = {module: [], reference: []}
        for one, own in calls.items():
            for name in names:
                layer = one.get_submodule(name)
                layer.register_forward_pre_hook(lambda *_, name=name, own=own: own.append(("before", name)))
                layer.register_forward_hook(lambda *_, name=name, own=own: own.append(("after", name)))
                layer.register_full_backward_hook(lambda *_, name=name, own=own: own.append(("backward", name)))
        check(module, reference, mesh, sequence)
        for one in calls:
            # One that changes what the layer is given, and one that changes what it gives.
            one.mlp.gate.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))
            one.mlp.up.register_forward_hook(lambda _m, _x, y: y * 3)
        check(module, reference, mesh, sequence)
        assert len(calls[module]) == 2 * 3 * len(names)
        assert sorted(calls[module]) == sorted(calls[reference])

    on_two(body)


@pytest.mark.parametrize("sequence", [False, True])
def test_another_dtype(sequence: bool) -> None:
    def body(mesh: DeviceMesh, module: nn.Module, reference: nn.Module) -> None:
        parallelize_module(module, mesh, block_plan(2, sequence=sequence))
        check(module, reference, mesh, sequence)
        module.to(torch.float32)
        reference.to(torch.float32)
        module.zero_grad()
        found = called(module, X.float(), mesh, sequence)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, reference(X.float()))
        found.square().sum().backward()
        assert all(parameter.grad.dtype == torch.float32 for parameter in module.parameters())
        module.double()
        torch.testing.assert_close(called(module, X, mesh, sequence), reference.double()(X))

    on_two(body)


@pytest.mark.parametrize("sequence", [False, True])
def test_autocast(sequence: bool) -> None:
    def body(mesh: DeviceMesh, module: nn.Module, reference: nn.Module) -> None:
        parallelize_module(module.float(), mesh, block_plan(2, sequence=sequence))
        reference.float()
        dtypes = []
        for one in (module, reference):
            one.mlp.gate.register_forward_hook(lambda _m, _x, y: dtypes.append(y.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = called(module, X.float(), mesh, sequence), reference(X.float())
        torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)
        assert dtypes == [torch.bfloat16, torch.bfloat16]
        found.float().sum().backward()
        expected.float().sum().backward()
        own = dict(module.named_parameters())
        for name, parameter in reference.named_parameters():
            grad = own[name].grad
            grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
            assert grad.dtype == torch.float32
            assert (grad - parameter.grad).norm() < 0.05 * parameter.grad.norm() + 1e-3, name

    on_two(body)


class Recomputing(nn.Module):
    """Parts of an MLP are computed again in the backward pass."""

    def __init__(self, reentrant: bool, inner: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = GatedMLP(8, 12)
        self.reentrant, self.inner = reentrant, inner

    def _both(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.norm(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inner:
            return x + checkpoint(self.mlp, self.norm(x), use_reentrant=self.reentrant)
        return x + checkpoint(self._both, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_parts_are_recomputed(sequence: bool, inner: bool, reentrant: bool) -> None:
    def body(mesh: DeviceMesh, module: nn.Module, reference: nn.Module) -> None:
        plan: dict[str, Any] = {
            "mlp.gate": ColwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1) if sequence else None),
        }
        if sequence:
            plan["norm"] = SequenceParallel()
            plan["mlp"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        parallelize_module(module, mesh, plan)
        inputs: list[weakref.ref[torch.Tensor]] = []
        module.mlp.gate.register_forward_pre_hook(lambda _, given: inputs.append(weakref.ref(given[0])))
        for _ in range(2):
            check(module, reference, mesh, sequence)
            # Recomputation leaves the MLP early; the gathered input goes all the same.
            assert len(inputs) == 2
            assert all(given() is None for given in inputs)
            inputs.clear()

    on_two(body, lambda: Recomputing(reentrant, inner))


class RecomputingWithin(GatedMLP):
    """Checkpoints what takes its gathered input, not itself."""

    def widened(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(x)) * self.up(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(checkpoint(self.widened, x, use_reentrant=False))


def test_layers_of_a_shared_input_are_recomputed() -> None:
    """They multiply when they compute again, so they do the first time."""
    plan = lambda: {  # noqa: E731
        "": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "gate": ColwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    same_as_alone(RecomputingWithin, plan, torch.randn(2, 4, 6), 2, enter=scattered(1), leave=gathered(1))


def test_inputs_by_name() -> None:
    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.column, self.row = nn.Linear(8, 8), nn.Linear(8, 8)
            self.table, self.norm, self.dropout = nn.Embedding(6, 8), nn.LayerNorm(8), nn.Dropout(0.0)

    def body(mesh: DeviceMesh, module: nn.Module, reference: nn.Module) -> None:
        plan = {
            "column": ColwiseParallel(output_layouts=Replicate()),
            "row": RowwiseParallel(),
            "table": RowwiseParallel(),
            "norm": SequenceParallel(),
            "dropout": SequenceParallel(),
        }
        parallelize_module(module, mesh, plan)
        torch.testing.assert_close(module.column(input=X), reference.column(X))
        torch.testing.assert_close(module.row(input=scattered(2)(X, mesh)), reference.row(X))
        tokens = torch.arange(6)
        torch.testing.assert_close(module.table(input=tokens), reference.table(tokens))
        for name in ("norm", "dropout"):
            found = module.get_submodule(name)(input=scattered(1)(X, mesh))
            torch.testing.assert_close(gathered(1)(found, mesh), reference.get_submodule(name)(X))

    on_two(body, All)
