"""Plans that hold for other sizes: of a model, none is planned anew, and all is as if it had been."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import disttrain
from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from disttrain.dtensor.dispatch import dispatch
from disttrain.dtensor.spec.layout import forget_plans
from disttrain.mesh import DeviceMesh
from disttrain.testing import run_threads

Call = Callable[[torch.Tensor], Any]
MESHES = [(2,), (2, 2), (1, 2), (2, 1, 2)]


def norm_and_mlp(mesh: DeviceMesh) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.LayerNorm(4), torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4, bias=False)]
    model = torch.nn.Sequential(*layers).double()
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            whole = distribute_tensor(parameter.detach(), mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
            setattr(module, name, torch.nn.Parameter(whole))
    return model


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (2, 2), (1, 2), (4, 1), (2, 2, 2)])
def test_a_model_is_planned_for_all_lengths_at_once(
    mesh_shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[str] = []
    find_rule, propagate, plan = dispatch.find_rule, dispatch.propagate, dispatch._plan
    monkeypatch.setattr(dispatch, "find_rule", lambda call: chosen.append(call.facts.name) or find_rule(call))
    monkeypatch.setattr(
        dispatch, "propagate", lambda call, rule: chosen.append(call.facts.name) or propagate(call, rule)
    )

    monkeypatch.setattr(dispatch, "_plan", lambda wrap, op, *rest: chosen.append(str(op)) or plan(wrap, op, *rest))

    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", mesh_shape)
        model = norm_and_mlp(mesh)
        # The second time there are gradients already. Parts of one row are planned by themselves.
        for length in (16, 16, 24, 32):
            chosen.clear()
            x = distribute_tensor(
                torch.randn(length, length, 4).double(), mesh, [Shard(0)] * mesh.ndim, src_data_rank=None
            )
            x.requires_grad_()
            y = model(x)
            (y * y).mean().backward()
            assert isinstance(x.grad, DTensor)
            if length > 16:
                assert chosen == []

    disttrain.init_process_group("fake", rank=0, world_size=torch.Size(mesh_shape).numel())
    try:
        body()
    finally:
        disttrain.destroy_process_group()


CALLS: dict[str, Call] = {
    "flatten": lambda x: x.view(-1, x.shape[-1]),
    "flatten all": lambda x: x.view(-1),
    "split last": lambda x: x.view(*x.shape[:-1], 2, x.shape[-1] // 2),
    "split first": lambda x: x.view(2, x.shape[0] // 2, *x.shape[1:]),
    "split first unevenly": lambda x: x.view(x.shape[0] // 2, 2, *x.shape[1:]),
    "merge last": lambda x: x.view(x.shape[0], -1),
    "merge and split": lambda x: x.view(-1, 2, x.shape[-1] // 2),
    "groups": lambda x: torch.nn.functional.group_norm(x, 1),
    "new dims": lambda x: x.view(1, *x.shape, 1),
    "unsafe": lambda x: torch.ops.aten._unsafe_view(x, [x.shape[0], -1]),
    "expand": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "expand one": lambda x: x[:, :1].expand(*x.shape),
    "transpose": lambda x: x.transpose(0, -1),
    "permute": lambda x: x.permute(1, 2, 0).transpose(0, 1),
    "view of permuted": lambda x: x.transpose(0, 1).contiguous().view(x.shape[1], -1),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "norm of two": lambda x: torch.native_layer_norm(x, x.shape[-2:], None, None, 1e-5)[1],
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x.mean(1),
    "count": lambda x: x / x.numel(),
    "product": lambda x: (
        x * x.detach().redistribute(placements=[Replicate()] * x.device_mesh.ndim) if isinstance(x, DTensor) else x * x
    ),
    "sum": lambda x: x + 3,
    "slice": lambda x: x[..., :2],
    "slice of rows": lambda x: x[1:4],
    "view of a slice": lambda x: x[..., :2].view(-1, *x[..., :2].shape[1:], 1),
    "place": lambda x: x[:, -1],
    "pieces": lambda x: x.split(2, -1)[-1],
    "joined": lambda x: torch.cat([x, x * 2], -1),
    "joined rows": lambda x: torch.cat([x, x * 2]),
    "stacked": lambda x: torch.stack([x, x * 2], 1),
    "squeezed": lambda x: x.unsqueeze(1).squeeze(1),
    "masked": lambda x: x.masked_fill(x > 0, 2.0),
    "written": lambda x: (x * 1).add_(x).mul_(2),
    "gradient of a slice": lambda x: torch.ops.aten.slice_backward(x, [*x.shape[:2], x.shape[2] + 2], 2, 1, -1, 1),
    "gradient of a place": lambda x: torch.ops.aten.select_backward(x, [x.shape[0], 3, *x.shape[1:]], 1, 2),
    "windows": lambda x: torch.nn.functional.max_pool2d(x.unsqueeze(1), 1),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.unsqueeze(1)] * 3),
}


@settings(max_examples=80)
@given(st.data())
def test_what_is_planned_for_one_length_is_right_for_others(data: st.DataObject) -> None:
    """The same result, laid out alike, as if the call had been planned for itself."""
    mesh_shape = data.draw(st.sampled_from(MESHES))
    kinds: list[Placement] = [Shard(0), Shard(0), Shard(1), Shard(2), Replicate(), Partial("sum"), Partial("avg")]
    placements = [data.draw(st.sampled_from(kinds)) for _ in mesh_shape]
    sizes = st.tuples(*[st.sampled_from([1, 2, 4, 6, 8, 12])] * 3)
    first, second = data.draw(sizes), data.draw(sizes)
    calls = [CALLS[name] for name in data.draw(st.lists(st.sampled_from([*CALLS]), min_size=1, max_size=5))]

    def seen(call: Call, x: torch.Tensor) -> Any:
        try:
            result = call(x)
        except (RuntimeError, ValueError) as error:
            return type(error)
        return result.placements, result.shape, result.stride(), result.dtype, result.to_local().shape, result

    plain = [torch.randn(size).double() for size in (first, second)]

    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", mesh_shape)
        before, x = (
            distribute_tensor(
                tensor, mesh, [p if p.is_shard() else Replicate() for p in placements], src_data_rank=None
            ).redistribute(placements=placements)
            for tensor in plain
        )
        for call in calls:
            seen(call, before)
            warm = seen(call, x)
            again = seen(call, x)
            forget_plans()
            fresh = seen(call, x)
            if isinstance(fresh, type):
                assert warm == again == fresh
                continue
            assert warm[:-1] == again[:-1] == fresh[:-1]
            expected = call(plain[1])
            for result in (warm[-1], again[-1], fresh[-1]):
                torch.testing.assert_close(result.full_tensor(), expected)

    run_threads(torch.Size(mesh_shape).numel(), body)
