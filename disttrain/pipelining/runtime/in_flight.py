"""State between the actions of one rank: microbatches between forward and backward, and messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from disttrain.pipelining._torch import Root
from disttrain.pipelining.model.backward import Backward, Casts
from disttrain.pipelining.runtime.losses import Losses
from disttrain.pipelining.runtime.message_metadata import MessageMetadata, TensorMetadata
from disttrain.pipelining.schedule.action import RECEIVES, SENDS, Action, Op
from disttrain.process_group import Work
from disttrain.process_group.watching.ranges import in_range

Microbatch = tuple[int, int]
"""A stage, and which microbatch."""


@dataclass(frozen=True)
class Batch:
    """The input of this rank: of each microbatch, arguments for the first stage and keywords for all of its stages."""

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[Mapping[str, Any]]


Message = tuple[int, int, int | None]
"""The sending stage, the receiving stage, and the microbatch; None for gradients of tied weights."""


class Handed(NamedTuple):
    """Values for another stage of this rank: tensors, their metadata (of gradients none), and when their stage had made
    them."""

    metadata: MessageMetadata | None
    tensors: Sequence[torch.Tensor]
    made: torch.cuda.Event | None


class Input(NamedTuple):
    """A tensor that has come to a stage: number `which` of those that `source` returned."""

    source: int
    which: int
    metadata: TensorMetadata
    tensor: torch.Tensor


@dataclass
class InFlight:
    """A microbatch in flight: on one stage, between its forward and its last backward.

    `roots`: where its backward begins, one per tensor that it returned; `outputs`: the metadata of these; `meshes`: of
    those that are DTensors.
    """

    backward: Backward
    inputs: Sequence[Input]
    roots: Sequence[Root | None] = ()
    outputs: Sequence[TensorMetadata] = ()
    meshes: Sequence[Any] = ()
    root_grads: list[torch.Tensor | None] | None = None


@dataclass
class Pass:
    """All that one pass over the schedule has under way."""

    batch: Batch
    losses: Losses
    in_flight: dict[Microbatch, InFlight] = field(default_factory=dict)
    outbox: dict[Message, Sequence[torch.Tensor]] = field(default_factory=dict)
    inbox: dict[Message, tuple[list[Work], Sequence[torch.Tensor]]] = field(default_factory=dict)
    handed: dict[Message, Handed] = field(default_factory=dict)
    casts: Casts = field(default_factory=dict)
    due: dict[int, deque[Action]] = field(default_factory=dict)
    """Receives that are not posted yet, by peer."""


def label_of(action: Action) -> str:
    """Returns the text by which observers know this action."""
    if action.children:
        return ", ".join(map(label_of, action.children))
    microbatch = "" if action.microbatch is None else f" microbatch {action.microbatch}"
    return f"stage {action.stage}{microbatch} {action.op.value}"


def in_traces(do: Callable[[Action], None], action: Action) -> Callable[[Action], None]:
    """`do` for this action, shown in traces as `pipeline stage 2 microbatch 5 send forward to stage 3`; of actions that
    run together, each is shown by itself."""
    if action.children:
        return do
    microbatch = "" if action.microbatch is None else f" microbatch {action.microbatch}"
    peer = f" to stage {action.peer}" if action.op in SENDS else f" from stage {action.peer}"
    is_message = action.op in SENDS or action.op in RECEIVES
    return in_range(f"pipeline stage {action.stage}{microbatch} {_TRACED[action.op]}{peer if is_message else ''}", do)


_TRACED = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward for inputs",
    Op.BACKWARD_WEIGHT: "backward for weights",
    Op.SEND_F: "send forward",
    Op.RECV_F: "receive forward",
    Op.SEND_B: "send backward",
    Op.RECV_B: "receive backward",
    Op.SEND_TIED: "send tied gradients",
    Op.RECV_TIED: "receive tied gradients",
    Op.UNSHARD: "unshard",
    Op.RESHARD: "reshard",
    Op.REDUCE_GRAD: "reduce gradients",
}
