"""Views of DTensors read and write the memory of what they view, also where they had to move it; most need not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import disttrain
from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard, StridedShard, distribute_tensor
from disttrain.dtensor.rules.reshape import groups_of
from disttrain.errors import LayoutError
from disttrain.testing import run_threads
from tests.cases.dtensors import check_same, collectives_of, counted, laid, placements_of

WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "select": lambda t: t[0].add_(1),
    "select last": lambda t: t[:, -1].mul_(2),
    "item": lambda t: t[1, 2].fill_(7),
    "slice": lambda t: t[1:3].mul_(2),
    "slice steps": lambda t: t[::2, 1::2].fill_(0),
    "assignment": lambda t: t.__setitem__((slice(1, None), 0), -1.0),
    "assignment of itself": lambda t: t.__setitem__(0, t[2] + t[1]),
    "copy": lambda t: t[0].copy_(t[1]),
    "view": lambda t: t.view(2, 10).add_(1),
    "view of a view": lambda t: t.view(-1)[3:17].view(7, 2)[2].neg_(),
    "view of a select": lambda t: t[1].unsqueeze(0).expand(1, 5).t().mul_(3),
    "select of a select": lambda t: t[:, 1][2].mul_(3),
    "transpose": lambda t: t.t()[1].add_(5),
    "diagonal": lambda t: t.diagonal().add_(100),
    "diagonal of a slice": lambda t: t[1:].diagonal(1).zero_(),
    "unbind": lambda t: t.unbind(1)[2].add_(100),
    "split": lambda t: t.split(3)[1].add_(100),
    "twice": lambda t: t[2].add_(1).mul_(2),
    "foreach": lambda t: torch._foreach_mul_([t[2]], 3.0),
    "out": lambda t: torch.add(t[1], t[2], out=t[3]),
    "as_strided": lambda t: t.as_strided((2, 2), (5, 1), 6).mul_(2),
    "squeeze": lambda t: t[0:1].squeeze(0).add_(1),
    "detach": lambda t: t[0].detach().add_(1),
    "unfold": lambda t: t.unfold(0, 2, 2)[0].add_(1),
    "cumsum": lambda t: t[:, 2].cumsum_(0),
}


@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
@pytest.mark.parametrize("name", WRITES)
def test_writing_to_a_view_reaches_the_tensor(name: str) -> None:
    kinds = () if name == "foreach" else ("sum",)  # which takes no partial tensors

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        WRITES[name](tensor)
        return tensor

    def body(mesh_shape: tuple[int, ...]) -> None:
        mesh = disttrain.init_device_mesh("cpu", mesh_shape)
        for placements in placements_of(mesh, 2, kinds):
            (result,) = check_same(changed, [counted(4, 5)], mesh, [placements], with_gradients=False)
            assert result.placements == placements

    run_threads(2, body, (2,))
    run_threads(3, body, (3,))
    run_threads(4, body, (2, 2))


def test_a_view_sees_what_is_written_to_the_tensor() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        for placements in placements_of(mesh, 2):
            plain, tensor = counted(4, 5), laid(counted(4, 5), mesh, placements)
            for one in (plain, tensor):
                one.views = [one[1], one[1][2:], one[:3, 2], one.view(2, 10)[0], one.diagonal()]  # type: ignore[attr-defined]
            for step in range(2):
                for one in (plain, tensor):
                    one.mul_(3)
                    one.views[step].add_(1)  # type: ignore[attr-defined]
                for seen, expected in zip(tensor.views, plain.views, strict=True):  # type: ignore[attr-defined]
                    values = seen.full_tensor() if step else (seen * 1).redistribute().to_local()
                    assert torch.equal(values, expected)
                assert torch.equal(tensor.full_tensor(), plain)

    run_threads(2, body)


@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
def test_gradients_of_tensors_that_are_written_to_by_views() -> None:
    def changed(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor * 2
        copy[1].mul_(3)
        copy[:, 1:3].mul_(5)
        copy.view(2, 10)[1, 3:].mul_(2)
        return copy * copy

    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        for placements in placements_of(mesh, 2):
            check_same(changed, [counted(4, 5)], mesh, [placements])

    run_threads(2, body)


def test_to_the_same_layout_a_view_stays_a_view() -> None:
    def body() -> None:
        tensor = laid(counted(4, 5), disttrain.init_device_mesh("cpu", (2,)), [Shard(0)])
        row = tensor[1]
        row.redistribute(placements=[Replicate()]).add_(1)
        row.redistribute(placements=[Shard(0)]).add_(1)
        expected = counted(4, 5)
        expected[1].add_(1)
        assert torch.equal(tensor.full_tensor(), expected)
        tensor.add_(1)
        assert torch.equal(row.to_local(), expected[1] + 1)
        with torch.inference_mode():
            uncounted = tensor * 1
            row = uncounted[1]
            uncounted.add_(1)
            assert torch.equal((row * 1).to_local(), expected[1] + 2)

    run_threads(2, body)


@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
def test_several_views_across_a_cut_can_be_written_to_at_once() -> None:
    def body() -> None:
        for placement in (Shard(0), Shard(1), Replicate()):
            plain = counted(4, 5)
            tensor = laid(plain, disttrain.init_device_mesh("cpu", (2,)), [placement])
            for one in (plain, tensor):
                torch._foreach_mul_([one[0], one[1], one, one[0]], [3.0, 2.0, 5.0, 7.0])
                torch._foreach_addcdiv_([one[:, 1], one[2]], [one[:, 0], one[3]], [one[:, 2], one[1]], [1.0, 2.0])
                torch.aminmax(one * 1, dim=0, out=(one[3], one[2]))
            torch.testing.assert_close(tensor.full_tensor(), plain)

    run_threads(2, body)


IN_PLACE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "squeeze_": lambda t: t.squeeze_(),
    "squeeze_ dim": lambda t: t.squeeze_(1),
    "squeeze_ dims": lambda t: t.squeeze_((1, -1)),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "transpose_": lambda t: t.transpose_(0, 2),
    "t_": lambda t: t.squeeze_().t_(),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_shape_changes_in_place_show_in_the_tensor(name: str) -> None:
    def body(num_ranks: int) -> None:
        mesh = disttrain.init_device_mesh("cpu", (num_ranks,))
        for placement in (Shard(0), Shard(2), Replicate(), Partial()):
            plain, tensor = counted(4, 1, 5, 1), laid(counted(4, 1, 5, 1), mesh, [placement])
            alias = tensor.detach()
            expected, result = IN_PLACE[name](plain), IN_PLACE[name](tensor)
            assert result is tensor
            assert (tensor.shape, tensor.stride()) == (plain.shape, plain.stride())
            assert alias.shape == (4, 1, 5, 1)
            tensor.add_(1)
            assert torch.equal(tensor.full_tensor(), expected + 1)
            assert torch.equal(alias.full_tensor(), counted(4, 1, 5, 1) + 1)
            row = laid(counted(4, 1, 5, 1), mesh, [placement])[1:2]
            IN_PLACE["squeeze_ dim"](row).add_(1)
            assert row.shape == (1, 5, 1)

    run_threads(2, body, 2)


def test_a_dim_that_is_cut_cannot_be_squeezed_in_place() -> None:
    def body() -> None:
        tensor = laid(counted(4, 1), disttrain.init_device_mesh("cpu", (2,)), [Shard(1)])
        with pytest.raises(LayoutError, match="without the underscore"):
            tensor.squeeze_(1)
        assert tensor.shape == (4, 1)

    run_threads(2, body)


FREE: list[tuple[Placement, Callable[[torch.Tensor], Any], Placement]] = [
    (Shard(0), lambda t: t.view(12, 5), Shard(0)),
    (Shard(1), lambda t: t.view(12, 5), StridedShard(0, 4)),
    (Shard(2), lambda t: t.view(12, 5), Shard(1)),
    (Shard(0), lambda t: t.view(2, 2, 3, 5), Shard(0)),
    (Shard(0), lambda t: t.transpose(0, 2), Shard(2)),
    (Shard(0), lambda t: t[:, 1], Shard(0)),
    (Shard(2), lambda t: t[0, 1], Shard(0)),
    (Shard(1), lambda t: t[1:3, :, ::2], Shard(1)),
    (Shard(0), lambda t: t[:], Shard(0)),
    (Shard(0), lambda t: t[:3], Shard(0)),
    (Shard(0), lambda t: t.unsqueeze(0).expand(6, 4, 3, 5), Shard(1)),
    (Partial(), lambda t: t.view(3, 20)[0], Partial()),
    (Partial("max"), lambda t: t.permute(1, 0, 2).unfold(0, 2, 1)[0], Partial("max")),
    (Shard(0), lambda t: t.repeat(2, 1, 1), StridedShard(0, 2)),
    (Shard(2), lambda t: torch.cat([t, t]), Shard(2)),
    (Shard(0), lambda t: t.tril(), Shard(0)),
    (Shard(2), lambda t: t.flip(0).roll(1, 1), Shard(2)),
]


@pytest.mark.parametrize("place", range(len(FREE)))
def test_these_move_nothing(place: int) -> None:
    begin, view, end = FREE[place]

    def body() -> None:
        tensor = laid(counted(4, 3, 5), disttrain.init_device_mesh("cpu", (2,)), [begin])
        found: list[DTensor] = []
        assert collectives_of(lambda: found.append(view(tensor))) == []
        assert found[0].placements == (end,)

    run_threads(2, body)


def test_what_crosses_a_cut_moves_once_and_only_what_is_needed() -> None:
    def body() -> None:
        tensor = laid(counted(4, 6), disttrain.init_device_mesh("cpu", (2,)), [Shard(0)])
        assert collectives_of(lambda: tensor[1]) == ["broadcast"]
        assert collectives_of(lambda: tensor[1:]) == ["all_to_all"]
        assert tensor[1:].placements == (Shard(0),)
        assert collectives_of(lambda: tensor.split(1)) == ["all_to_all"]
        assert collectives_of(lambda: torch.cat([tensor, tensor])) == ["all_to_all"]
        row = tensor[1]
        assert collectives_of(lambda: row * 2) == []
        assert collectives_of(lambda: row.mul_(2)) == []
        assert collectives_of(lambda: tensor.view(3, 8)) == ["all_gather_into_tensor"]

    run_threads(2, body)


def test_along_an_axis_of_one_rank_every_view_is_a_view() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (1,))
        for dim in range(2):
            tensor = laid(counted(4, 5), mesh, [Shard(dim)])
            begin = tensor.to_local().untyped_storage().data_ptr()
            found: list[DTensor] = []

            def views(tensor: DTensor = tensor, found: list[DTensor] = found) -> None:
                found.extend([tensor[1], tensor[1:], tensor[:, 2], tensor.diagonal(), tensor.unfold(0, 2, 1)])
                found.extend([*tensor.unbind(1), *tensor.split(1), tensor.view(2, 10), tensor.t()])

            assert collectives_of(views) == []
            assert all(view.to_local().untyped_storage().data_ptr() == begin for view in found)

    run_threads(1, body)


@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2), (1, 3)], ids=str)
def test_batch_and_sequence_flatten_and_come_back_for_free(mesh_shape: tuple[int, ...]) -> None:
    whole = counted(8, 12, 4)

    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", mesh_shape)
        for placements in placements_of(mesh, 3):
            if mesh_shape == (1, 3) and Shard(0) in placements:
                continue  # 8 does not divide
            if mesh_shape == (1, 3) and Shard(2) in placements:
                continue
            tensor = laid(whole, mesh, placements)
            found: list[DTensor] = []

            def there_and_back(tensor: DTensor = tensor, found: list[DTensor] = found) -> None:
                flat = tensor.view(96, 4)
                found.extend([flat, flat.view(8, 12, 4)])

            assert collectives_of(there_and_back) == []
            assert found[1].placements == placements
            assert found[1].to_local().data_ptr() == tensor.to_local().data_ptr()
            assert torch.equal(found[0].full_tensor(), whole.view(96, 4))

    run_threads(torch.Size(mesh_shape).numel(), body)


factors = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_regrouping_keeps_values(data: st.DataObject) -> None:
    sizes = data.draw(factors)
    old, new = _grouped(data, sizes), _grouped(data, sizes)
    mesh_shape = data.draw(st.sampled_from([(2,), (3,), (2, 2), (1, 3), (2, 1)]))
    kinds = st.sampled_from([Replicate(), *(Shard(dim) for dim in range(len(old)))])
    placements = data.draw(st.tuples(*[kinds for _ in mesh_shape]))

    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", mesh_shape)
        check_same(lambda t: t.view(new) + 0, [counted(*old)], mesh, [placements], with_gradients=False)
        check_same(lambda t: t.view(new).view(old).mul_(2), [counted(*old)], mesh, [placements], with_gradients=False)

    run_threads(torch.Size(mesh_shape).numel(), body)


def _grouped(data: st.DataObject, sizes: list[int]) -> list[int]:
    """The same number of elements in other dims."""
    dims = [1]
    for size in sizes:
        if data.draw(st.booleans()):
            dims.append(size)
        else:
            dims[-1] *= size
    return dims


@given(st.data())
def test_groups_hold_the_same_elements(data: st.DataObject) -> None:
    sizes = data.draw(factors)
    old, new = _grouped(data, sizes), _grouped(data, sizes)
    groups = groups_of(old, new)
    assert [dim for group in groups for dim in group.old] == list(range(len(old)))
    assert [dim for group in groups for dim in group.new] == list(range(len(new)))
    for group in groups:
        assert torch.Size(old[dim] for dim in group.old).numel() == torch.Size(new[dim] for dim in group.new).numel()


def test_a_part_of_other_strides_than_the_whole_is_viewed_by_way_of_a_copy() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        rank = disttrain.get_rank()
        local = counted(3, 2, start=10 * rank).t() if rank else counted(2, 3)
        tensor = DTensor.from_local(local, mesh, [Shard(0)])
        expected = tensor.full_tensor()
        flat = tensor.view(12)
        flat.add_(1)
        assert torch.equal(tensor.full_tensor(), expected + 1)
        assert torch.equal(flat.full_tensor(), (expected + 1).view(12))

    run_threads(2, body)


def test_as_strided_past_the_tensor_is_refused_on_all_ranks() -> None:
    def body() -> None:
        tensor = laid(counted(4, 5), disttrain.init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(LayoutError, match="counted beyond a tensor"):
            tensor.t().as_strided((2, 2), (5, 1))

    run_threads(2, body)


def test_bits_viewed_as_another_dtype() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        for dim in (0, 1):
            whole = counted(4, 6)
            for dtype in (torch.int64, torch.float32, torch.uint8):
                check_same(lambda t, d=dtype: t.view(d), [whole], mesh, [[Shard(dim)]], with_gradients=False)
            check_same(torch.view_as_complex, [counted(4, 2)], mesh, [[Shard(dim)]])
            check_same(torch.view_as_real, [counted(4, 2, dtype=torch.complex128)], mesh, [[Shard(dim)]])

    run_threads(2, body)


def test_conjugates_are_views() -> None:
    def conjugated(tensor: torch.Tensor) -> torch.Tensor:
        tensor.conj().view(8).mul_(1 + 2j)
        tensor.conj().imag.add_(1)
        return tensor.conj()

    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        whole = torch.complex(counted(4, 2), counted(4, 2, start=9))
        for placements in placements_of(mesh, 2):
            check_same(conjugated, [whole], mesh, [placements], with_gradients=False)
            check_same(lambda t: t.conj() * 2, [whole], mesh, [placements], with_gradients=False)

    run_threads(2, body)


def test_empty_tensors_take_any_shape() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        for placement in (Shard(0), Shard(1), Replicate(), Partial()):
            for view in (lambda t: t.view(4, 0), lambda t: t.view(-1), lambda t: t.view(0, 2, 2)):
                check_same(view, [counted(0, 4)], mesh, [[placement]])

    run_threads(2, body)


def test_distribution_of_a_view_is_its_own() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(counted(4, 5), mesh, [Shard(0)])
        row = tensor[0].clone()
        row.add_(1)
        assert torch.equal(tensor.full_tensor(), counted(4, 5))
        assert torch.equal(row.full_tensor(), counted(5) + 1)

    run_threads(2, body)
