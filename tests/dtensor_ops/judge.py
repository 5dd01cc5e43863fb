"""Runs the cases of an operator on ranks that are threads, and says how it did."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.nn.modules import linear_cross_entropy
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import disttrain
from disttrain.dtensor import DTensor, Layout, Partial, Placement, Replicate, Shard, Spec, implicit_replication
from disttrain.dtensor._torch import OpFacts
from disttrain.dtensor.dispatch import whole
from disttrain.dtensor.redistribute.local import redistribute_local
from disttrain.dtensor.spec.shard_sizes import is_permuted
from disttrain.errors import CollectiveMismatchError, LayoutError
from disttrain.testing import run_threads
from tests.dtensor_ops.cases import MESHES, Case, calls_of, cases_of, num_parts, plain_result, run_call
from tests.dtensor_ops.infos import title

VERDICTS = ("right", "refused", "crashes", "differs", "hangs", "wrong")
"""From best to worst; an operator's verdict is that of its worst case."""
UNSPECIFIED = frozenset({"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted"})


@dataclass
class Outcome:
    """What came of one operator's cases."""

    name: str
    num_cases: int = 0
    wholes: set[str] = field(default_factory=set)
    """Operators without a rule, which ran on whole tensors."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """Verdict, and what happened."""

    @property
    def verdict(self) -> str:
        if not self.num_cases:
            return "no case"
        return max((verdict for verdict, _ in self.failures), key=VERDICTS.index, default="right")

    @property
    def example(self) -> str:
        return next((text for verdict, text in self.failures if verdict == self.verdict), "")


class _Wrong(Exception):
    """The values are not those of a single process."""


_get_rng_state, _set_rng_state = torch.get_rng_state, torch.set_rng_state


class _RankRandom(TorchDispatchMode):
    """Random numbers of a rank's own. torch has one generator per process, and here all ranks are in one process."""

    lock = threading.Lock()
    of_thread = threading.local()

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.Generator().manual_seed(1).get_state()
        self.of_thread.mode = self

    @classmethod
    def patches(cls) -> list[Any]:
        """What OpInfos call to seed and to restore, with the thread's own state in place of the process's."""
        return [
            mock.patch.object(torch, "get_rng_state", cls._state),
            mock.patch.object(torch, "set_rng_state", lambda state: setattr(cls.of_thread.mode, "state", state)),
            mock.patch.object(torch, "manual_seed", cls._seed),
        ]

    @classmethod
    def _state(cls) -> torch.Tensor:
        state: torch.Tensor = cls.of_thread.mode.state
        return state

    @classmethod
    def _seed(cls, seed: int) -> torch.Generator:
        generator = torch.Generator().manual_seed(seed)
        cls.of_thread.mode.state = generator.get_state()
        return generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            with self:
                return DTensor.__torch_dispatch__(func, types, args, kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        with self.lock:
            _set_rng_state(self.state)
            result = func(*args, **(kwargs or {}))
            self.state = _get_rng_state()
        return result


class _NoticesRandom(TorchDispatchMode):
    """Remembers whether anything random ran."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def hanging(info: OpInfo, text: str) -> Outcome:
    """The outcome of an operator whose judge did not come back."""
    return Outcome(title(info), 1, set(), [("hangs", text)])


def judge(info: OpInfo) -> Outcome:
    """Try all cases of the operator; once more with implicit replication where torch composes it of plain tensors."""
    outcome = _judged(info, is_implicit=False)
    if outcome.verdict == "refused" and "meets a plain tensor" in outcome.example:
        again = _judged(info, is_implicit=True)
        remark = f"under implicit_replication(): {again.verdict}. Without, "
        outcome.failures.insert(0, ("refused", remark + outcome.example))
    return outcome


def _judged(info: OpInfo, is_implicit: bool) -> Outcome:
    outcome = Outcome(title(info))
    _unlock_cached_properties()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        work = []
        for call in calls_of(info):
            with _NoticesRandom() as random_mode:
                expected = plain_result(call)
            if expected is not None and (call.kind != "out=" or _is_one_or_more_tensors(expected[0])):
                work.append((call, expected, random_mode.found))
        for mesh_shape in MESHES:
            cases = [
                (case, expected, is_random) for call, expected, is_random in work for case in cases_of(call, mesh_shape)
            ]
            _judge_on(outcome, mesh_shape, cases, is_implicit)
    return outcome


def _unlock_cached_properties() -> None:
    """Let no rank wait for another's cached property: before Python 3.12, one lock is held for all threads."""
    for owner in vars(linear_cross_entropy).values():
        for value in vars(owner).values() if isinstance(owner, type) else ():
            if isinstance(value, functools.cached_property) and hasattr(value, "lock"):
                value.lock = contextlib.nullcontext()


def _is_one_or_more_tensors(result: Any) -> bool:
    leaves = list(result) if isinstance(result, list | tuple) else [result]
    return bool(leaves) and all(isinstance(leaf, torch.Tensor) for leaf in leaves)


def _judge_on(
    outcome: Outcome, mesh_shape: tuple[int, ...], cases: Sequence[tuple[Case, Any, bool]], is_implicit: bool
) -> None:
    start = 0
    while start < len(cases):
        with contextlib.ExitStack() as patches:
            for patch in (_notices_wholes(outcome), *_RankRandom.patches()):
                patches.enter_context(patch)
            ends = run_threads(num_parts(mesh_shape), _run_rank, mesh_shape, cases, start, outcome.name, is_implicit)
        stop = min(end for end, _ in ends)
        outcome.num_cases += stop - start
        if stop == len(cases):
            return
        errors = [error if end == stop else None for end, error in ends]
        verdict, error = _verdict_of(errors)
        outcome.num_cases += 1
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        outcome.failures.append((verdict, f"{cases[stop][0]} on {list(mesh_shape)}: {text}"))
        start = stop + 1


def _notices_wholes(outcome: Outcome) -> Any:
    check_may_gather = whole._check_may_gather

    def noticed(facts: OpFacts, spec: Spec) -> None:
        # `out=` lies as the caller says, so all its forms compute on whole tensors; a number is whole wherever it is.
        if not (facts.is_random or facts.returns_data or -1 in facts.mutated):
            outcome.wholes.add(facts.name)
        check_may_gather(facts, spec)

    return mock.patch.object(whole, "_check_may_gather", noticed)


def _verdict_of(errors: Sequence[BaseException | None]) -> tuple[str, BaseException]:
    own = [error for error in errors if error is not None and not isinstance(error, CollectiveMismatchError)]
    if not own:
        return "hangs", next(error for error in errors if error is not None)
    if wrong := [error for error in own if isinstance(error, _Wrong)]:
        return "wrong", wrong[0]
    if len(own) < len(errors) or len({type(error) for error in own}) > 1:
        return "differs", own[0]
    return ("refused" if isinstance(own[0], LayoutError) else "crashes"), own[0]


def _run_rank(
    mesh_shape: tuple[int, ...], cases: Sequence[tuple[Case, Any, bool]], start: int, name: str, is_implicit: bool
) -> tuple[int, BaseException | None]:
    """Run cases from `start` on until one fails: (its place, the error)."""
    mesh = disttrain.init_device_mesh("cpu", mesh_shape)
    for place in range(start, len(cases)):
        case, expected, is_random = cases[place]
        try:
            # The mode costs time; but seeding, too, must find the state of its own thread.
            own_random = _RankRandom()
            with (
                own_random if is_random else contextlib.nullcontext(),
                implicit_replication() if is_implicit else contextlib.nullcontext(),
            ):
                _check(case, expected, mesh, name)
        except Exception as error:  # noqa: BLE001 -- it is what this is about
            return place, error
    return len(cases), None


def _check(case: Case, expected: Any, mesh: disttrain.DeviceMesh, name: str) -> None:
    result, afterwards, grads = expected
    operands = {
        id(tensor): distributed(tensor, mesh, placements, case.call.needs_grad)
        for tensor, placements in zip(case.call.operands, case.placements, strict=True)
    }
    parts = [tensor._local_tensor.clone() for tensor in operands.values()]
    out = _empty_out(result, mesh) if case.call.kind == "out=" else None
    actual, actual_grads = run_call(case.call, operands, out)
    skips_values = name.split(maxsplit=1)[0] in UNSPECIFIED
    _compare("result", actual if out is None else out, result, skips_values=skips_values)
    for place, (one, part) in enumerate(zip(operands.values(), parts, strict=True)):
        before, after = case.call.operands[place].detach(), afterwards[place]
        # Writing the same again may change how a partial tensor's value lies on the ranks.
        if one._spec.layout.has_partial or not _is_same(before, after):
            _compare(f"operand {place} afterwards", one, after)
        elif not _is_same(one._local_tensor, part):
            raise _Wrong(f"operand {place} was written to")
    if grads is not None:
        _compare("gradients", actual_grads, grads)
    if case.call.kind == "in-place" and _first_tensor(case.call.values) is not None:
        leaves = tree_leaves(actual)
        if any(leaf is not operands.get(id(case.call.sample.input), leaf) for leaf in leaves):
            raise _Wrong("the result is not the operand that was written to")


def _first_tensor(values: Any) -> Any:
    return values[0] if isinstance(values[0], torch.Tensor) else None


def distributed(
    tensor: torch.Tensor, mesh: disttrain.DeviceMesh, placements: Sequence[Placement], needs_grad: bool = False
) -> DTensor:
    """The tensor laid out, without communication. A partial one has parts on all ranks that add up exactly."""
    order = sorted(range(tensor.ndim), key=lambda dim: -tensor.stride(dim))
    if order != sorted(order) and is_permuted(tensor.shape, tensor.stride()):
        return _permuted(tensor, order, mesh, placements, needs_grad)
    shards = [Replicate() if isinstance(place, Partial) else place for place in placements]
    layout = Layout(mesh, shards)
    spec = Spec.of(layout, tuple(tensor.shape), tensor.dtype)
    local = redistribute_local(tensor.detach(), spec.with_layout(layout.replicated()), layout).clone(
        memory_format=torch.contiguous_format
    )
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            local = _addend(local, mesh.shape[axis], mesh.get_local_rank(axis))
    spec = Spec.of(layout.with_placements(placements), tuple(tensor.shape), tensor.dtype)
    return DTensor(local, spec, requires_grad=needs_grad and tensor.requires_grad)


def _permuted(
    tensor: torch.Tensor,
    order: Sequence[int],
    mesh: disttrain.DeviceMesh,
    placements: Sequence[Placement],
    needs_grad: bool,
) -> DTensor:
    """The tensor laid out, its dims in memory in the order that they have."""
    moved = [Shard(order.index(place.dim)) if isinstance(place, Shard) else place for place in placements]
    contiguous = distributed(tensor.detach().permute(*order), mesh, moved)
    part = contiguous._local_tensor.permute(*[order.index(dim) for dim in range(tensor.ndim)])
    spec = Spec(Layout(mesh, placements), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
    return DTensor(part, spec, requires_grad=needs_grad and tensor.requires_grad)


def _addend(value: torch.Tensor, num_parts: int, position: int) -> torch.Tensor:
    """One of `num_parts` parts of the value, which add up to it exactly."""
    if position > 0 and (value.is_floating_point() or value.is_complex()):
        # An infinity minus another is none.
        value = torch.where(value.isfinite(), value, 0)
    if position == 0:
        return value if num_parts % 2 else 2 * value
    return -value if position % 2 else value


def _empty_out(result: Any, mesh: disttrain.DeviceMesh) -> Any:
    def empty(tensor: torch.Tensor) -> DTensor:
        placements = [Shard(0) if tensor.ndim and axis == 0 else Replicate() for axis in range(mesh.ndim)]
        return distributed(torch.zeros_like(tensor), mesh, placements)

    return empty(result) if isinstance(result, torch.Tensor) else tuple(empty(tensor) for tensor in result)


def _compare(what: str, actual: Any, expected: Any, *, skips_values: bool = False) -> None:
    pairs = zip(_leaves(actual), _leaves(expected), strict=False)
    if len(_leaves(actual)) != len(_leaves(expected)):
        raise _Wrong(f"{what}: {len(_leaves(actual))} values instead of {len(_leaves(expected))}")
    for place, (one, other) in enumerate(pairs):
        value = one
        if isinstance(one, DTensor):
            if tuple(one._local_tensor.shape) != one._spec.local_shape or tuple(one.shape) != one._spec.shape:
                raise _Wrong(f"{what} {place}: {tuple(one._local_tensor.shape)} is no part of {one._spec}")
            with torch.no_grad():
                value = one.detach().full_tensor()
        if isinstance(other, torch.Tensor):
            if not isinstance(value, torch.Tensor) or value.shape != other.shape or value.dtype != other.dtype:
                raise _Wrong(f"{what} {place}: {_described(value)} instead of {_described(other)}")
            if not skips_values and not _is_same(value, other):
                try:
                    torch.testing.assert_close(value, other, equal_nan=True)
                except AssertionError as error:
                    text = str(error).split("\n\n")[-1]
                    raise _Wrong(f"{what} {place}: {text}") from None
        elif value != other and not (value != value and other != other):
            raise _Wrong(f"{what} {place}: {value} instead of {other}")


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal, or so close, without the time that `assert_close` takes to say so."""
    if one.dtype.is_floating_point and one.dtype.itemsize == 8:
        return one.shape == other.shape and torch.allclose(one, other, rtol=1e-7, atol=1e-7, equal_nan=True)
    if one.dtype == torch.complex32:
        one, other = one.to(torch.complex64), other.to(torch.complex64)
    return torch.equal(one, other)


def _leaves(values: Any) -> list[Any]:
    return tree_leaves(values)


def _described(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
