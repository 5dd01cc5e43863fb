"""DTensors on real ranks, judged by the same computation on plain tensors."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from disttrain.errors import LayoutError
from disttrain.testing.pytest_plugin import on_ranks

PLACEMENTS: list[Placement] = [Shard(0), Shard(1), Replicate()]


def mesh_of_all() -> disttrain.DeviceMesh:
    return disttrain.init_device_mesh("cpu", (disttrain.get_world_size(),), mesh_dim_names=("dp",))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@on_ranks(1, 2, 3)
def test_distribute_and_gather_uneven_and_empty_parts() -> None:
    mesh = mesh_of_all()
    for shape in ((7, 3), (2, 5), (1,), (4, 0, 2)):
        # Only the first rank's values count.
        whole = normal(*shape)
        mine = whole if disttrain.get_rank() == 0 else torch.zeros(shape, dtype=whole.dtype)
        for dim in range(len(shape)):
            tensor = distribute_tensor(mine, mesh, [Shard(dim)])
            chunks = whole.chunk(mesh.size(), dim)
            position = mesh.get_local_rank()
            if position < len(chunks):
                assert torch.equal(tensor.to_local(), chunks[position])
            else:
                assert tensor.to_local().numel() == 0
            assert torch.equal(tensor.full_tensor(), whole)
            assert (tensor.shape, tensor.stride()) == (whole.shape, whole.stride())


@on_ranks(2, 3)
def test_pointwise_operators_follow_the_cheapest_layout() -> None:
    mesh = mesh_of_all()
    x, y, row = normal(5, 4), normal(5, 4, seed=1), normal(1, 4, seed=2)
    for left in PLACEMENTS:
        for right in PLACEMENTS:
            a, b = distribute_tensor(x, mesh, [left]), distribute_tensor(y, mesh, [right])
            c = distribute_tensor(row, mesh, [right])
            torch.testing.assert_close((a * b + 2).sqrt().full_tensor(), (x * y + 2).sqrt(), equal_nan=True)
            torch.testing.assert_close((a - c).exp().full_tensor(), (x - row).exp())
            torch.testing.assert_close(torch.where(a > 0, a, b).full_tensor(), torch.where(x > 0, x, y))
            a += b
            a.mul_(0.5).clamp_(min=-1)
            assert a.placements == (left,)
            torch.testing.assert_close(a.full_tensor(), ((x + y) * 0.5).clamp(min=-1))


@on_ranks(2, 3)
def test_reductions_of_sharded_and_reduced_dims() -> None:
    mesh = mesh_of_all()
    x = normal(5, 4)
    for placement in PLACEMENTS:
        tensor = distribute_tensor(x, mesh, [placement])
        for name in ("sum", "mean", "amax", "amin"):
            for dim in (0, 1, (0, 1)):
                for keepdim in (False, True):
                    result = getattr(tensor, name)(dim=dim, keepdim=keepdim)
                    torch.testing.assert_close(result.full_tensor(), getattr(x, name)(dim=dim, keepdim=keepdim))
        for order in (1.0, 2.0, 3.0, float("inf")):
            norm = torch.linalg.vector_norm(tensor, order)
            torch.testing.assert_close(norm.full_tensor(), torch.linalg.vector_norm(x, order))
            assert norm.item() == pytest.approx(torch.linalg.vector_norm(x, order).item())
        assert tensor.sum().item() == pytest.approx(x.sum().item())
        assert bool(tensor.max() == x.max())


@on_ranks(2)
def test_partial_values_are_linear_or_reduced() -> None:
    mesh = mesh_of_all()
    x = distribute_tensor(normal(4, 3), mesh, [Shard(0)])
    total, expected = x.sum(0), normal(4, 3).sum(0)
    assert total.placements == (Partial(),)
    assert (total + total).placements == (Partial(),)
    assert (total * 3).placements == (Partial(),)
    torch.testing.assert_close((total + total).full_tensor(), 2 * expected)
    torch.testing.assert_close((total + 1).full_tensor(), expected + 1)
    torch.testing.assert_close((total * total).full_tensor(), expected * expected)
    torch.testing.assert_close(total.relu().full_tensor(), expected.relu())
    total += 1
    assert total.placements == (Partial(),)
    torch.testing.assert_close(total.full_tensor(), expected + 1)
    total.relu_().mul_(total)
    torch.testing.assert_close(total.full_tensor(), (expected + 1).relu() ** 2)


@on_ranks(2, 3)
def test_random_values_are_those_of_a_single_process() -> None:
    mesh = mesh_of_all()
    fills = [
        lambda t: nn.init.normal_(t, std=0.3),
        lambda t: nn.init.uniform_(t, -1, 1),
        lambda t: nn.init.trunc_normal_(t, std=0.2),
        nn.init.xavier_uniform_,
        lambda t: nn.init.kaiming_uniform_(t, a=5**0.5),
        lambda t: t.bernoulli_(0.4),
    ]
    for placement in PLACEMENTS:
        for fill in fills:
            plain = torch.zeros(5, 4)
            torch.manual_seed(11)
            fill(plain)
            after = torch.rand(1)
            sharded = distribute_tensor(torch.zeros(5, 4), mesh, [placement])
            torch.manual_seed(11)
            fill(sharded)
            # Whatever random number comes next is the same as well.
            assert torch.equal(torch.rand(1), after)
            assert torch.equal(sharded.full_tensor(), plain)


@on_ranks(2)
def test_without_a_rule_an_operator_is_right_and_says_that_it_gathers() -> None:
    mesh = mesh_of_all()
    x = normal(5, 4)
    tensor = distribute_tensor(x, mesh, [Shard(0)])
    with pytest.warns(UserWarning, match=r"aten\.renorm has no sharding rule; its operands are gathered"):
        torch.testing.assert_close(tensor.renorm(2, 0, 1.0).full_tensor(), x.renorm(2, 0, 1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values, places = tensor.sort(0)
        torch.testing.assert_close(values.full_tensor(), x.sort(0).values)
        assert torch.equal(places.full_tensor(), x.sort(0).indices)
        # What is written to keeps its layout.
        tensor.cumsum_(0)
        assert tensor.placements == (Shard(0),)
        torch.testing.assert_close(tensor.full_tensor(), x.cumsum(0))
    with pytest.raises(LayoutError, match=r"meets a plain tensor of shape \(5, 4\)"):
        tensor + x


@on_ranks(2, 3)
@pytest.mark.parametrize("kind", ["foreach", "for-loop", "fused"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adam"])
def test_optimizers_run_on_shards(kind: str, optimizer: str) -> None:
    mesh = mesh_of_all()
    shapes = [(7, 3), (2, 2), (5,)]
    plain = [nn.Parameter(normal(*shape, seed=seed)) for seed, shape in enumerate(shapes)]
    sharded = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in plain]
    options = {"foreach": kind == "foreach"} if kind != "fused" else {"fused": True}
    if optimizer == "SGD":
        options["momentum"] = 0.9
    optimizers = [getattr(torch.optim, optimizer)(params, lr=0.1, **options) for params in (plain, sharded)]
    for step in range(3):
        for seed, (p, s) in enumerate(zip(plain, sharded, strict=True)):
            p.grad = normal(*p.shape, seed=100 * step + seed)
            s.grad = distribute_tensor(p.grad, mesh, [Shard(0)])
        norms = [nn.utils.clip_grad_norm_(params, 1.0) for params in (plain, sharded)]
        assert isinstance(norms[1], DTensor)
        torch.testing.assert_close(norms[1].full_tensor(), norms[0])
        for one in optimizers:
            one.step()
    for p, s in zip(plain, sharded, strict=True):
        assert isinstance(s, DTensor)
        torch.testing.assert_close(s.full_tensor(), p)


@on_ranks(2)
def test_the_largest_gradient_may_lie_beside_an_empty_part() -> None:
    mesh = mesh_of_all()
    grad = torch.tensor([[3.0, -4.0]])
    parameter = nn.Parameter(distribute_tensor(torch.zeros(1, 2), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(grad, mesh, [Shard(0)])
    for foreach in (True, False):
        norm = nn.utils.get_total_norm([parameter.grad], float("inf"), foreach=foreach)
        assert norm.item() == 4.0


@on_ranks(2)
def test_to_local_and_from_local_carry_gradients() -> None:
    mesh, rank = mesh_of_all(), disttrain.get_rank()
    local = torch.full((2, 2), float(rank), requires_grad=True)
    tensor = DTensor.from_local(local, mesh, [Shard(0)])
    assert tensor.shape == (4, 2)
    (tensor * 3).to_local().pow(2).sum().backward()
    assert local.grad is not None
    assert local.grad.eq(18.0 * rank).all()

    whole = distribute_tensor(torch.ones(2), mesh, [Replicate()]).requires_grad_()
    (whole.to_local(grad_placements=[Partial()]) * (rank + 1)).sum().backward()
    assert isinstance(whole.grad, DTensor)
    assert whole.grad.full_tensor().tolist() == [3.0, 3.0]


@on_ranks(2)
def test_modules_copy_cast_and_move() -> None:
    mesh = mesh_of_all()
    module = nn.Linear(3, 5)
    weight = module.weight.detach().clone()
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    twin = copy.deepcopy(module)
    assert isinstance(twin.weight, DTensor)
    assert twin.weight.to_local().data_ptr() != module.weight.to_local().data_ptr()
    twin.double()
    assert (twin.weight.dtype, twin.weight.to_local().dtype) == (torch.float64, torch.float64)
    torch.testing.assert_close(twin.weight.full_tensor(), weight.double())
    state = module.state_dict()
    twin.load_state_dict(state)
    torch.testing.assert_close(twin.weight.full_tensor(), weight.double())
    empty = twin.to_empty(device="meta")
    assert empty.weight.to_local().device.type == "meta"
    assert "Shard(0)" in repr(module.weight)
    assert "dp=2" in repr(module.weight)


@on_ranks(2)
def test_clipping_takes_sharded_and_plain_gradients_together() -> None:
    mesh = mesh_of_all()
    plain = [nn.Parameter(normal(5, 3)), nn.Parameter(normal(4, seed=1))]
    for order in ((0, 1), (1, 0)):
        for foreach in (None, True, False):
            mixed: list[nn.Parameter] = []
            for place in order:
                plain[place].grad = normal(*plain[place].shape, seed=2 + place)
                value, grad = plain[place].detach().clone(), plain[place].grad.clone()
                if place == 0:
                    value, grad = (distribute_tensor(one, mesh, [Shard(0)]) for one in (value, grad))
                mixed.append(nn.Parameter(value))
                mixed[-1].grad = grad
            expected = nn.utils.clip_grad_norm_(plain, 0.5, foreach=foreach)
            norm = nn.utils.clip_grad_norm_(mixed, 0.5, foreach=foreach)
            torch.testing.assert_close(norm.full_tensor(), expected)
            for place, parameter in zip(order, mixed, strict=True):
                grad = parameter.grad.full_tensor() if place == 0 else parameter.grad
                assert type(grad) is torch.Tensor
                torch.testing.assert_close(grad, plain[place].grad)


@on_ranks(2)
def test_stacking_counts_plain_and_negative_numbers_once() -> None:
    mesh = mesh_of_all()
    x = normal(5, 3)
    tensor = distribute_tensor(x, mesh, [Shard(0)])
    two = torch.tensor(2.0, dtype=x.dtype)
    minus = distribute_tensor(-two, mesh, [Replicate()])
    norm = torch.linalg.vector_norm(x)
    torch.testing.assert_close(torch.stack([tensor.sum(), two]).full_tensor(), torch.stack([x.sum(), two]))
    stacked = torch.stack([torch.linalg.vector_norm(tensor), minus])
    torch.testing.assert_close(stacked.full_tensor(), torch.stack([norm, -two]))


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
def test_out_is_written_to_whatever_its_layout() -> None:
    mesh = mesh_of_all()
    x, y = normal(5, 3), normal(5, 3, seed=1)
    a, b = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(y, mesh, [Shard(1)])
    for placement in PLACEMENTS:
        out = distribute_tensor(torch.zeros_like(x), mesh, [placement])
        assert torch.add(a, b, out=out) is out
        assert out.placements == (placement,)
        torch.testing.assert_close(out.full_tensor(), x + y)
    row = distribute_tensor(torch.zeros_like(x[0]), mesh, [Shard(0)])
    torch.sum(a, 0, out=row)
    torch.testing.assert_close(row.full_tensor(), x.sum(0))


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
def test_reductions_without_dims_and_results_that_depend_on_values() -> None:
    mesh = mesh_of_all()
    x = normal(5, 4)
    for placement in PLACEMENTS:
        tensor = distribute_tensor(x, mesh, [placement])
        for operation in (
            lambda t: t.sum(dim=[]),
            lambda t: t.amax(dim=()),
            lambda t: t.sum().sum(0),
            lambda t: t.mean().amax(-1),
            torch.nonzero,
            lambda t: t[t > 0],
        ):
            torch.testing.assert_close(operation(tensor).full_tensor(), operation(x))


@on_ranks(2)
def test_bernoulli_looks_at_its_probabilities() -> None:
    mesh = mesh_of_all()
    certain = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    tensor = distribute_tensor(torch.full((5,), 7.0), mesh, [Shard(0)])
    tensor.bernoulli_(distribute_tensor(certain, mesh, [Shard(0)]))
    assert torch.equal(tensor.full_tensor(), certain)


@on_ranks(2)
def test_detach_and_data_share_memory_and_data_can_be_assigned() -> None:
    mesh = mesh_of_all()
    x = normal(5, 3)
    for placement in (*PLACEMENTS, Partial("avg")):
        tensor = DTensor.from_local(x.clone(), mesh, [placement]) if placement.is_partial() else None
        tensor = distribute_tensor(x, mesh, [placement]) if tensor is None else tensor
        tensor.detach().mul_(2)
        torch.testing.assert_close(tensor.full_tensor(), 2 * x)
    parameter = nn.Parameter(distribute_tensor(x, mesh, [Shard(0)]))
    parameter.data.mul_(3)
    parameter.data = parameter.data.float() / 2
    assert (parameter.dtype, parameter.to_local().dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(parameter.full_tensor(), (1.5 * x).float())
    with pytest.raises(LayoutError, match="a plain tensor of shape"):
        parameter.data = x


@on_ranks(2)
def test_the_gradient_of_a_sum_of_parts_can_be_clipped_and_added_to() -> None:
    parameter = distribute_tensor(normal(5, 3), mesh_of_all(), [Shard(0)]).requires_grad_()
    parameter.to_local().sum().backward()
    parameter.grad.mul_(2)
    parameter.to_local().sum().backward()
    assert torch.equal(parameter.grad.full_tensor(), torch.full((5, 3), 3.0, dtype=torch.float64))


@on_ranks(2)
def test_a_fused_optimizer_writes_to_states_of_another_layout() -> None:
    mesh = mesh_of_all()
    plain = nn.Parameter(normal(5))
    sharded = nn.Parameter(distribute_tensor(plain.detach(), mesh, [Shard(0)]))
    optimizers = [torch.optim.AdamW([one], lr=0.1, fused=True) for one in (plain, sharded)]
    for step in range(3):
        plain.grad = normal(5, seed=step)
        sharded.grad = distribute_tensor(plain.grad, mesh, [Replicate()])
        for optimizer in optimizers:
            optimizer.step()
        state = optimizers[1].state[sharded]
        state["exp_avg"] = state["exp_avg"].redistribute(placements=[Replicate()])
    torch.testing.assert_close(sharded.full_tensor(), plain)
    with pytest.raises(LayoutError, match="does not work element by element"):
        torch._foreach_max([sharded.detach()])


@on_ranks(2, 3)
def test_extrema_over_gloo_keep_every_type_and_what_is_not_a_number() -> None:
    mesh = mesh_of_all()
    for row in (0, 2, 4):
        x = normal(5, 4)
        x[row, 1], x[row, 2] = float("nan"), float("-inf")
        tensor = distribute_tensor(x, mesh, [Shard(0)])
        for name in ("amax", "amin", "argmax"):
            found = getattr(tensor, name)(0).full_tensor()
            torch.testing.assert_close(found, getattr(x, name)(0), equal_nan=True)
        assert tensor.max().isnan().full_tensor()
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16):
        x = (normal(5, 4) * 3).to(dtype)
        tensor = distribute_tensor(x, mesh, [Shard(0)])
        for function in (lambda t: t.amax(0), lambda t: t.max(0).values, lambda t: t.any(0), lambda t: t.all()):
            assert torch.equal(function(tensor).full_tensor(), function(x))
