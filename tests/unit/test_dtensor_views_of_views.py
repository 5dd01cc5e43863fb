"""Views of views of DTensors share one memory, in whatever order it is written to and read, as on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import disttrain
from disttrain.dtensor import Partial, Placement, Replicate, Shard, distribute_tensor
from disttrain.dtensor.spec.placement import NormPartial
from disttrain.errors import LayoutError
from disttrain.mesh import DeviceMesh
from disttrain.testing import run_threads
from tests.cases.dtensors import collectives_of, counted, laid
from tests.view_programs import programs as view_programs
from tests.view_programs.programs import faults_of, program_of

View = Callable[[Any], Any]

# Of a tensor of shape (7, 6): each begins where a cut falls on some mesh.
CHAINS: dict[str, View] = {
    "slice, select": lambda t: t[5:][0],
    "first slice, select": lambda t: t[:3][0],
    "slice, slice": lambda t: t[2:][1:4][:, 1:3],
    "slice, slice, slice, select": lambda t: t[1:][1:][1:][0],
    "split, select": lambda t: t.split(2)[-1][0],
    "split, split": lambda t: t.split(3)[1].split(2)[0],
    "chunk, unbind": lambda t: t.chunk(2)[1].unbind(0)[1],
    "slice, squeeze": lambda t: t[3:4].squeeze(0),
    "slice, view": lambda t: t[6:].view(-1),
    "view, slice, view, select": lambda t: t.view(-1)[3:39].view(6, 6)[2],
    "select, unsqueeze, expand": lambda t: t[4].unsqueeze(0).expand(1, 6),
    "select, select": lambda t: t[4][2],
    "select, slice, unflatten": lambda t: t[4][1:5].unflatten(0, (2, 2)),
    "transpose, select, slice": lambda t: t.t()[1][2:],
    "slice, transpose, select": lambda t: t[2:].t()[3],
    "slice, permute, narrow": lambda t: t[2:].permute(1, 0).narrow(1, 1, 2),
    "slice, movedim, select": lambda t: t[3:].movedim(0, 1)[:, 0],
    "narrow, diagonal, slice": lambda t: t.narrow(0, 1, 5).diagonal()[1:3],
    "unfold, select, select": lambda t: t.unfold(0, 2, 2)[1][2],
    "expand, diagonal": lambda t: t.expand(7, 7, 6).diagonal(),
    "unfold, diagonal": lambda t: t.unfold(0, 2, 1).diagonal(),
    "as_strided, select": lambda t: t.as_strided((6, 5), (5, 1))[3],
    "steps, select": lambda t: t[::2][::2][1],
    "slice, detach, select": lambda t: t[5:].detach()[0],
    "detach, slice, select": lambda t: t.detach()[5:][0],
    "slice, data, select": lambda t: t[5:].data[0],
    "data, slice, select": lambda t: t.data[5:][0],
    "view_as, slice, reshape": lambda t: t.view_as(t)[5:].reshape(3, 4)[1],
    "bits": lambda t: t.view(torch.int64)[5:][0].view(torch.float64),
}

MESHES: dict[tuple[int, ...], list[tuple[Placement, ...]]] = {
    (1,): [(Shard(0),)],
    (2,): [(Shard(0),), (Partial(),)],
    (3,): [(Shard(0),), (Shard(1),)],
    (4,): [(Shard(0),)],
    (2, 2): [(Shard(0), Shard(0)), (Shard(1), Shard(0)), (Partial(), Shard(0)), (Replicate(), Shard(0))],
}


def _placements(name: str, mesh_shape: tuple[int, ...]) -> list[tuple[Placement, ...]]:
    """Those of one chain: on two axes every other of them, and the rest for the next chain."""
    placements = MESHES[mesh_shape]
    return placements[list(CHAINS).index(name) % 2 :: 2] if len(mesh_shape) == 2 else placements


Write = Callable[[Any, Any, Any], Any]
"""Of the base, the view and a sibling of it."""

WRITES: dict[str, Write] = {
    "the base is filled": lambda base, _, __: base.fill_(100),
    "the view doubles": lambda _, view, __: view.mul_(2),
    "the sibling grows": lambda _, __, sibling: sibling.add_(7),
    "the view is copied to": lambda _, view, __: view.copy_(view.clone() * 3 + 1),
    "a row of the base is set": lambda base, _, __: base.__setitem__(5, -1),
    "out is the view": lambda _, view, __: torch.sub(view, 4, out=view),
    "out is the base": lambda base, _, __: torch.mul(base, 3, out=base),
    "lists of both": lambda base, view, __: torch._foreach_add_([view, base], [3.0, 5.0]),
    "the view's data": lambda _, view, __: view.data.mul_(-2),
    "the base's data": lambda base, _, __: base.data.add_(11),
    "the base, detached": lambda base, _, __: base.detach().sub_(2),
}


def _check_alike(found: list[Any], expected: list[Any], note: str) -> None:
    for seen, right in zip(found, expected, strict=True):
        assert torch.equal(seen.detach().full_tensor(), right.detach()), note


def _check_writes(chain: View, mesh: DeviceMesh, placements: tuple[Placement, ...], *, reads_between: bool) -> None:
    plain, tensor = counted(7, 6), laid(counted(7, 6), mesh, placements)
    expected, found = [[one, chain(one), chain(one[:])] for one in (plain, tensor)]
    for name, write in WRITES.items():
        write(*expected)
        write(*found)
        if reads_between:
            _check_alike(found, expected, f"{name}, {placements} on {mesh.shape}")
    _check_alike(found, expected, f"in the end, {placements} on {mesh.shape}")


@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_writes_to_the_base_and_to_views_are_seen_by_all(name: str, mesh_shape: tuple[int, ...]) -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", mesh_shape)
        for placements in _placements(name, mesh_shape):
            if Partial() in placements and name in ("bits", "expand, diagonal", "unfold, diagonal"):
                continue
            _check_writes(CHAINS[name], mesh, placements, reads_between=True)
        if mesh_shape == (3,):
            _check_writes(CHAINS[name], mesh, MESHES[mesh_shape][0], reads_between=False)

    run_threads(torch.Size(mesh_shape).numel(), body)


@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
@pytest.mark.parametrize("name", CHAINS)
def test_the_same_within_inference_mode(name: str) -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (3,))
        with torch.inference_mode():
            _check_writes(CHAINS[name], mesh, (Shard(0),), reads_between=True)
        plain, tensor = counted(7, 6), laid(counted(7, 6), mesh, (Shard(0),))
        with torch.inference_mode():
            expected, found = [[one, CHAINS[name](one), one.view_as(one)] for one in (plain, tensor)]
            for one in (expected, found):
                one[0].multiply_(2)
                one[1].add_(one[1])
                one[2].square_()
        _check_alike(found, expected, "left")
        for one in (expected, found):
            one[0].add_(1)
        _check_alike(found, expected, "and written to")

    run_threads(3, body)


GRADIENT_CHAINS = [name for name in CHAINS if not {"detach", "data", "split", "chunk"} & {*name.split(", ")}]


@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
@pytest.mark.parametrize("name", [name for name in GRADIENT_CHAINS if name != "bits"])
def test_gradients_of_writes_through_views_of_views(name: str) -> None:
    def run(leaf: Any) -> list[Any]:
        leaf.requires_grad_()
        base = leaf * 2
        view, sibling = CHAINS[name](base), CHAINS[name](base)
        view.mul_(3)
        base.add_(base.detach() * 1 + 1)
        sibling.mul_(view.detach() * 1)
        base[5].mul_(2)
        outputs = [base, view, sibling]
        sum((place + 1) * (output * output).sum() for place, output in enumerate(outputs)).backward()
        return [*outputs, leaf.grad]

    def body(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
        mesh = disttrain.init_device_mesh("cpu", mesh_shape)
        _check_alike(run(laid(counted(7, 6), mesh, placements).detach()), run(counted(7, 6)), f"{placements}")

    run_threads(3, body, (3,), (Shard(0),))
    run_threads(4, body, (2, 2), (Shard(1), Shard(0)))


def test_a_loan_on_a_loan_moves_only_once_it_has_been_written_to() -> None:
    def body() -> None:
        tensor = laid(counted(7, 6), disttrain.init_device_mesh("cpu", (3,)), [Shard(0)])
        row = tensor[2:][1:][0]
        assert collectives_of(lambda: row * 2) == []
        tensor.add_(1)
        assert collectives_of(lambda: row * 2) == ["all_to_all", "all_to_all", "broadcast"]
        assert collectives_of(lambda: row * 2) == []

    run_threads(3, body)


def test_of_parts_of_a_sum_no_write_goes_back_to_what_overlaps_itself() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2, 2))
        tensor = laid(counted(4, 6), mesh, [Partial(), Shard(0)])
        with pytest.raises(LayoutError, match="share memory"):
            tensor.unfold(1, 2, 1).select(0, 1).add_(1)
        assert torch.equal(tensor.full_tensor(), counted(4, 6))

    run_threads(4, body)


def test_a_write_to_some_of_what_overlaps_itself_leaves_the_rest() -> None:
    def windows(x: torch.Tensor) -> torch.Tensor:
        return x.unfold(0, 2, 1).transpose(3, -2).diagonal(0, -1, -3)

    def body() -> None:
        for factor in range(1, 30):
            plain = torch.arange(20.0, dtype=torch.float64).view(5, 2, 2) * factor
            x = laid(plain.clone(), disttrain.init_device_mesh("cpu", (2,)), [Shard(0)])
            for tensor in (plain, x):
                windows(tensor).select(0, 3).cumsum_(-1)
            assert torch.equal(x.full_tensor(), plain)

    run_threads(2, body)


def test_the_bits_of_an_empty_tensor_can_be_viewed_whatever_its_strides() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        for placement in (Shard(0), Shard(1), Partial()):
            plain, tensor = (one.float() for one in (counted(7, 6), laid(counted(7, 6), mesh, [placement])))
            view = tensor.narrow(1, 2, 0).view(torch.float64)
            assert (view.shape, view.dtype) == (plain.narrow(1, 2, 0).view(torch.float64).shape, torch.float64)
            assert view.full_tensor().shape == view.shape

    run_threads(2, body)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_every_view_of_a_norm_can_be_read(order: float) -> None:
    views: list[View] = [
        lambda t: t.t(),
        lambda t: t[1:].t()[1],
        lambda t: t.movedim(0, 1)[::2],
        lambda t: t.unsqueeze(0).expand(2, 4, 5).permute(2, 0, 1),
        lambda t: t.diagonal(),
        lambda t: t.unfold(1, 2, 1)[1].t(),
        lambda t: t.view(2, 10).t().split(3)[1],
        lambda t: t.as_strided((3, 2), (2, 1))[1:],
    ]

    def body(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
        mesh = disttrain.init_device_mesh("cpu", mesh_shape)
        whole = counted(4, 5, 6)
        norm = torch.linalg.vector_norm(distribute_tensor(whole, mesh, placements), order, 2)
        assert any(isinstance(placement, NormPartial) for placement in norm._spec.placements)
        expected = torch.linalg.vector_norm(whole, order, 2)
        for view in views:
            torch.testing.assert_close((view(norm) * 2).full_tensor(), view(expected) * 2)
            torch.testing.assert_close(
                view(norm).redistribute(placements=[Replicate()] * mesh.ndim).to_local(), view(expected)
            )

    run_threads(2, body, (2,), (Shard(2),))
    run_threads(4, body, (2, 2), (Shard(2), Shard(2)))
    run_threads(4, body, (2, 2), (Shard(0), Shard(2)))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_programs_of_views_and_writes(first: int) -> None:
    for seed in range(first, first + 20):
        program = program_of(seed)
        assert faults_of(program) == [], str(program)


def test_a_program_that_goes_wrong_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def faults(program: view_programs.Program) -> list[str]:
        return ["wrong"] * any(step.kind == "write" and step.place == step.other == 1 for step in program.steps)

    monkeypatch.setattr(view_programs, "faults_of", faults)
    program = next(program for program in map(program_of, range(100)) if faults(program))
    assert [step.kind for step in view_programs.shrunk(program).steps] == ["view", "write"]
