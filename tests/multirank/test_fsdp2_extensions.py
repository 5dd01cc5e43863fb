"""Tensor subclasses that are gathered their own way: weights that travel and compute as 8 bits with scales."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import disttrain
from disttrain.dtensor import DTensor, Shard
from disttrain.errors import ShardingError
from disttrain.fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from disttrain.process_group import Call
from disttrain.testing.pytest_plugin import on_ranks

aten = torch.ops.aten

KEEP_CLASS = {
    aten.detach.default,
    aten.clone.default,
    aten.slice.Tensor,
    aten.view.default,
    aten.as_strided.default,
    aten.new_zeros.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten._to_copy.default,
}


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and the scale that they are multiplied with."""
    scale = (x.abs().amax() if x.numel() else x.new_zeros(())).clamp(min=1e-6) / 127
    return (x / scale).round().to(torch.int8), scale.float()


class Master(torch.Tensor):
    """Full precision, of which 8 bits are gathered. One scale per rank."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        inner = tree_map_only(Master, lambda one: one.inner, (args, kwargs or {}))
        out = func(*inner[0], **inner[1])
        if func in KEEP_CLASS:
            return cls(out)
        # What is written to is returned itself.
        return args[0] if isinstance(args[0], Master) and out is args[0].inner else out

    def fsdp_pre_all_gather(
        self,
        mesh: disttrain.DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        assert isinstance(module, nn.Linear)
        assert (outer_size[1], 1) == tuple(outer_stride)
        assert isinstance(mp_policy, MixedPrecisionPolicy)
        return quantized(self.inner), mesh.size()

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        codes, scales = outputs
        assert (codes.dtype, scales.shape) == (torch.int8, (metadata,))
        if out is not None:
            assert isinstance(out, Coded)
            assert out.codes.untyped_storage().data_ptr() == codes.untyped_storage().data_ptr()
            return None
        return Coded(codes, scales, param_dtype), (codes, scales)


class Coded(torch.Tensor):
    """8 bits with a scale per rank's rows; anything computed with it is computed with its values."""

    @staticmethod
    def __new__(
        cls, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None = None
    ) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, shape or codes.shape, dtype=dtype, device=codes.device)

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None = None
    ) -> None:
        self.codes, self.scales = codes, scales

    __torch_function__ = torch._C._disabled_torch_function_impl

    def values(self) -> torch.Tensor:
        rows = self.codes.view(len(self.scales), -1).to(self.dtype) * self.scales[:, None].to(self.dtype)
        return rows.view(self.codes.shape)[: self.shape[0]]

    @classmethod
    def __torch_dispatch__(cls, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.as_strided.default):
            shape = tuple(args[1]) if func is aten.as_strided.default else tuple(args[0].shape)
            return Coded(args[0].codes, args[0].scales, args[0].dtype, shape)
        values = tree_map_only(Coded, lambda one: one.values(), (args, kwargs or {}))
        return func(*values[0], **values[1])


class Simulated(nn.Linear):
    """The same on one process: rows of each rank rounded by a scale of their own, gradients passed straight through."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = [codes * scale for codes, scale in map(quantized, self.weight.detach().chunk(self.num_ranks))]
        weight = self.weight + (torch.cat(rounded) - self.weight).detach()
        return nn.functional.linear(x, weight, self.bias)


def model_of(num_ranks: int) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(Simulated(6, 8), nn.GELU(), Simulated(8, 7), nn.LayerNorm(7))
    for layer in layers:
        layer.num_ranks = num_ranks
    return layers


def extended(reference: nn.Module, **options: object) -> nn.Module:
    model = nn.Sequential(*copy.deepcopy(list(reference)))
    for place in (0, 2):
        linear = nn.Linear(reference[place].in_features, reference[place].out_features)
        linear.load_state_dict(reference[place].state_dict())
        linear.weight = nn.Parameter(Master(linear.weight.detach()))
        model[place] = fully_shard(linear, **options)
    return fully_shard(model, **options)


class Dtypes:
    """What the collectives carried."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, torch.dtype]] = []

    def enqueued(self, call: Call) -> None:
        self.seen += [(call.operation, tensor.dtype) for tensor in call.inputs]

    def completed(self, call: Call, error: Exception | None) -> None:
        """Only the beginning is recorded."""


def assert_same_parameters(model: nn.Module, reference: nn.Module) -> None:
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        local = p.to_local()
        local = local.inner if isinstance(local, Master) else local
        whole = DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
        torch.testing.assert_close(whole.full_tensor(), q)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("reshard", [None, False, 1])
def test_training_equals_its_simulation(reshard: bool | int | None) -> None:
    rank, num_ranks = disttrain.get_rank(), disttrain.get_world_size()
    reference = model_of(num_ranks)
    model = extended(reference, reshard_after_forward=reshard)
    assert isinstance(model[0].weight, DTensor)
    assert isinstance(model[0].weight.to_local(), Master)
    world, dtypes = disttrain.current_world(), Dtypes()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one in (model, reference)]
    losses = []
    for step in range(4):
        x = torch.randn(2 * num_ranks, 6, generator=torch.Generator().manual_seed(step))
        if step == 3:
            world.add_observer(dtypes)
        loss = model(x.chunk(num_ranks)[rank]).tanh().square().mean()
        loss.backward()
        reference(x).tanh().square().mean().backward()
        world.remove_observer(dtypes) if step == 3 else None
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda t, name=name: f"{name}: {t}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert_same_parameters(model, reference)
    if num_ranks > 1:
        assert ("all_gather_into_tensor", torch.uint8) in dtypes.seen
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def own_step(model: nn.Module, reference: nn.Module, step: int) -> None:
    """A step of both by SGD, on this rank's rows and on all."""
    rank, num_ranks = disttrain.get_rank(), disttrain.get_world_size()
    x = torch.randn(2 * num_ranks, 6, generator=torch.Generator().manual_seed(step))
    model(x.chunk(num_ranks)[rank]).square().mean().backward()
    reference(x).square().mean().backward()
    for one in (model, reference):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_on_the_host_in_16_bits_and_accumulating() -> None:
    reference = model_of(2)
    model = extended(reference, offload_policy=CPUOffloadPolicy())
    for step in range(2):
        own_step(model, reference, step)
    assert_same_parameters(model, reference)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = extended(reference, mp_policy=policy)
    x = torch.ones(2, 6)
    for _ in range(2):
        assert model(x).dtype == torch.bfloat16
        model.set_requires_gradient_sync(False)
        model(x).float().sum().backward()
        model.set_requires_gradient_sync(True)
        model(x).float().sum().backward()
    assert model[0].weight.grad.dtype == torch.float32
    assert model[0].weight.grad.full_tensor().isfinite().all()


@on_ranks(2)
def test_copies_and_states_of_such_modules() -> None:
    reference = model_of(2)
    model = extended(reference)
    for step in range(2):
        own_step(model, reference, step)
        twin, expected = copy.deepcopy(model), copy.deepcopy(reference)
        own_step(twin, expected, 5)
        assert_same_parameters(twin, expected)
        other = extended(model_of(2))
        other.load_state_dict(twin.state_dict(), assign=bool(step))
        assert_same_parameters(other, expected)
        own_step(other, expected, 6)
        assert_same_parameters(other, expected)
    assert_same_parameters(model, reference)
    handle = model[2].register_forward_pre_hook(_fail)
    with pytest.raises(ArithmeticError):
        own_step(model, reference, 7)
    handle.remove()
    own_step(model, reference, 8)
    assert_same_parameters(model, reference)


def _fail(*_: object) -> None:
    raise ArithmeticError("bad batch")


@on_ranks(4)
def test_the_mesh_is_that_of_the_ranks_that_share_it() -> None:
    mesh = disttrain.init_device_mesh("cpu", (2, 2))
    reference = model_of(2)
    model = extended(reference, mesh=mesh)
    for step in range(2):
        own_step(model, reference, step)
    assert_same_parameters(model, reference)


@on_ranks(2)
def test_half_a_protocol_and_another_dim_are_refused() -> None:
    class Half(Master):
        fsdp_post_all_gather = property()

    linear = nn.Linear(4, 4)
    linear.weight = nn.Parameter(Half(linear.weight.detach()))
    with pytest.raises(ShardingError, match="the Half of parameter weight has fsdp_pre_all_gather alone"):
        fully_shard(linear)
    linear.weight = nn.Parameter(Master(linear.weight.detach().inner))
    with pytest.raises(ShardingError, match="to be cut along dim 1"):
        fully_shard(linear, shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else None)
