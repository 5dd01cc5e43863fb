"""A pipeline whose ranks have agreed: its schedules, metadata and messages, and how its ranks learn of a failure."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Mapping

import torch

from disttrain.errors import DisttrainError, ScheduleError, StoreError
from disttrain.pipelining.passes.early_receives import place_receives_early
from disttrain.pipelining.runtime.executor import Executor
from disttrain.pipelining.runtime.in_flight import Batch
from disttrain.pipelining.runtime.learning import MetadataExchange
from disttrain.pipelining.runtime.losses import Losses
from disttrain.pipelining.runtime.messages import Messenger
from disttrain.pipelining.runtime.routes import Routes
from disttrain.pipelining.schedule.action import SENDS
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.pipelining.schedule.slots import slots_needed
from disttrain.pipelining.schedule.verifier import verify
from disttrain.pipelining.schedules.forward_only import forward_only
from disttrain.pipelining.stage import PipelineStage
from disttrain.process_group import ProcessGroup
from disttrain.store import PrefixStore, Store

_MAX_REASON_CHARS = 1000


class Running:
    """One rank's side of it.

    Args: schedule  computations only, or with all that an executor needs;  lower  makes the latter of the former;
          name  tells this pipeline from all others of the job;  num_early  past how many computations receives move up
          that no other of the same direction stands before.
    """

    def __init__(
        self,
        group: ProcessGroup,
        stages: Mapping[int, PipelineStage],
        schedule: Schedule,
        routes: Routes,
        lower: Callable[[Schedule], Schedule],
        messenger: Messenger,
        name: str,
        device: torch.device,
        *,
        is_dynamic: bool,
        num_early: int,
        uses_copy_engines: bool,
        fuses_sums: bool,
    ) -> None:
        self._group = group
        self.routes = routes
        self._name = name
        self._store = _store_of(group, name)
        only_forward = forward_only(schedule.placement, schedule.num_microbatches)
        self._schedules = {True: schedule, False: only_forward}
        self._lowered: dict[bool, Schedule] = {}
        self._lower = lower
        self._num_early = num_early
        self._uses_copy_engines = uses_copy_engines and device.type == "cuda"
        self._messenger = messenger
        self._executor = Executor(stages, routes, self._messenger, device, fuses_sums=fuses_sums)
        self._exchanges = {
            is_training: MetadataExchange(
                PrefixStore("metadata" if is_training else "forward", self._store),
                group.timeout_s,
                self._check,
                is_dynamic=is_dynamic,
            )
            for is_training in (True, False)
        }

    def run(self, batch: Batch, losses: Losses, *, is_training: bool) -> None:
        """One pass. Collective."""
        lowered = self._lowered.get(is_training) or self._prepare(is_training)
        exchange = self._exchanges[is_training]
        is_first = exchange.is_learning
        self._executor.run(lowered, exchange, batch, losses)
        if is_first and is_training and self._uses_copy_engines and not exchange.is_learning:
            self._messenger.open_channels(_pairs(lowered), max(2, slots_needed(lowered)))

    def is_recorded(self, *, is_training: bool) -> bool:
        """True where a pass would become part of a CUDA graph: it tells the other ranks nothing, and sends nothing."""
        return self._messenger.is_recorded and not self._exchanges[is_training].is_learning

    def forget_recording(self, error: Exception) -> None:
        """A pass that was to become part of a graph has failed: it is as if it had not begun. The other ranks learn it
        from whoever records."""
        self._executor.forget_failed(is_recorded=True)
        self._messenger.forget_recording()
        _let_go(error)

    def fail(self, error: Exception) -> str:
        """This rank cannot go on, and the others learn it. Returns: why another rank had failed before, or ""."""
        first = tell_failure(self._group, self._name, error)
        self._messenger.give_up("pipelining.step", error)
        try:
            self._executor.forget_failed()
        except Exception as second:  # noqa: BLE001  whatever it is, the first error is the one to look at
            error.add_note(f"and then, while tidying up: {type(second).__name__}: {second}")
        _let_go(error)
        return first

    def _check(self) -> None:
        if self._store.check(["failed"]):
            raise ScheduleError("pipelining.step", "another rank has failed.", "Look there.")

    def _prepare(self, is_training: bool) -> Schedule:
        lowered = self._lower(self._schedules[is_training])
        verify(lowered)
        self._messenger.connect(_pairs(lowered))
        if self._num_early:
            # Each direction has a group of its own, and ranks agree about each alone.
            lowered = place_receives_early(lowered, self._num_early, by_direction=True)
        self._lowered[is_training] = lowered
        return lowered


def tell_failure(group: ProcessGroup, name: str, error: Exception) -> str:
    """A rank of the pipeline called `name` cannot go on. Returns: why another had failed before, or ""."""
    problem = error.problem if isinstance(error, DisttrainError) else f"{type(error).__name__}: {error}"
    reason = f"rank {group.world.rank}: {problem}"[:_MAX_REASON_CHARS]
    first = reason
    with contextlib.suppress(StoreError):
        first = _store_of(group, name).compare_set("failed", "", reason).decode()
    return "" if first == reason else first


def _store_of(group: ProcessGroup, name: str) -> Store:
    return PrefixStore(f"pipelines/{name}", group.world.store)


def _pairs(lowered: Schedule) -> set[tuple[int, int]]:
    """From which rank to which something is sent."""
    home = lowered.placement.ranks
    return {
        (home[action.stage], home[action.peer])
        for actions in lowered.ranks
        for action in actions
        if action.op in SENDS and action.peer is not None
    }


def _let_go(error: BaseException | None) -> None:
    """Clears the frames of our own functions in an error's traceback. Gloo closes its connections when nothing holds a
    message any more, and that wakes the ranks that wait at the other end."""
    seen = []
    while error is not None and error not in seen:
        seen.append(error)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__", "").startswith("disttrain."):
                # Frames that still run cannot be cleared, and hold no messages.
                with contextlib.suppress(RuntimeError):
                    frame.clear()
        error = error.__cause__ or error.__context__
