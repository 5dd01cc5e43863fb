"""Tokens to the ranks of their experts, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from disttrain.autocast import is_within_autocast
from disttrain.errors import ShapeError
from disttrain.experts.exchange.all_to_all import AllToAll
from disttrain.experts.exchange.asked import asked_for, taking_part
from disttrain.experts.exchange.base import NAME, Exchange
from disttrain.experts.exchange.expert_cut import ExpertCut
from disttrain.experts.exchange.legs import Leg, Route
from disttrain.experts.exchange.padded import Padded
from disttrain.experts.exchange.peers import Peers
from disttrain.experts.exchange.sizes import keep_earliest, room_of
from disttrain.kernels._torch import is_transformed
from disttrain.kernels.grouped.rows import ExpertOrder, combine_rows, sort_by_expert, take_rows
from disttrain.mesh import DeviceMesh, checked_axis
from disttrain.process_group import ProcessGroup


@dataclass(eq=False, slots=True)
class Dispatched:
    """Rows of tokens at their experts.

    Attributes: rows  (rows, D), sorted by this rank's experts, with gradients to the tokens of all ranks.
                ends  (this rank's experts,) int32 on the device: the first row after each one's.
                order  of this rank's own assignments, by all experts;  route  to the others, None where there are none.
                num_dropped  () on the device: this rank's assignments that found no room; None without a capacity.
    """

    rows: torch.Tensor
    ends: torch.Tensor
    order: ExpertOrder
    route: Route | None
    num_dropped: torch.Tensor | None = None


class Sending:
    """Rows that have begun to go to their experts, and what must be known to end that.

    `beside`: on GPUs on a stream of its own, so that the current one may compute what it is told meanwhile.
    """

    __slots__ = ("_leg", "_rows", "_stream", "_under_way", "asked", "num_dropped", "order", "weights")

    def __init__(
        self,
        x: torch.Tensor,
        indices: torch.Tensor,
        num_experts: int,
        exchange: Exchange | None,
        weights: torch.Tensor | None,
        capacity: float | None,
        beside: bool,
        asked: int,
    ) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._leg: Leg | None = None
        self._under_way: torch.Tensor | None = None
        if exchange is not None and beside and x.is_cuda:
            self._stream = exchange.stream(x.device)
            self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with self._beside():
            self.order, self.num_dropped = ordered(indices, num_experts, capacity)
            if exchange is not None:
                most = most_rows(indices, num_experts, exchange, capacity)
                route = exchange.route(x, self.order, num_experts, weights, most, asked)
                if asked:
                    asked = route.agreed(asked)
                    x, weights = taking_part(x, weights, asked)
                self._leg = Leg(route, is_back=False)
            self.weights = weights
            self.asked = asked
            # Meanwhile the sizes are under way.
            self._rows: torch.Tensor | None = take_rows(x, self.order, indices.shape[1])

    @property
    def is_beside(self) -> bool:
        """Whether what is computed before `send` runs while sizes are under way, and the host waits for these."""
        return self._stream is not None

    def send(self) -> None:
        """Begin to send the rows; the host waits for the sizes, where it has to know them."""
        rows, self._rows = self._rows, None
        assert rows is not None
        if self._leg is None:
            self._under_way = rows
            return
        with self._beside():
            self._under_way = self._leg.begin(rows)

    def arrived(self) -> Dispatched:
        """The rows that have come to this rank's experts."""
        rows, self._under_way = self._under_way, None
        assert rows is not None
        if self._leg is None:
            return Dispatched(rows, self.order.ends, self.order, None, self.num_dropped)
        coming, route = self._leg.coming, self._leg.route
        if self._stream is not None and coming is not None:
            current = torch.cuda.current_stream(coming.device)
            current.wait_stream(self._stream)
            for tensor in (coming, *self.order):
                tensor.record_stream(current)
        return Dispatched(self._leg.end(rows), route.ends, self.order, route, self.num_dropped)

    def _beside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def ordered(indices: torch.Tensor, num_experts: int, capacity: float | None) -> tuple[ExpertOrder, torch.Tensor | None]:
    """The assignments by expert, and with a capacity how many found no room, () on the device."""
    order = sort_by_expert(indices, num_experts)
    if capacity is None:
        return order, None
    num_chosen = order.ends[-1]
    order = keep_earliest(indices, order, num_experts, room_of(capacity, indices.numel(), num_experts))
    return order, num_chosen - order.ends[-1]


def most_rows(indices: torch.Tensor, num_experts: int, exchange: Exchange, capacity: float | None) -> int:
    """The rows that this rank may send to one other, whatever its tokens choose."""
    most = indices.numel()
    if capacity is None:
        return most
    return min(most, room_of(capacity, most, num_experts) * ExpertCut.of(num_experts, exchange.group.group_size).chunk)


def begin_dispatch(
    x: torch.Tensor,
    indices: torch.Tensor,
    num_experts: int,
    exchange: Exchange | None,
    weights: torch.Tensor | None = None,
    *,
    capacity: float | None = None,
    width: int | None = None,
    dtype: torch.dtype | None = None,
    beside: bool = False,
    asked: int = 0,
) -> Sending:
    """Begin a dispatch over an exchange that is at hand; `asked`: see `Exchange.route`."""
    check_arguments(x, indices, num_experts, exchange, weights, width, capacity, dtype)
    return Sending(x, indices, num_experts, exchange, weights, capacity, beside, asked)


def check_arguments(
    x: torch.Tensor,
    indices: torch.Tensor,
    num_experts: int,
    exchange: Exchange | None,
    weights: torch.Tensor | None,
    width: int | None,
    capacity: float | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Raise ShapeError for what does not fit. A rank that refuses its arguments tells the others.

    `dtype`: that of the experts.
    """
    problem = _problem(x, indices, num_experts, weights, width) or problem_of_capacity(capacity)
    if problem is None and dtype not in (None, x.dtype) and not is_within_autocast(x.device):
        problem = f"x is {x.dtype}, and the experts are {dtype}.", "Cast one of them, or compute within torch.autocast."
    if problem is None and exchange is not None and is_transformed():
        problem = "a transform of torch.func is at work, and experts lie on several ranks.", "Use torch.autograd.grad."
    if problem is not None:
        group = None if exchange is None else exchange.group
        rank = None if group is None else group.world.rank
        error = ShapeError(NAME, *problem, rank=rank)
        if group is not None:
            group.refuse(NAME, error, "all_to_all_single")
        raise error


def dispatch(
    x: torch.Tensor,
    indices: torch.Tensor,
    num_experts: int,
    axis: DeviceMesh | None = None,
    capacity: float | None = None,
    *,
    weights: torch.Tensor | None = None,
) -> Dispatched:
    """Sends each token to its experts, which lie along a mesh axis as DTensor's Shard(0) cuts them.

    Args:    x            (tokens, D); each rank has its own tokens, and may have none.
             indices      (tokens, k), the experts of each token, 0 to num_experts - 1; others are dropped.
             axis         a mesh of one axis; None: all experts are here.
             capacity     an expert takes at most so many times its even share of each rank's assignments: the earliest
                          tokens' are kept, the others dropped. None: all are kept.
             weights      (tokens, k): all ranks raise where those of one are not finite.
    Raises:  MeshError for a mesh of several axes; ShapeError when shapes or dtypes don't fit.
    Collective: every rank of the axis, and again in backward.
    """
    exchange = None if axis is None else exchange_along(axis)
    asked = asked_for(x, weights)
    sending = begin_dispatch(x, indices, num_experts, exchange, weights, capacity=capacity, asked=asked)
    sending.send()
    return sending.arrived()


def combine(rows: torch.Tensor, dispatched: Dispatched, weights: torch.Tensor) -> torch.Tensor:
    """Sends each row back to its token, and sums up what comes for each token by its weights.

    Args:    rows     (rows, D), what the experts have made of `dispatched.rows`.
             weights  (tokens, k), of `indices`.
    Returns: (tokens, D); an assignment that was dropped counts as zeros.
    Collective: as `dispatch`.
    """
    if dispatched.route is not None:
        leg = Leg(dispatched.route, is_back=True)
        rows = leg.end(leg.begin(rows))
    return summed(rows, dispatched.order, weights)


def summed(rows: torch.Tensor, order: ExpertOrder, weights: torch.Tensor) -> torch.Tensor:
    """`combine_rows`, on a rank that may have no tokens."""
    if not weights.shape[0]:
        # There is nothing to sum up, but a gradient of the same kind as on other ranks.
        return rows + weights.sum()
    return combine_rows(rows, order, weights)


def exchange_along(axis: DeviceMesh, kind: str = "auto") -> Exchange | None:
    """The exchange along a mesh of one axis; None where it has one rank.

    Raises: MeshError for a mesh of several axes, ShapeError for a kind that is not there.
    """
    if kind not in KINDS:
        raise ShapeError(NAME, f"exchange is {kind!r}.", f"Give one of {', '.join(KINDS)}.")
    mesh = checked_axis(NAME, axis, "Give the one axis along which experts lie, such as mesh['ep'].")
    return None if mesh.size() == 1 else KINDS[kind](mesh.get_group())


KINDS: Mapping[str, Callable[[ProcessGroup], Exchange]] = {
    "auto": AllToAll,
    "all_to_all": AllToAll,
    "padded": Padded,
    "peers": Peers,
}
"""By name: of the sizes that are needed, which the host reads; of one size, for steps that are captured; by writing to
the memory of the other GPUs of the host, which needs neither."""


_INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


def _problem(
    x: torch.Tensor, indices: torch.Tensor, num_experts: int, weights: torch.Tensor | None, width: int | None
) -> tuple[str, str] | None:
    """The first thing that is wrong with the arguments, and the remedy."""
    if x.dim() != 2 or not x.is_floating_point():
        return f"x is {_shown(x)}.", "Give (tokens, D) of floating point: flatten batch and sequence."
    if width is not None and x.shape[1] != width:
        return f"x has {x.shape[1]} columns, and the experts take {width}.", "Give rows as wide as the weights."
    if indices.dim() != 2 or indices.shape[0] != x.shape[0] or indices.dtype not in _INDEX_DTYPES:
        return f"indices are {_shown(indices)} for x of {len(x)} tokens.", "Give integers of shape (tokens, k)."
    if not 1 <= indices.shape[1] <= num_experts:
        return (
            f"each token has {indices.shape[1]} experts, and there are {num_experts}.",
            "Choose one at least, and as many as there are at most.",
        )
    if weights is not None and (weights.shape != indices.shape or not weights.is_floating_point()):
        return f"weights are {_shown(weights)} for indices of shape {tuple(indices.shape)}.", "Give one per index."
    return None


def problem_of_capacity(capacity: object) -> tuple[str, str] | None:
    """Why it is no factor of an even share, and the remedy."""
    is_number = isinstance(capacity, int | float) and not isinstance(capacity, bool) and 0 < capacity < math.inf
    if capacity is None or is_number:
        return None
    return f"capacity is {capacity!r}.", "Give a positive factor of an expert's even share, or None."


def _shown(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
