"""compare_ranks: finds where ranks do different things to one DTensor, or hold different values of what is one.

Before each operator every rank of the mesh tells the others what it is about to call and a digest of the values that
must be equal: plain tensors, copies along Replicate axes, the state that random numbers come from. It is a dispatch
mode of torch, which runs before the dispatch of DTensors, so it costs nothing unless it is entered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from disttrain.dtensor._torch import DispatchMode, OpOverload, facts_of
from disttrain.dtensor.dispatch.call_plan import tensors_of
from disttrain.dtensor.dispatch.mixed import is_plain, mesh_of
from disttrain.dtensor.spec.agreement import from_all_ranks
from disttrain.dtensor.spec.layout import Layout, Spec
from disttrain.errors import RankMismatchError
from disttrain.mesh import DeviceMesh
from disttrain.process_group import World

_COMPARED: Final[WeakKeyDictionary[World, int]] = WeakKeyDictionary()
"""The number of comparisons that a world is in; empty if there are none."""

_REPLICATED = "the replicated value"


@contextmanager
def compare_ranks(mesh: DeviceMesh) -> Iterator[None]:
    """Within it, every operator on DTensors is compared between the ranks of their mesh before it runs.

    Raises RankMismatchError, on all ranks, with the operator, the rank and what differs, where ranks call different
    operators or give other arguments; where a plain tensor, or a DTensor along its Replicate axes, has other values,
    bit for bit, from rank to rank; and where random numbers would be drawn from different states. `mesh` is that of
    most DTensors: when the block ends, its ranks compare whether all have come to the end.

    For finding mistakes: each operator costs some collectives and the reading of its operands. All ranks of `mesh`
    enter it, and every rank of another mesh that DTensors lie on. Backward passes are compared as well.
    """
    world = mesh.world
    _COMPARED[world] = _COMPARED.get(world, 0) + 1
    try:
        with _Comparison():  # type: ignore[no-untyped-call]
            yield
    finally:
        _COMPARED[world] -= 1
        if not _COMPARED[world]:
            del _COMPARED[world]
    _compare(mesh, "the end of compare_ranks()", [])


def before_redistribution(tensor: Any, layout: Layout) -> None:
    """To be called for what no dispatch mode sees. Collective over the mesh, where ranks are compared."""
    mesh: DeviceMesh = tensor._spec.mesh
    if _COMPARED and mesh.world in _COMPARED and mesh.get_coordinate() is not None:
        facts = _facts_of_value("argument self", tensor, tuple(range(mesh.ndim)))
        _compare(mesh, f"redistribute to {layout}", list(facts))


class _Fact(NamedTuple):
    """Something that has to be the same on ranks that differ only along `axes`."""

    name: str
    value: str
    axes: tuple[int, ...]


class _Comparison(DispatchMode):
    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        tensors = tensors_of([*args, *keywords.values()])
        if not all(is_plain(tensor) for tensor in tensors):
            mesh = mesh_of(tensors)
            if mesh.get_coordinate() is not None:
                _compare(mesh, str(func), _facts(func, mesh, args, keywords))
        return func(*args, **keywords)


def _facts(op: OpOverload, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Fact]:
    everywhere = tuple(range(mesh.ndim))
    named = {**dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)), **kwargs}
    facts = [_Fact("its arguments", ", ".join(named), everywhere)]
    for name, value in named.items():
        entries = list(value) if isinstance(value, list | tuple) else [value]
        facts.append(_Fact(f"argument {name}", f"{type(value).__name__} of {len(entries)}", everywhere))
        for index, entry in enumerate(entries):
            label = f"argument {name}" + (f"[{index}]" if entries[0] is not value else "")
            facts += _facts_of_value(label, entry, everywhere)
    if facts_of(op).is_random:
        generator = named.get("generator")
        state = torch.get_rng_state() if generator is None else generator.get_state()
        facts.append(_Fact("the state of the random generator", _digest(state), everywhere))
    return facts


def _facts_of_value(label: str, value: Any, everywhere: tuple[int, ...]) -> Iterator[_Fact]:
    spec: Spec | None = getattr(value, "_spec", None)
    if spec is not None:
        yield _Fact(label, f"a DTensor {spec.dtype} of shape {spec.shape}, {spec.layout}", everywhere)
        axes = tuple(axis for axis, placement in enumerate(spec.placements) if placement.is_replicate())
        if axes:
            yield _Fact(f"{_REPLICATED} of {label}", _digest(value._local_tensor), axes)
    elif isinstance(value, torch.Tensor):
        yield _Fact(label, f"a plain tensor {value.dtype} of shape {tuple(value.shape)}", everywhere)
        yield _Fact(f"the value of {label}", _digest(value), everywhere)
    elif not isinstance(value, torch.Generator):
        yield _Fact(label, repr(value), everywhere)


def _compare(mesh: DeviceMesh, operation: str, facts: Sequence[_Fact]) -> None:
    """Collective over the mesh."""
    reports = from_all_ranks(mesh, [operation, [list(fact) for fact in facts]])
    if all(report == reports[0] for report in reports):
        return
    coordinates = [mesh.layout.coordinate(rank) for rank in mesh.layout.ranks]
    for rank, coordinate, (called, rank_facts) in zip(mesh.layout.ranks, coordinates, reports, strict=True):
        for other_rank, other_coordinate, (expected, other_facts) in zip(
            mesh.layout.ranks, coordinates, reports, strict=True
        ):
            if other_rank == rank:
                break
            if called != expected:
                raise _mismatch(mesh, expected, f"rank {rank} has come to {called} instead, unlike rank {other_rank}.")
            assert coordinate is not None
            assert other_coordinate is not None
            apart = {axis for axis in range(mesh.ndim) if coordinate[axis] != other_coordinate[axis]}
            for (name, value, axes), (_, other_value, _) in zip(rank_facts, other_facts, strict=False):
                if value != other_value and apart <= set(axes):
                    problem = f"{name} differs: {other_value} on rank {other_rank}, {value} on rank {rank}."
                    raise _mismatch(mesh, called, problem)


def _mismatch(mesh: DeviceMesh, operation: str, problem: str) -> RankMismatchError:
    remedy = "Let all ranks of a mesh do the same, with the same plain values."
    if problem.startswith(_REPLICATED):
        remedy = "Where each rank goes on with its copy in its own way, use to_local(grad_placements=[Partial()])."
    return RankMismatchError(operation, problem, remedy, rank=mesh.get_rank(), where=str(mesh.layout))


def _digest(values: torch.Tensor) -> str:
    """Equal for equal bits only."""
    raw = values.detach().resolve_conj().resolve_neg().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(raw.numpy().tobytes(), digest_size=8).hexdigest()
