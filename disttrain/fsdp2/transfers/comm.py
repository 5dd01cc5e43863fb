"""State that all groups of one model share: streams, and the buffers that a stream may still be reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from disttrain.fsdp2.grads.several import SeveralGrads
from disttrain.fsdp2.params.flat import FlatPlan
from disttrain.fsdp2.params.param import ShardedParam
from disttrain.fsdp2.params.sharding import Sharding
from disttrain.fsdp2.transfers.collectives import Reduction
from disttrain.fsdp2.transfers.streams import CommStreams


class Receiver(Protocol):
    """A group of parameters, as collectives know it that bring it something."""

    @property
    def sharding(self) -> Sharding: ...

    @property
    def module_path(self) -> str: ...

    def take_reduced(self, done: UnderWay) -> None: ...


class Comm:
    """Streams, and the buffers that a stream may still be reading: shared by all groups of one model."""

    def __init__(self, device: torch.device) -> None:
        self.streams = CommStreams(device)
        self.copied_out: tuple[torch.Tensor, torch.Event | None] | None = None
        self.reducing: list[UnderWay] = []
        """In the order in which they were started."""
        self.ready: torch.Event | None = None
        """The event that the next gather waits for, in place of everything on the current stream."""
        self.offloaded: torch.Event | None = None
        """Gradients are on their way to the host until then."""
        self.uploaded: torch.Event | None = None
        """Shards on the host are being read until then."""
        self.several_grads = SeveralGrads()

    def release_gathered(self) -> None:
        """Releases the last gathered buffer, once the all-gather stream waits for the copy out of it."""
        if self.copied_out is not None:
            with self.streams.gathering():
                self.streams.follow(self.copied_out[1])
            self.copied_out = None

    def drop_reductions(self, group: Receiver | None = None) -> None:
        """Wait for the reductions under way, of `group` or all, and forget what they bring."""
        if group is None:
            self.several_grads.forget()
        dropped = [part for part in self.reducing if group in (None, part.group)]
        self.reducing = [part for part in self.reducing if part not in dropped]
        wanted = {id(part.reduction) for part in self.reducing}
        for part in dropped:
            # What came as one message may be others', too.
            end = part.reduction.wait if id(part.reduction) in wanted else part.reduction.drop
            end(self.streams)

    def forget_run(self) -> None:
        """Nothing that was queued will be computed: neither results nor events are waited for."""
        self.reducing = []
        self.copied_out = self.ready = self.offloaded = self.uploaded = None
        self.several_grads.forget()

    def finish_offload(self) -> None:
        """Wait, on the host, until all gradients that go there have come."""
        if self.offloaded is not None:
            self.offloaded.synchronize()
            self.offloaded = None

    def finish_upload(self) -> None:
        """Wait, on the host, until shards that lie there may be written to."""
        if self.uploaded is not None:
            self.uploaded.synchronize()
            self.uploaded = None

    def finish_reductions(self, *, but_last_sum: bool = False) -> None:
        """Hand the gradients of the reductions under way to their parameters.

        `but_last_sum`: the last one's sum over the replicas may go on beside the next reduce-scatter.
        """
        last = self.reducing[-1] if but_last_sum and self.reducing else None
        going_on = last.reduction if last is not None and last.is_complete and last.reduction.has_sum else None
        if going_on is not None:
            going_on.wait_for_scatter(self.streams)
        # A hook of the user's may fail: what comes after it stays here, to be waited for.
        while self.reducing and self.reducing[0].reduction is not going_on:
            part = self.reducing.pop(0)
            with Named(part.group):
                part.group.take_reduced(part)


class Named:
    """While it lasts, collectives are said to be for the module of `group`."""

    __slots__ = ("_outer", "_path", "_world")

    def __init__(self, group: Receiver) -> None:
        self._world = group.sharding.mesh.world
        self._path = group.module_path

    def __enter__(self) -> None:
        self._outer, self._world.module = self._world.module, self._path

    def __exit__(self, *_: object) -> None:
        self._world.module = self._outer


@dataclass(eq=False, slots=True)
class UnderWay:
    """A reduction of some of a group's parameters; `receivers` of its parts are None for those that had no gradient.

    They lie by `plan` in the output of `reduction`, from `start` on.
    """

    group: Receiver
    reduction: Reduction
    start: int
    plan: FlatPlan
    receivers: Sequence[ShardedParam | None]
    is_complete: bool
    """False where it is still to be reduced over the replicas."""
    grads: Sequence[torch.Tensor] | None = None
    """The gradients of receivers where a rank alone has nothing to reduce, and they are not in the output."""

    @property
    def output(self) -> torch.Tensor:
        """This rank's flat buffer of averaged gradients, once the reduction has been waited for."""
        output, numel = self.reduction.output, self.plan.shard_numel
        return output if output.numel() == numel else output.narrow(0, self.start, numel)
