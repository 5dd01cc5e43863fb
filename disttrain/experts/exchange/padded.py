"""Rows by all-to-alls of one fixed size: the host need not know how many there are, so that a step can be captured.

From each rank to each other there is room for the most rows that may go there. That is all of a rank's assignments,
unless a capacity bounds what an expert takes. The first exchange agrees on it, and later ones may not need more.
"""

from __future__ import annotations

import torch

from disttrain.errors import ShapeError
from disttrain.experts.exchange.arrangement import arrange
from disttrain.experts.exchange.base import NAME, Exchange
from disttrain.experts.exchange.dtypes import check_alike, code_of
from disttrain.experts.exchange.expert_cut import ExpertCut
from disttrain.experts.exchange.sizes import counts_of
from disttrain.kernels.grouped.rows import ExpertOrder
from disttrain.process_group import ProcessGroup, Work, all_gather_into_tensor, all_to_all_single
from disttrain.process_group.watching.refusals import ANY


class FixedRoom(Exchange):
    """An exchange whose memory has one size.

    Args: most_rows  that one rank may send to another in any exchange; None: as many as the first exchange may need on
                     the rank that has most. Alike on all ranks.
    """

    def __init__(self, group: ProcessGroup, most_rows: int | None = None) -> None:
        super().__init__(group)
        self.most_rows = most_rows

    @property
    def checked_room(self) -> int:
        """The rows of `room`, once it was asked for."""
        assert self.most_rows is not None
        return self.most_rows

    def room(self, most_rows: int, x: torch.Tensor) -> int:
        """The rows that one rank may send to another, where this rank may have so many. Collective.

        Raises: ShapeError where they are more than there is room for; the other ranks are told. The first time on all
                ranks where dtypes of tokens differ; later no host looks.
        """
        if self.most_rows is None:
            own = torch.tensor([most_rows, code_of(x)], device=x.device)
            of_all = own.new_empty((self.group.group_size, 2))
            all_gather_into_tensor(of_all, own, group=self.group)
            sizes, codes = of_all.T.tolist()
            check_alike(codes, self.group)
            self.most_rows = max(1, *sizes)
        if most_rows > self.most_rows:
            error = ShapeError(
                NAME,
                f"{most_rows} rows may go to one rank, and there is room for {self.most_rows}.",
                "Begin with the largest batch, give most_rows, or bound what an expert takes by a capacity.",
                rank=self.group.world.rank,
            )
            self.group.refuse(NAME, error, ANY)
            raise error
        return self.most_rows


class Padded(FixedRoom):
    """Sends as much as there may be."""

    def route(
        self,
        x: torch.Tensor,
        order: ExpertOrder,
        num_experts: int,
        weights: torch.Tensor | None,
        most_rows: int,
        asked: int = 0,
    ) -> PaddedRoute:
        """Exchange the sizes; see `Exchange`."""
        room = self.room(most_rows, x)
        return PaddedRoute(self.group, order, ExpertCut.of(num_experts, self.group.group_size), room)


class PaddedRoute:
    """A Route whose rows come in blocks of one size, one from each rank, and are sorted on the device."""

    def __init__(self, group: ProcessGroup, order: ExpertOrder, cut: ExpertCut, most_rows: int) -> None:
        self._group = group
        self._cut = cut
        self._most_rows = most_rows
        self._num_home = len(order.order)
        # In int64, as all numbers of rows below.
        sizes = counts_of(order.ends, cut).to(torch.int64)
        received = torch.empty_like(sizes)
        all_to_all_single(received, sizes, group=group)
        # What is in a block behind its rows counts as one more expert's, which come last.
        rows = received[:, : cut.num_experts_of(group.group_rank)]
        self._arrival = arrange(torch.cat((rows, most_rows - rows.sum(1, keepdim=True)), 1), rows.shape[0] * most_rows)
        self.ends = self._arrival.ends[:-1]
        totals = sizes.sum(1)
        self._ends_by_rank = totals.cumsum(0)
        self._begins = self._ends_by_rank - totals
        self._sources: torch.Tensor | None = None
        self._homes: torch.Tensor | None = None

    def agreed(self, asked: int) -> int:
        return asked

    def start(self, rows: torch.Tensor, is_back: bool, *, async_op: bool = True) -> tuple[torch.Tensor, Work | None]:
        size, width = self._cut.num_ranks * self._most_rows, rows.shape[1]
        sent = rows.index_select(0, self._arrival.slots) if is_back else self._in_blocks(rows)
        # The last row of what comes back is zeros: that of assignments without an expert.
        coming = rows.new_empty((size + is_back, width))
        if is_back:
            coming[-1] = 0
        return coming, all_to_all_single(coming[:size], sent, group=self._group, async_op=async_op)

    def finish(self, coming: torch.Tensor, work: Work | None, is_back: bool) -> torch.Tensor:
        if work is not None:
            work.wait()
        return coming.index_select(0, self._home_slots() if is_back else self._arrival.order)

    def _in_blocks(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows that are sorted by expert, as blocks for the ranks; what is in a block behind its rows is never used."""
        if not self._num_home:
            return rows.new_zeros((self._cut.num_ranks * self._most_rows, rows.shape[1]))
        if self._sources is None:
            sources = self._begins[:, None] + torch.arange(self._most_rows, device=rows.device)
            self._sources = sources.clamp_(max=self._num_home - 1).view(-1)
        return rows.index_select(0, self._sources)

    def _home_slots(self) -> torch.Tensor:
        """For each row as it was sent, sorted by expert, where it comes back; the last row where it was not sent."""
        if self._homes is None:
            numbers = torch.arange(self._num_home, device=self._ends_by_rank.device)
            ranks = torch.searchsorted(self._ends_by_rank, numbers, right=True)
            # Those that were not sent have the number of ranks for a rank.
            shifts = torch.arange(len(self._begins), device=numbers.device) * self._most_rows - self._begins
            slots = numbers + torch.nn.functional.pad(shifts, (0, 1))[ranks]
            self._homes = slots.masked_fill_(ranks == self._cut.num_ranks, self._cut.num_ranks * self._most_rows)
        return self._homes
