"""Messages between the ranks of a pipeline.

Each direction, toward higher ranks and toward lower ones, has a group of its own: on NCCL, a communicator and a stream
for each pair and direction, so that a message never waits for one in the other direction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch

from disttrain.process_group import ProcessGroup, Work, recv, send
from disttrain.process_group.calls.point_to_point import start_receiving, start_sending
from disttrain.process_group.cpp_warnings import without_warning
from disttrain.process_group.peers.channels import PeerChannels, open_channels
from disttrain.process_group.world import world_of

_MAX_UNDER_WAY = 4
"""The number of messages to one peer that may be in progress; on the CPU the host then waits for the oldest one."""


class Messenger:
    """The messages of one rank of `group`. What is sent is kept until it has gone.

    Pipelines over one group share it, one after the other: groups cost connections, and on NCCL memory.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        """Collective: every rank of the group."""
        world = world_of(group)
        # A rank that fails tells the others, whatever the transport.
        if world.default_group.asks_witnesses or device.type == "cuda":
            world.become_witness()
        self._group_rank = group.group_rank
        self._device = device
        self.ways: list[ProcessGroup] = []
        for _ in ("toward higher ranks", "toward lower ranks"):
            way = world.new_group(group.members, timeout_s=group.timeout_s)
            assert isinstance(way, ProcessGroup)
            way.axis_name = group.axis_name
            way.backend("pipelining.step", device.type)
            self.ways.append(way)
        self.may_wait = True
        """False while receives are posted when they are needed: then a send may have to wait for one of our own."""
        self._under_way: dict[int, deque[tuple[Work, torch.Tensor]]] = {}
        self._recorded: list[tuple[Work, torch.Tensor]] = []
        """As those under way, of a step that is being recorded as a CUDA graph."""
        self._connected: set[tuple[int, int]] = set()
        self._channels: PeerChannels | None = None
        self._largest_bytes = self._most_tensors = self._num_slots = 0

    @property
    def name(self) -> str:
        """Alike on all ranks while it can be used; empty afterwards."""
        return "" if any(way.ended_by for way in self.ways) else self.ways[0].group_name

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Connect these (from, to) pairs of group ranks, in an order that is the same on all ranks. Collective."""
        if self._device.type != "cuda":
            return
        new = sorted(set(pairs) - self._connected)
        self._connected.update(new)
        # torch warns of the communicators, which are what we want: one for each pair and direction.
        without_warning(r".*An unbatched P2P op", lambda: self._connect(new))
        torch.cuda.synchronize(self._device)

    def _connect(self, pairs: Sequence[tuple[int, int]]) -> None:
        token = torch.zeros(1, device=self._device)
        for source, target in pairs:
            # NCCL creates a pair's communicator with its first message, for which both ends block.
            if self._group_rank == source:
                send(token, group=self._way(target), group_dst=target)
            elif self._group_rank == target:
                recv(token, group=self._way(source, is_sender=False), group_src=source)

    def send(self, tensors: Sequence[torch.Tensor], peer: int, *, is_regular: bool = True) -> None:
        """Start sending to group rank `peer`, in this order; `is_regular`: each pass has one like it."""
        is_recorded = self.is_recorded
        under_way = self._under_way.get(peer) or self._under_way.setdefault(peer, deque())
        way = self._way(peer)
        if is_regular and not self.may_wait:
            self._most_tensors = max(self._most_tensors, len(tensors))
            self._largest_bytes = max(self._largest_bytes, *(tensor.nbytes for tensor in tensors), 0)
        for tensor in tensors:
            channels = self._channels and self._channels_for(tensor)
            work = start_sending(tensor, way, peer) if channels is None else channels.send(tensor, peer)
            (self._recorded if is_recorded else under_way).append((work, tensor))
        while under_way and not is_recorded and under_way[0][0].is_completed():
            under_way.popleft()
        while self.may_wait and self._device.type == "cpu" and len(under_way) > _MAX_UNDER_WAY:
            under_way.popleft()[0].wait()

    def receive(self, tensors: Sequence[torch.Tensor], peer: int) -> list[Work]:
        """Start receiving from group rank `peer`, in this order."""
        way = self._way(peer, is_sender=False)
        works = []
        for tensor in tensors:
            channels = self._channels and self._channels_for(tensor)
            works.append(start_receiving(tensor, way, peer) if channels is None else channels.receive(tensor, peer))
        return works

    def open_channels(self, pairs: Iterable[tuple[int, int]], num_slots: int) -> None:
        """Between GPUs of one host, leave messages as large as those so far to copy engines. Collective."""
        # An earlier pipeline of the group may go on beside this one.
        self._num_slots = max(self._num_slots, num_slots * self._most_tensors)
        # Once all ranks have come here, none writes to the messages of an earlier pipeline any more.
        torch.cuda.synchronize(self._device)
        self._channels = open_channels(self.ways[0], self._device, pairs, self._largest_bytes, self._num_slots)

    def finish(self) -> None:
        """Waits until all sends have gone; not on CUDA, where they may go on beside what follows, but for those that
        are recorded: a graph ends with all that belongs to it."""
        while self._recorded:
            self._recorded.pop()[0].wait()
        for under_way in self._under_way.values():
            while under_way and self._device.type == "cpu":
                under_way.popleft()[0].wait()

    @property
    def ended_by(self) -> str:
        """Returns the failure of another rank; empty while all is well."""
        return next(filter(None, (way.find_reason() for way in self.ways)), "")

    def give_up(self, operation: str, error: Exception) -> None:
        """This rank has failed. The others learn why."""
        if self._device.type == "cpu":
            # On CUDA copies may still read what is under way.
            self._under_way.clear()
        self._recorded.clear()
        for way in self.ways:
            way.give_up(operation, error)

    def forget_recording(self) -> None:
        """What was to go is not there: no GPU has computed it."""
        self._recorded.clear()

    @property
    def is_recorded(self) -> bool:
        """True while a step is being recorded as a CUDA graph, so that nothing goes to anybody yet."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _channels_for(self, tensor: torch.Tensor) -> PeerChannels | None:
        """Returns the channels for a tensor whose size both ends know. They count messages, which a graph does not."""
        if self.is_recorded:
            return None
        channels = self._channels
        return channels if channels is not None and self.may_wait and tensor.nbytes <= channels.slot_bytes else None

    def _way(self, peer: int, *, is_sender: bool = True) -> ProcessGroup:
        return self.ways[0 if is_sender == (peer > self._group_rank) else 1]


def messenger_of(group: ProcessGroup, device: torch.device, names: Sequence[str]) -> Messenger:
    """The group's messenger: the one there is where `names`, what each rank calls its own, are alike. Collective."""
    if group.messenger is None or not names[0] or any(name != names[0] for name in names):
        group.messenger = Messenger(group, device)
    messenger: Messenger = group.messenger
    return messenger
