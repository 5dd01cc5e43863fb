"""Attention of sequences whose positions are cut over the ranks of a mesh axis."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any, Final, cast

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from disttrain.autocast import is_within_autocast
from disttrain.errors import ArgumentError, DisttrainError, ShapeError
from disttrain.kernels.attention.context.agreement import NAME, agree, agreeing_backward
from disttrain.kernels.attention.context.current import between_graphs, given_or_current
from disttrain.kernels.attention.context.heads import run_heads
from disttrain.kernels.attention.context.parts import Parts, contiguous, mirrored
from disttrain.kernels.attention.context.planning.heads_cut import heads_divide, num_head_groups
from disttrain.kernels.attention.context.planning.plan import HOSTS, ONE_HOST, ContextPlan, Machine, Shape
from disttrain.kernels.attention.context.planning.steps import HEADS, WAYS, most_sent
from disttrain.kernels.attention.context.planning.tiles import on_host
from disttrain.kernels.attention.context.steps_run import Program, run_steps
from disttrain.kernels.attention.operator import as_autocast, attention_of_whole, check_dtypes, check_fits
from disttrain.kernels.attention.plan import DENSE
from disttrain.kernels.attention.rules import Alibi, Causal, Documents, Prefix, Rule, name_of, parts_of
from disttrain.kernels.attention.runs import scale_of
from disttrain.mesh import DeviceMesh, axis_of_several
from disttrain.process_group.joining.hosts import leaves_host

_NUM_KEPT: Final = 64


@between_graphs
def attention_across(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Rule | None,
    scale: float | None,
    by: str | None,
    axis: DeviceMesh | None,
    parts: Parts | None,
    way: str | None,
) -> torch.Tensor:
    """Computes `attention` of this rank's positions; see there. Collective: every rank of the axis.

    What is not given is that of the block that the rank is in (`using`).
    """
    axis, parts, way = given_or_current(axis, parts, way)
    if axis is None and parts is not None:
        problem = f"it is given parts for {parts.num_ranks} ranks, and no axis that has these."
        raise ShapeError(NAME, problem, "Give axis=mesh['cp'] too.")
    mesh = axis_of_several(NAME, axis)
    if mesh is None:
        return attention_of_whole(query, key, value, mask, scale, by)
    given: tuple[Any, ...] = (query, key, value)
    tensors = [tensor for tensor in given if isinstance(tensor, torch.Tensor)]
    if len(tensors) < 3:
        kinds = ", ".join(type(tensor).__name__ for tensor in given)
        error = ShapeError(NAME, f"query, key and value are {kinds}.", "Give tensors.", rank=mesh.get_rank())
        agree(mesh.get_group(), tensors[0].device if tensors else torch.device("cpu"), {}, error)
    if is_within_autocast(query.device):
        query, key, value = (as_autocast(tensor) for tensor in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        return _across(query, key, value, mask, scale, by, mesh, parts, way)


def _across(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Rule | None,
    scale: float | None,
    by: str | None,
    mesh: DeviceMesh,
    parts: Parts | None,
    way: str | None,
) -> torch.Tensor:
    group = mesh.get_group()
    own_rank = group.group_rank
    error: DisttrainError | None = None
    fields: dict[str, str] = {}
    try:
        if parts is None:
            parts = default_parts(mask, query, group.group_size)
        _check(query, key, value, mask, by, parts, own_rank, group.group_size, way)
        fields = _fields(query, key, value, mask, scale, by, parts, way)
    except DisttrainError as refused:
        error = type(refused)(NAME, refused.problem, refused.remedy, rank=group.world.rank)
    except Exception as wrong:  # noqa: BLE001  as of a list in place of a tensor: the other ranks come to compare
        remedy = "Give rules of tensors and numbers."
        error = ArgumentError(NAME, f"{type(wrong).__name__}: {wrong}.", remedy, rank=group.world.rank)
        error.__cause__ = wrong
    number = agree(group, query.device, fields, error)
    assert parts is not None, "what all ranks agree about has parts"
    if not (query.shape[0] and query.shape[1] and value.shape[3]):
        return attention_of_whole(query, key, value, None, scale, None)
    machine = HOSTS if way is None and leaves_host(group) else ONE_HOST
    plan = plan_of(query, key, value, mask, parts, machine)
    chosen = way or plan.way
    if chosen == HEADS:
        result = run_heads(query, key, value, mask, scale, by, mesh, parts)
        return agreeing_backward(result, group, query.device, fields, number)
    steps = plan.steps(own_rank, chosen)
    num_elements = query.shape[0] * query.shape[1] * max(parts.sizes) * query.shape[3]
    num_groups = num_head_groups(key.shape[1], num_elements)
    most = most_sent(plan.tiles, chosen)
    program = Program(group, parts, steps, chosen, mask, scale_of(query, scale), by, most, num_groups)
    return agreeing_backward(run_steps(query, key, value, program), group, query.device, fields, number)


def default_parts(mask: Rule | None, query: torch.Tensor, num_ranks: int) -> Parts:
    """The parts of equal work under a rule, where all ranks have as many positions."""
    is_causal = any(isinstance(part, Causal | Prefix) for part in parts_of(mask))
    cut = mirrored if is_causal else contiguous
    return cut(num_ranks * (query.shape[2] if query.dim() == 4 else 0), num_ranks)


def plan_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Rule | None,
    parts: Parts,
    machine: Machine = ONE_HOST,
) -> ContextPlan:
    """The plan of a call; of one rule and sizes the same object."""
    shape = Shape(query.shape[0], query.shape[1], key.shape[1], query.shape[3], value.shape[3], query.dtype.itemsize)
    return _plan(parts, on_host(mask), shape, machine)


@lru_cache(_NUM_KEPT)
def _plan(parts: Parts, rule: Rule | None, shape: Shape, machine: Machine) -> ContextPlan:
    return ContextPlan(parts, rule, shape, machine)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    by: str | None,
    parts: Any,
    own_rank: int,
    num_ranks: int,
    way: str | None,
) -> None:
    if mask is not None and not isinstance(mask, Rule):
        problem = f"mask is a {type(mask).__name__}: of positions that are cut over ranks no mask is in memory."
        raise ShapeError(NAME, problem, "Give rules, such as Causal() & Documents(ids); the whole sequence's.")
    if not isinstance(parts, Parts):
        problem = f"the parts are a {type(parts).__name__}."
        raise ShapeError(NAME, problem, "Give those of a plan: plan_cut(rule, length, axis.size()).parts.")
    check_cut(parts)
    if parts.num_ranks != num_ranks:
        problem = f"the parts are for {parts.num_ranks} ranks, and the axis has {num_ranks}."
        raise ShapeError(NAME, problem, "Make them for the axis: mirrored(length, axis.size()).")
    check_fits(query, key, value, mask, whole_length=parts.length)
    check_dtypes(query, key, value)
    lengths = query.shape[2], key.shape[2]
    if lengths != 2 * (parts.size(own_rank),):
        problem = (
            f"there are {lengths[0]} queries and {lengths[1]} keys, and the parts give this rank "
            f"{parts.size(own_rank)} of {parts.length} positions."
        )
        raise ShapeError(NAME, problem, "Take the rank's positions of queries and keys alike: parts.take(whole, ...).")
    if way is not None and way not in WAYS:
        raise ShapeError(NAME, f"there is no way {way!r}.", f"Known are {', '.join(WAYS)}; None chooses.")
    if way == HEADS and not heads_divide(query.shape[1], key.shape[1], num_ranks):
        problem = (
            f"{query.shape[1]} heads of queries and {key.shape[1]} of keys cannot be divided by {num_ranks} ranks."
        )
        raise ShapeError(NAME, problem, "Take way='ring' or 'gather', or None to have it chosen.")
    if by is not None and way != HEADS and by != DENSE:
        problem = f"{by!r} computes whole sequences, and positions are cut."
        raise ShapeError(NAME, problem, "Leave `by` out, or take way='heads'.")


@lru_cache(_NUM_KEPT)
def check_cut(parts: Parts) -> None:
    """Raise ShapeError where a position of a sequence is on no rank, or on several, or not in growing order."""
    runs = sorted((run for ranges in parts.ranges for run in ranges), key=lambda run: run.start)
    ends = [0, *(run.stop for run in runs)]
    starts = [*(run.start for run in runs), parts.length]
    for start, end in zip(starts, ends, strict=True):
        if start != end:
            problem = f"leave out positions {end} to {start - 1}" if start > end else f"give position {start} twice"
            raise ShapeError(NAME, f"the parts {problem}, of {parts.length}.", "Give each position to one rank.")
    for ranges in parts.ranges:
        if list(ranges) != sorted(ranges, key=lambda run: run.start):
            raise ShapeError(NAME, f"the parts give a rank {ranges}.", "Give each its positions in growing order.")


def _fields(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Rule | None,
    scale: float | None,
    by: str | None,
    parts: Parts,
    way: str | None,
) -> dict[str, str]:
    """The values that all ranks must have alike, or would wait for each other in vain."""
    wants_grad = torch.is_grad_enabled()
    needs = [wants_grad and tensor.requires_grad for tensor in (query, key, value)]
    return {
        "sequences": str(query.shape[0]),
        "heads": f"{query.shape[1]} over {key.shape[1]} of {query.shape[3]} and {value.shape[3]} elements",
        "dtype": str(query.dtype),
        "positions": _digest_of_parts(parts),
        "rule": name_of(mask),
        "tensors of the rule": " ".join(filter(None, map(_digest_of, parts_of(mask)))),
        "scale": str(scale),
        "way": str(way),
        "by": str(by),
        "gradients": ", ".join(name for name, need in zip(("query", "key", "value"), needs, strict=True) if need),
    }


@lru_cache(_NUM_KEPT)
def _digest_of_parts(parts: Parts) -> str:
    digest = hashlib.sha256(repr(parts.ranges).encode()).hexdigest()[:8]
    return f"{parts.length} cut into {', '.join(map(str, parts.sizes))} ({digest})"


def _digest_of(rule: Rule) -> str:
    """Tells rules apart by what is in their tensors."""
    if isinstance(rule, Alibi):
        return _digest_of_slopes(rule.slopes)
    return _digest_of_mask(rule) if isinstance(rule, Documents | Prefix) else ""


@lru_cache(_NUM_KEPT)
def _digest_of_mask(mask: Documents | Prefix) -> str:
    """Of what is in it on the host."""
    host = on_host(mask)
    return _digest(host.ids if isinstance(host, Documents) else cast(Prefix, host).lengths)


_SLOPES: Final = WeakTensorKeyDictionary()
"""Digests of slopes, by the tensors: rules are made anew by many models, for each call."""


def _digest_of_slopes(slopes: torch.Tensor) -> str:
    if slopes not in _SLOPES:
        if slopes.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return ""
        _SLOPES[slopes] = _digest(slopes.detach().cpu())
    return str(_SLOPES[slopes])


def _digest(tensor: torch.Tensor) -> str:
    content = tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor
    return hashlib.sha256(repr(tensor.shape).encode() + content.numpy().tobytes()).hexdigest()[:8]
