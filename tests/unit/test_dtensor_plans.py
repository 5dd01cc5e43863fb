"""What is planned once and looked up afterwards, and strided cuts; on ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import disttrain
from disttrain.dtensor import (
    DTensor,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    Spec,
    StridedShard,
    distribute_tensor,
    implicit_replication,
)
from disttrain.dtensor.dispatch import dispatch
from disttrain.dtensor.dispatch.outputs import global_outputs
from disttrain.dtensor.dispatch.outputs.known_results import RESULTS
from disttrain.testing import run_threads

MESH_SHAPES = [(2,), (3,), (2, 2), (2, 3), (1, 3), (2, 1)]


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape)


def count_planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that are planned from now on."""
    planned: list[str] = []
    bind = dispatch.bind

    def counted(wrap: object, call: object, *rest: object) -> object:
        planned.append(call.facts.name)  # type: ignore[attr-defined]
        return bind(wrap, call, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(dispatch, "bind", counted)
    return planned


def test_equal_specs_are_one_object() -> None:
    def body() -> None:
        first, second = disttrain.init_device_mesh("cpu", (1,)), disttrain.init_device_mesh("cpu", (1,))
        assert Layout(first, [Shard(0)]) is Layout(second, (Shard(0),))
        assert Layout(first, [Shard(0)]) is not Layout(first, [Shard(1)])
        layout = Layout(first, [Shard(0)])
        assert Spec.of(layout, (2, 3), torch.float32) is Spec(layout, torch.Size((2, 3)), (3, 1), torch.float32)
        assert Spec.of(layout, (2, 3), torch.float32) is not Spec.of(layout, (3, 2), torch.float32)

    run_threads(1, body)


def test_a_call_is_planned_once_and_not_again_for_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = count_planned(monkeypatch)

    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        for num_rows in (4, 4, 6, 8):
            x = distribute_tensor(numbers(num_rows, 3), mesh, [Shard(0)], src_data_rank=None)
            for _ in range(2):
                y = x * x
                assert y.shape == (num_rows, 3)
                assert torch.equal(y.to_local(), x.to_local() ** 2)
                assert torch.equal((x * 2.0).to_local(), x.to_local() * 2)
                assert torch.equal((x * 3.0).to_local(), x.to_local() * 3)
        # An uneven size is planned for itself, and so is one of 1, which may be broadcast.
        for num_rows in (5, 1):
            x = distribute_tensor(numbers(num_rows, 3), mesh, [Shard(0)], src_data_rank=None)
            assert (x * x).shape == (num_rows, 3)
            assert torch.equal((x * x).full_tensor(), numbers(num_rows, 3) ** 2)

    run_threads(2, body)
    # On both ranks.
    assert planned.count("aten.mul") == 2 * (1 + 1 + 2)


ATEN = torch.ops.aten
CALLS_OF_ANY_LENGTH: dict[str, Callable[[Any], Any]] = {
    "write": lambda x: (x + 0).add_(x).mul_(2.0).fill_(1.0),
    "views": lambda x: x.transpose(1, 2).unsqueeze(1).squeeze(1).permute(2, 1, 0),
    "of a slice": lambda x: x[..., 2:6].view(-1, 3, 2, 2),
    "places": lambda x: torch.cat([x[:, 1], x[..., 1:4].sum(2), x.split([3, 5], 2)[1].sum(2)], 1),
    "joined": lambda x: torch.cat([x, x * 2], 2),
    "gradient of a slice": lambda x: ATEN.slice_backward(x, [x.shape[0], 3, 12], 2, 2, 10, 1),
    "gradient of a place": lambda x: ATEN.select_backward(x, [x.shape[0], 5, 3, 8], 1, 2),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.view(-1, 3, 2, 4).transpose(1, 2)] * 3),
    "masked": lambda x: x.masked_fill(x > 5, 0.5),
    "convolution": lambda x: torch.nn.functional.conv1d(x, torch.ones(2, 3, 2, dtype=x.dtype)),
}


@pytest.mark.parametrize("name", CALLS_OF_ANY_LENGTH)
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
def test_a_call_of_any_length_is_planned_once(
    name: str, mesh_shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = count_planned(monkeypatch)
    call = CALLS_OF_ANY_LENGTH[name]

    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", mesh_shape)
        for num_rows in (8, 12, 20, 16):
            if num_rows == 20:
                disttrain.barrier()
                planned.clear()
                disttrain.barrier()
            whole = numbers(num_rows, 3, 8)
            x = distribute_tensor(whole, mesh, [Shard(0)] * len(mesh_shape), src_data_rank=None)
            with implicit_replication():
                for _ in range(2):
                    found, expected = call(x), call(whole)
                    assert found.stride() == expected.stride()
                    torch.testing.assert_close(found.full_tensor(), expected)

    run_threads(torch.Size(mesh_shape).numel(), body)
    assert planned == []


def test_parts_of_one_row_are_not_broadcast_where_wholes_are_not() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (4,))

        def rows(num_rows: int) -> torch.Tensor:
            return distribute_tensor(numbers(num_rows, 3), mesh, [Shard(0)], src_data_rank=None)

        assert torch.equal((rows(8) + rows(8)).full_tensor(), 2 * numbers(8, 3))
        with pytest.raises(RuntimeError, match="broadcast"):
            rows(8) + rows(4)
        assert torch.equal((rows(4) + rows(4)).full_tensor(), 2 * numbers(4, 3))

    run_threads(4, body)


def test_a_new_call_has_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keyed: list[str] = []
    key_of_call = dispatch.key_of_call

    def counted(op: Any, *rest: Any) -> Any:
        keyed.append(op.name())
        return key_of_call(op, *rest)

    monkeypatch.setattr(dispatch, "key_of_call", counted)

    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (1,))
        x = distribute_tensor(numbers(7, 2), mesh, [Shard(0)], src_data_rank=None)
        keyed.clear()
        for _ in range(2):
            torch.transpose(x, 0, 1)
            torch.cat([x, x])
            torch._foreach_neg([x, x])

    run_threads(1, body)
    assert keyed == 2 * ["aten::transpose.int", "aten::cat", "aten::_foreach_neg"]


def test_lists_are_planned_once_even_where_something_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[str] = []
    bind_lists = dispatch.bind_lists

    def counted(wrap: Any, op: Any, *rest: Any) -> Any:
        planned.append(op.name())
        return bind_lists(wrap, op, *rest)

    monkeypatch.setattr(dispatch, "bind_lists", counted)

    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        wholes = [numbers(5, 2) + 1, numbers(3) + 2, numbers() + 3]
        sharded = [
            distribute_tensor(whole, mesh, [Shard(0) if whole.ndim else Replicate()], src_data_rank=None)
            for whole in wholes
        ]
        partial = [DTensor.from_local(whole / 2, mesh, [Partial()]) for whole in wholes]
        replicated = [distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None) for whole in wholes]
        for factor in (1.0, 2.0, 3.0):
            for others in (sharded, partial, replicated):
                scaled = torch._foreach_mul(others, factor)
                torch._foreach_add_(scaled, others, alpha=factor)
                for tensor, whole in zip(torch._foreach_add(scaled, replicated), wholes, strict=True):
                    torch.testing.assert_close(tensor.full_tensor(), (2 * factor + 1) * whole)
        for order in (2.0, 1.0, float("inf"), 2.0):
            norms = torch._foreach_norm(sharded, order)
            for norm, whole in zip(norms, wholes, strict=True):
                torch.testing.assert_close(norm.full_tensor(), torch.linalg.vector_norm(whole, order))

    run_threads(2, body)
    assert planned.count("aten::_foreach_mul.Scalar") == 2 * 3
    assert planned.count("aten::_foreach_add_.List") == 2 * 3


def test_a_plan_for_one_order_is_not_taken_for_another() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        x = distribute_tensor(numbers(4, 3), mesh, [Shard(0)], src_data_rank=None)
        for order in (2.0, 3.0, float("inf"), 2.0):
            expected = torch.linalg.vector_norm(numbers(4, 3), order)
            torch.testing.assert_close(torch.linalg.vector_norm(x, order).full_tensor(), expected)
        whole = distribute_tensor(torch.arange(6), mesh, [Shard(0)], src_data_rank=None)
        for number in (1, 1.0, True):
            assert torch.equal((whole + number).full_tensor(), torch.arange(6) + number)
            assert (whole + number).dtype == (torch.arange(6) + number).dtype

    run_threads(2, body)


def test_plans_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MAX_PLANS", 8)

    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (1,))
        x = distribute_tensor(numbers(4), mesh, [Shard(0)], src_data_rank=None)
        for number in range(100):
            assert torch.equal((x + number).to_local(), numbers(4) + number)
            assert len(x._spec.plans) <= 8

    run_threads(1, body)


def leaves_whole_blocks(step: tuple[Placement, ...]) -> bool:
    strided = [axis for axis, placement in enumerate(step) if isinstance(placement, StridedShard)]
    return not strided or (len(strided) == 1 and Shard(0) not in step[: strided[0]])


@settings(max_examples=30)
@given(st.data())
def test_strided_cuts_come_and_go_like_others(data: st.DataObject) -> None:
    mesh_shape = data.draw(st.sampled_from(MESH_SHAPES))
    num_blocks = data.draw(st.sampled_from([2, 3]))
    rows = num_blocks * 6 * data.draw(st.integers(0, 2))
    kinds: list[Placement] = [Replicate(), Shard(0), Shard(1), StridedShard(0, num_blocks)]
    path = data.draw(st.lists(st.tuples(*[st.sampled_from(kinds) for _ in mesh_shape]), min_size=1, max_size=4))
    # A later axis finds whole blocks only where an earlier one has left some.
    path = [step for step in path if leaves_whole_blocks(step)]
    whole = numbers(rows, 5)

    def body() -> list[torch.Tensor]:
        mesh = disttrain.init_device_mesh("cpu", mesh_shape)
        tensor = distribute_tensor(whole, mesh, src_data_rank=None)
        found = []
        for step in path:
            tensor = tensor.redistribute(placements=step)
            assert tensor.to_local().shape == tensor._spec.local_shape
            found += [(tensor * 2 + tensor).full_tensor(), tensor.sum(0).full_tensor(), tensor.sum(1).full_tensor()]
        return found

    for found in run_threads(torch.Size(mesh_shape).numel(), body):
        for place, tensor in enumerate(found):
            expected = (3 * whole, whole.sum(0), whole.sum(1))[place % 3]
            torch.testing.assert_close(tensor, expected)


def test_a_strided_cut_is_a_piece_of_every_block() -> None:
    def body() -> list[list[float]]:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(numbers(12), mesh, [StridedShard(0, 3)], src_data_rank=None)
        assert (tensor + tensor).placements == (StridedShard(0, 3),)
        assert tensor.sum().placements == (Partial("sum"),)
        return [tensor.to_local().tolist(), tensor.full_tensor().tolist()]

    first, second = run_threads(2, body)
    assert first[0] == [0, 1, 4, 5, 8, 9]
    assert second[0] == [2, 3, 6, 7, 10, 11]
    assert first[1] == second[1] == list(range(12))


def test_from_one_cut_dim_to_another_is_one_exchange() -> None:
    def body() -> list[str]:
        mesh = disttrain.init_device_mesh("cpu", (3,))
        seen: list[str] = []

        class Watcher:
            def enqueued(self, call: object) -> None:
                seen.append(call.operation)  # type: ignore[attr-defined]

            def completed(self, call: object, error: object) -> None:
                pass

        tensor = distribute_tensor(numbers(5, 4), mesh, [Shard(0)], src_data_rank=None)
        disttrain.current_world().add_observer(Watcher())
        moved = tensor.redistribute(placements=[Shard(1)])
        assert isinstance(moved, DTensor)
        assert moved.to_local().shape == (5, (2, 2, 0)[disttrain.get_rank()])
        operations = list(seen)
        assert torch.equal(moved.full_tensor(), numbers(5, 4))
        return operations

    assert run_threads(3, body) == [["all_to_all"]] * 3


def test_a_list_of_one_tensor_is_a_list() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(numbers(4, 3), mesh, [Shard(0)], src_data_rank=None)
        for split in (torch.unsafe_split, torch.split):
            for _ in range(2):
                (only,) = split(tensor, 3, 1)
                assert torch.equal(only.full_tensor(), numbers(4, 3))
        (row,) = tensor[:1].unbind(0)
        assert row.tolist() == [0, 1, 2]

    run_threads(2, body)


def test_what_comes_of_shapes_is_asked_of_torch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    found = global_outputs._outputs

    def counted(op: Any, *rest: Any) -> Any:
        asked.append(op.name())
        return found(op, *rest)

    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (1,))
        for placement in (Shard(0), Shard(1), Replicate()):
            distribute_tensor(numbers(7, 11), mesh, [placement], src_data_rank=None).cumprod(0)

    monkeypatch.setattr(global_outputs, "_outputs", counted)
    # As if no formula knew it.
    monkeypatch.delitem(RESULTS, torch.ops.aten.cumprod.default)
    for _ in range(2):
        run_threads(1, body)
    assert asked == ["aten::cumprod"]


def test_calls_that_differ_in_the_kind_of_a_number_alone() -> None:
    def dtypes() -> list[torch.dtype]:
        mesh = disttrain.init_device_mesh("cpu", (1,))
        whole = distribute_tensor(torch.tensor([3, 4]), mesh, [Shard(0)], src_data_rank=None)
        return [(whole * number).dtype for number in (True, 1, 1.0, 1 + 0j)]

    assert run_threads(1, dtypes) == [[torch.int64, torch.int64, torch.float32, torch.complex64]]
    torch.set_default_dtype(torch.float64)
    try:
        assert run_threads(1, dtypes) == [[torch.int64, torch.int64, torch.float64, torch.complex128]]
    finally:
        torch.set_default_dtype(torch.float32)
