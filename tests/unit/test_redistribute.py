"""Redistribution plans, and what they do to values on ranks that are threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import disttrain
from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from disttrain.dtensor.redistribute.plan import AllGather, AllReduce, ReduceScatter, Split, merged, plan_redistribute
from disttrain.errors import LayoutError
from disttrain.testing import run_threads
from tests.cases.dtensors import collectives_of

placements_2d = st.lists(
    st.sampled_from([Replicate(), Shard(0), Shard(1), Partial("sum"), Partial("max")]), min_size=1, max_size=3
)


@given(st.data())
def test_a_plan_ends_at_its_target(data: st.DataObject) -> None:
    source = tuple(data.draw(placements_2d))
    target = tuple(
        data.draw(st.lists(st.sampled_from([*source, Replicate()]), min_size=len(source), max_size=len(source)))
    )
    current = list(source)
    for step in plan_redistribute(source, target):
        for axis in step.axes:
            current[axis] = step.result
    assert tuple(current) == target


def test_the_usual_plans_are_one_step() -> None:
    shard, whole, partial = Shard(0), Replicate(), Partial()
    assert plan_redistribute((shard,), (shard,)) == ()
    assert plan_redistribute((shard,), (whole,)) == (AllGather((0,), 0),)
    assert plan_redistribute((whole,), (shard,)) == (Split((0,), 0),)
    assert plan_redistribute((partial,), (whole,)) == (AllReduce((0,), partial),)
    assert plan_redistribute((partial,), (shard,)) == (ReduceScatter((0,), 0, partial),)
    assert plan_redistribute((shard, shard), (shard, whole)) == (AllGather((1,), 0),)


def test_steps_that_do_the_same_along_several_axes_are_one() -> None:
    shard, whole, partial = Shard(0), Replicate(), Partial()
    reduced = merged(
        plan_redistribute((partial, whole, partial), (whole,) * 3), (partial, whole, partial), (), (2, 3, 4)
    )
    assert reduced == (AllReduce((0, 2), partial),)
    source = (shard, partial, shard)
    plan = plan_redistribute(source, (whole,) * 3)
    assert merged(plan, source, (16,), (2, 3, 4)) == (AllGather((0, 2), 0), AllReduce((1,), partial))
    assert merged(plan, source, (18,), (2, 3, 4)) == plan
    mixed = (partial, Partial("max"))
    assert len(merged(plan_redistribute(mixed, (whole,) * 2), mixed, (), (2, 2))) == 2


def test_a_merged_step_is_one_collective() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2, 3))
        whole = torch.arange(24.0).view(12, 2)
        for begin in ((Shard(0), Shard(0)), (Partial(), Partial()), (Partial("max"), Partial("max"))):
            tensor = distribute_tensor(whole, mesh, [Replicate()] * 2).redistribute(placements=begin)
            assert len(collectives_of(lambda tensor=tensor: tensor.redistribute(placements=[Replicate()] * 2))) == 1
            assert torch.equal(tensor.full_tensor(), whole)

    run_threads(6, body)


MESHES = [(2,), (3,), (2, 2), (2, 3)]


@settings(max_examples=25)
@given(st.data())
def test_values_survive_every_redistribution(data: st.DataObject) -> None:
    mesh_shape = data.draw(st.sampled_from(MESHES))
    shape = data.draw(st.tuples(st.integers(1, 12), st.integers(0, 4)))
    kinds = st.sampled_from([Replicate(), Shard(0), Shard(1)])
    begin = data.draw(st.tuples(*[kinds for _ in mesh_shape]))
    with_partial = st.sampled_from([Replicate(), Shard(0), Shard(1), Partial("sum"), Partial("max")])
    path = data.draw(st.lists(st.tuples(*[with_partial for _ in mesh_shape]), max_size=3))
    # Reductions of different kinds do not commute: one kind at a time.
    path = [step for step in path if len({place for place in step if place.is_partial()}) < 2]
    whole = torch.arange(float(shape[0] * shape[1])).view(shape)

    def body() -> torch.Tensor:
        mesh = disttrain.init_device_mesh("cpu", mesh_shape)
        tensor = distribute_tensor(whole, mesh, begin)
        for placements in path:
            tensor = tensor.redistribute(placements=placements)
            assert tensor.placements == placements
            assert tuple(tensor.to_local().shape) == tensor._spec.local_shape
        return tensor.full_tensor()

    for result in run_threads(torch.tensor(mesh_shape).prod().item(), body):
        assert torch.equal(result, whole)


@pytest.mark.parametrize("begin", [Shard(0), Replicate(), Partial("sum")], ids=str)
@pytest.mark.parametrize("end", [Shard(0), Shard(1), Replicate()], ids=str)
def test_the_gradient_of_a_redistribution(begin: Placement, end: Placement) -> None:
    weights = torch.arange(15.0).view(5, 3)

    def body() -> torch.Tensor:
        mesh = disttrain.init_device_mesh("cpu", (3,))
        local = torch.ones(5, 3, requires_grad=True)
        if begin == Shard(0):
            local = torch.ones(distribute_tensor(weights, mesh, [begin])._spec.local_shape, requires_grad=True)
        tensor = DTensor.from_local(local, mesh, [begin], shape=(5, 3))
        part = tensor.redistribute(placements=[end]).to_local()
        (part * distribute_tensor(weights, mesh, [end]).to_local()).sum().backward()
        assert local.grad is not None
        grad_placement = Shard(0) if begin == Shard(0) else Replicate()
        return DTensor.from_local(local.grad, mesh, [grad_placement], shape=(5, 3)).full_tensor()

    for grad in run_threads(3, body):
        assert torch.equal(grad, weights)


def test_other_meshes_and_impossible_placements_are_refused() -> None:
    def body() -> list[str]:
        mesh = disttrain.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        other = disttrain.init_device_mesh("cpu", (2, 1))
        texts = []
        for attempt in (
            lambda: tensor.redistribute(other, [Shard(0), Replicate()]),
            lambda: tensor.redistribute(placements=[Shard(1)]),
            lambda: tensor.redistribute(placements=[Shard(0), Shard(0)]),
            lambda: distribute_tensor(torch.ones(2), mesh, [Partial()]),
            lambda: DTensor.from_local(torch.ones(3), mesh, [Shard(0)], shape=(4,)),
        ):
            with pytest.raises(LayoutError) as caught:
                attempt()
            texts.append(str(caught.value))
        return texts

    texts = run_threads(2, body)[0]
    assert "within one mesh" in texts[0]
    assert "Shard(1) names a dim that a tensor of 1 dims does not have" in texts[1]
    assert "one per axis" in texts[2]
    assert "include Partial" in texts[3]
    assert "brings shape (3,), its part of (4,) is (2,)" in texts[4]


def test_a_part_has_memory_of_its_own() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        own = torch.arange(12.0).view(4, 3)
        whole = distribute_tensor(own, mesh, [Replicate()])
        for placement in (Shard(0), Partial("sum"), Partial("avg")):
            whole.redistribute(placements=[placement]).mul_(2)
            assert torch.equal(whole.to_local(), own)
        part = distribute_tensor(own, mesh, [Shard(0)], src_data_rank=None)
        part.mul_(2)
        assert torch.equal(own, whole.to_local())
        assert part.to_local().untyped_storage().nbytes() == 6 * 4

    run_threads(2, body)


def test_norms_of_16_bits_do_not_overflow() -> None:
    def body() -> float:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        values = distribute_tensor(torch.full((4,), 300.0, dtype=torch.float16), mesh, [Shard(0)])
        return torch.linalg.vector_norm(values).item()

    assert run_threads(2, body) == [600.0, 600.0]
