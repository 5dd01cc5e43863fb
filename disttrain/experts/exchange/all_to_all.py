"""Rows by all-to-alls of the sizes that the routing asks for: what is sent is what is there.

The sizes go first, in one small all-to-all, and the host reads them: the only word that it needs of the device. With
them goes each rank's own finding about its weights, so that all ranks raise the same error for one that has a nan, and
the dtype of its tokens.
"""

from __future__ import annotations

import torch

from disttrain.errors import CompileError, ShapeError
from disttrain.experts.exchange.arrangement import arrange
from disttrain.experts.exchange.base import NAME, Exchange
from disttrain.experts.exchange.dtypes import NUM_CODES, check_alike, code_of
from disttrain.experts.exchange.expert_cut import ExpertCut
from disttrain.experts.exchange.sizes import TAG, packed
from disttrain.kernels.grouped.rows import ExpertOrder
from disttrain.process_group import ProcessGroup, Work
from disttrain.process_group.door import issue

_Splits = tuple[list[int], list[int], int, int]
"""Rows to each rank and from each, and the sums of both."""


class AllToAll(Exchange):
    """Sends what is there."""

    agrees = True

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group)
        self._host_buffers: list[torch.Tensor] = []
        self._without_rows: dict[tuple[torch.dtype, int], tuple[torch.Tensor]] = {}
        self._one_each = [1] * group.group_size

    def route(
        self,
        x: torch.Tensor,
        order: ExpertOrder,
        num_experts: int,
        weights: torch.Tensor | None,
        most_rows: int,
        asked: int = 0,
    ) -> SizedRoute:
        """Begin to exchange the sizes; see `Exchange`."""
        if order.ends.is_cuda and torch.cuda.is_current_stream_capturing():
            raise CompileError(
                NAME,
                "the host reads the sizes of an exchange, and no recording can wait for the host.",
                "Call shard_experts with exchange='padded', or 'peers' on one host.",
                rank=self.group.world.rank,
            )
        cut = ExpertCut.of(num_experts, self.group.group_size)
        sizes = packed(order.ends, cut, weights, asked * NUM_CODES + code_of(x))
        own, others = sizes.unbind()
        # On the device alone: the host does not wait for it before it reads.
        run = self.group.backend_of("all_to_all_single", own).all_to_all_single
        arguments = (others, own, self._one_each, self._one_each, False)
        issue(self.group, "all_to_all_single", run, arguments, (own,), (others,), async_op=False)
        return SizedRoute(self, order, cut, sizes)

    def send(
        self, output: torch.Tensor, rows: torch.Tensor, received: list[int], sent: list[int], *, async_op: bool
    ) -> Work | None:
        """Exchange rows, whose numbers are others at each call: the recorder is told of rows without them."""
        kind = (rows.dtype, rows.shape[1])
        like = self._without_rows.get(kind)
        if like is None:
            like = self._without_rows[kind] = (rows.new_empty((0, rows.shape[1])),)
        # Of sizes that are known to fit: they need no checks.
        run = self.group.backend_of("all_to_all_single", rows).all_to_all_single
        arguments = (output, rows, received, sent, async_op)
        return issue(self.group, "all_to_all_single", run, arguments, (rows,), (output,), async_op, recorded=like)

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Pinned memory, of which a few are enough: each is read before the next layer asks."""
        for index, buffer in enumerate(self._host_buffers):
            if buffer.shape == like.shape:
                return self._host_buffers.pop(index)
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def give_back(self, buffer: torch.Tensor) -> None:
        self._host_buffers.append(buffer)


class SizedRoute:
    """A Route whose sizes are known to the host once rows are sent."""

    def __init__(self, owner: AllToAll, order: ExpertOrder, cut: ExpertCut, sizes: torch.Tensor) -> None:
        self._owner = owner
        self._group = owner.group
        self._cut = cut
        self._sizes = sizes
        self._num_home = order.order.shape[0]
        self._host: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        if sizes.is_cuda:
            self._host = owner.host_buffer(sizes)
            self._host.copy_(sizes, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        self._splits: _Splits | None = None
        self._asked = 0
        self._arrival: ExpertOrder
        self.ends: torch.Tensor

    def agreed(self, asked: int) -> int:
        if self._splits is None:
            self._read()
        return self._asked

    def start(self, rows: torch.Tensor, is_back: bool, *, async_op: bool = True) -> tuple[torch.Tensor, Work | None]:
        sent, received, num_sent, num_received = self._splits or self._read()
        if is_back:
            rows = rows.index_select(0, self._arrival.slots)
            sent, received = received, sent
            output = coming = rows.new_empty((self._num_home, rows.shape[1]))
        else:
            output = coming = rows.new_empty((num_received, rows.shape[1]))
        if num_sent != self._num_home:
            # Assignments without an expert come last: they are not sent, and nothing comes for them.
            if is_back:
                output = coming[:num_sent]
                coming[num_sent:] = 0
            else:
                rows = rows[:num_sent]
        return coming, self._owner.send(output, rows.contiguous(), received, sent, async_op=async_op)

    def finish(self, coming: torch.Tensor, work: Work | None, is_back: bool) -> torch.Tensor:
        if work is not None:
            work.wait()
        return coming if is_back else coming.index_select(0, self._arrival.order)

    def _read(self) -> _Splits:
        """Read the sizes, and learn from them how what comes is to be sorted."""
        sizes = self._sizes
        chunk = self._cut.chunk
        if self._host is not None and self._copied is not None:
            self._copied.synchronize()
            tails = self._host[:, :, chunk:].tolist()
            self._owner.give_back(self._host)
        else:
            tails = sizes[:, :, chunk:].tolist()
        # What is not finite, less itself, is nan.
        sent, received, tags = [], [], []
        for (sent_total, _), (total, finding) in zip(*tails, strict=True):
            if finding - finding:
                self._refuse([rank for rank, (_, finding) in enumerate(tails[1]) if finding - finding])
            sent.append(int(sent_total) % TAG)
            tag, number = divmod(int(total), TAG)
            received.append(number)
            tags.append(tag)
        if min(tags) != max(tags):
            check_alike([tag % NUM_CODES for tag in tags], self._group)
        self._asked = min(tags) // NUM_CODES
        self._splits = splits = sent, received, sum(sent), sum(received)
        # Not the pad of a rank that has fewer experts than others.
        counts = sizes[1, :, : self._cut.num_experts_of(self._group.group_rank)]
        self._arrival = arrange(counts, splits[3])
        self.ends = self._arrival.ends
        return splits

    def _refuse(self, ranks: list[int]) -> None:
        members = ", ".join(str(self._group.members[rank]) for rank in ranks)
        raise ShapeError(
            NAME,
            f"the weights of tokens' experts on rank {members} are not all finite: the router's scores have a nan or "
            "an inf.",
            "Look at that rank's batch and at the router's input; detect_anomaly finds where it arose.",
            rank=self._group.world.rank,
        )
