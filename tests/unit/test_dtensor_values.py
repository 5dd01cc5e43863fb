"""DTensors meet Python, plain tensors, bits and random numbers: always the global value, or a refusal on all ranks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import disttrain
from disttrain.dtensor import (
    DTensor,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    Spec,
    distribute_tensor,
    empty,
    full,
    implicit_replication,
    ones,
    rand,
    randn,
    zeros,
)
from disttrain.dtensor.draws import draw_part
from disttrain.errors import LayoutError
from disttrain.testing import run_threads

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule")

PLACEMENTS: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate())


def mesh_of_all() -> disttrain.DeviceMesh:
    return disttrain.init_device_mesh("cpu", (disttrain.get_world_size(),))


def refuses(message: str, call: Any) -> None:
    with pytest.raises(LayoutError, match=message):
        call()


def test_python_values_are_global() -> None:
    def body() -> None:
        mesh = mesh_of_all()
        total = DTensor.from_local(torch.tensor(float(disttrain.get_rank() + 1)), mesh, [Partial()])
        assert (total.item(), float(total), int(total), bool(total), total.tolist()) == (3.0, 3.0, 3, True, 3.0)
        assert f"{total:.1f}" == "3.0"
        whole = torch.arange(6.0).reshape(3, 2)
        for placement in PLACEMENTS:
            tensor = distribute_tensor(whole, mesh, [placement])
            assert tensor.tolist() == whole.tolist()
            assert np.array_equal(tensor.numpy(), whole.numpy())
            assert np.array_equal(np.asarray(tensor), whole.numpy())
            assert torch.equal(tensor, distribute_tensor(whole, mesh, [Shard(0)]))
            assert torch.allclose(tensor, tensor + 1e-9)
            assert torch.equal(tensor.nonzero().full_tensor(), whole.nonzero())

    run_threads(2, body)


def test_a_view_without_a_rule_reads_and_writes_what_it_views(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whichever views have rules, one that has none must be right.
    monkeypatch.setattr("disttrain.dtensor.dispatch.dispatch.find_rule", lambda call: None)

    def body() -> None:
        whole = torch.arange(6.0).reshape(3, 2)
        tensor = distribute_tensor(whole, mesh_of_all(), [Shard(0)])
        row = tensor[0]
        again = row.view(2, 1)
        assert (again + 1).tolist() == [[1.0], [2.0]]
        for write in (
            lambda row, _: row.add_(1),
            lambda _, again: again.detach().mul_(2),
            lambda row, _: torch.add(row, 1, out=row),
        ):
            write(row, again)
            write(whole[0], whole[0].view(2, 1))
            assert tensor.tolist() == whole.tolist()
        tensor.mul_(2)
        whole.mul_(2)
        assert (row + 1).tolist() == (whole[0] + 1).tolist()
        assert row.tolist() == whole[0].tolist()
        assert (again.to_local() * 2).tolist() == (whole[0].view(2, 1) * 2).tolist()
        assert tensor[1].tolist() == [4.0, 6.0]

    run_threads(2, body)


def test_conjugates_are_no_bits_of_parts() -> None:
    def body() -> None:
        mesh = mesh_of_all()
        z = torch.complex(torch.arange(4.0), torch.ones(4))
        for whole in (z, z.conj()):
            tensor = distribute_tensor(whole, mesh, [Shard(0)])
            conjugate = tensor.conj()
            assert not conjugate.to_local().is_conj()
            assert torch.equal((conjugate * tensor).full_tensor(), whole.conj() * whole)
            assert torch.equal(conjugate.imag.full_tensor(), whole.conj().imag)
            local = DTensor.from_local(tensor.to_local().conj(), mesh, [Shard(0)])
            assert torch.equal((local + 0).full_tensor(), whole.conj())

    run_threads(2, body)


def test_plain_tensors_may_be_numbers_or_said_to_be_replicated() -> None:
    def body() -> None:
        mesh = mesh_of_all()
        whole, row = torch.arange(6.0).reshape(3, 2), torch.tensor([1.0, 2.0])
        tensor = distribute_tensor(whole, mesh, [Shard(0)])
        assert torch.equal((tensor + torch.ones(1)).full_tensor(), whole + 1)
        refuses(r"meets a plain tensor of shape \(2,\)", lambda: tensor * row)
        with implicit_replication():
            assert torch.equal((tensor * row).full_tensor(), whole * row)
            refuses("meets a plain tensor", lambda: row.mul_(tensor[0]))
        refuses("meets a plain tensor", lambda: tensor * row)
        out = torch.empty(0)
        torch.cumsum(tensor, 0, out=out)
        assert torch.equal(out, whole.cumsum(0))
        # A gradient's formula makes plain tensors of its own; a hook of the user's does not.
        leaf = tensor.clone().requires_grad_()
        leaf.cumprod(0).sum().backward()
        plain = whole.clone().requires_grad_()
        plain.cumprod(0).sum().backward()
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad)
        other = (leaf * 2).sum(0)
        other.register_hook(lambda grad: grad * row)
        refuses("meets a plain tensor", lambda: other.sum().backward())

    run_threads(2, body)


def test_what_cannot_be_is_refused_on_all_ranks() -> None:
    def body() -> None:
        mesh, single = mesh_of_all(), disttrain.init_device_mesh("cpu", (2, 1))
        whole = torch.arange(6.0).reshape(3, 2)
        tensor = distribute_tensor(whole, mesh, [Shard(0)])
        refuses("sparse", tensor.to_sparse)
        refuses("2 meshes", lambda: tensor + distribute_tensor(whole, single))
        refuses("other memory", lambda: tensor.resize_(2, 2))
        refuses(
            "does not fit", lambda: torch.cumsum(tensor, 0, out=distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)]))
        )
        assert tensor.resize_(3, 2) is tensor
        assert tensor.tolist() == whole.tolist()
        out = distribute_tensor(torch.empty(0), mesh)
        assert torch.cumsum(tensor, 0, out=out) is out
        assert out.tolist() == whole.cumsum(0).tolist()

    run_threads(2, body)


def test_reading_an_operand_leaves_its_parts_as_they_are() -> None:
    def body() -> None:
        local = torch.tensor([1, 2]) + disttrain.get_rank()
        tensor = DTensor.from_local(local.clone(), mesh_of_all(), [Partial()])
        out = tensor * 0
        torch.bitwise_left_shift(tensor, 1, out=out)
        assert tensor.to_local().tolist() == local.tolist()
        assert out.tolist() == [6, 10]

    run_threads(2, body)


def test_factories_make_parts_of_the_whole() -> None:
    def body() -> None:
        mesh = mesh_of_all()
        for placement in PLACEMENTS:
            made = zeros(3, 2, device_mesh=mesh, placements=[placement])
            assert made.tolist() == [[0.0, 0.0]] * 3
            assert ones((3, 2), device_mesh=mesh, placements=[placement]).tolist() == [[1.0, 1.0]] * 3
            filled = full((3, 2), 7, device_mesh=mesh, placements=[placement])
            assert (filled.dtype, filled.tolist()) == (torch.int64, [[7, 7]] * 3)
            raw = empty(3, 2, dtype=torch.float64, device_mesh=mesh, placements=[placement], requires_grad=True)
            assert (raw.dtype, raw.requires_grad, raw.is_leaf, tuple(raw.shape)) == (torch.float64, True, True, (3, 2))
            assert raw.placements == made.placements == (placement,)
        assert zeros(2, device_mesh=mesh).placements == (Replicate(),)
        refuses("include Partial", lambda: zeros(2, device_mesh=mesh, placements=[Partial()]))
        refuses("names a dim", lambda: rand(2, device_mesh=mesh, placements=[Shard(1)]))

    run_threads(3, body)


@pytest.mark.parametrize("make", [rand, randn])
def test_random_factories_draw_what_one_process_draws(make: Any) -> None:
    def body() -> list[Any]:
        mesh = mesh_of_all()
        # One rank at a time: torch has one random state for the process, and here that is all ranks'.
        for rank in range(disttrain.get_world_size()):
            if rank == disttrain.get_rank():
                torch.manual_seed(5)
                made = make(5, 4, device_mesh=mesh, placements=[Shard(0)])
            disttrain.barrier()
        return made.tolist()

    torch.manual_seed(5)
    expected = getattr(torch, make.__name__)(5, 4).tolist()
    assert run_threads(2, body) == [expected, expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("fill", [torch.Tensor.normal_, torch.Tensor.uniform_])
def test_drawing_in_pieces_draws_the_same_numbers(fill: Any, dtype: torch.dtype) -> None:
    draw = random.Random(0)
    shapes = [
        (),
        (0, 3),
        (16, 1),
        (33,),
        (100, 7),
        (50, 3, 2),
        *((draw.randint(1, 90), draw.randint(1, 9)) for _ in "ab"),
    ]

    def body() -> None:
        mesh = mesh_of_all()
        for shape in shapes:
            torch.manual_seed(3)
            whole = fill(torch.empty(shape, dtype=dtype))
            state = torch.get_rng_state()
            for placement in (Replicate(), *map(Shard, range(len(shape)))):
                torch.manual_seed(3)
                spec = Spec.of(Layout(mesh, (placement,)), shape, dtype)
                part = draw_part(fill, spec, torch.device("cpu"), chunk_size=20)
                assert torch.equal(torch.get_rng_state(), state)
                assert torch.equal(part, distribute_tensor(whole, mesh, [placement]).to_local())

    run_threads(1, body)
