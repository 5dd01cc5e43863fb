"""Modules with sharded parameters, as a pipeline sees them: whatever has these methods, `fsdp2`'s among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class ScheduledModule(Protocol):
    """A module whose sharded parameters, its own and those below it, somebody else gathers and frees. Collective."""

    def set_is_scheduled(self, is_scheduled: bool) -> None:
        """True: its forwards and backwards do nothing of the kind themselves."""
        ...

    def share_comm_with(self, others: Sequence[Any]) -> None:
        """Use the same streams and buffers as other such modules."""
        ...

    def unshard_all(self) -> None:
        """Start gathering; whoever computes waits."""
        ...

    def reshard_all(self) -> None:
        """Free what has been gathered. Gradients stay."""
        ...

    def reduce_grads(self) -> None:
        """Start reducing the gradients, of which there will be no more."""
        ...

    def finish_grads(self) -> None:
        """Order the current stream after that."""
        ...

    def reset_iter_state(self) -> None:
        """Forget a step that has failed."""
        ...


def scheduled_modules(module: nn.Module) -> list[ScheduledModule]:
    """The outermost such modules in `module`, itself included."""
    if isinstance(module, ScheduledModule):
        return [module]
    return [scheduled for child in module.children() for scheduled in scheduled_modules(child)]


def reset_iteration(modules: Sequence[ScheduledModule]) -> None:
    """A step has failed."""
    for module in modules:
        module.reset_iter_state()


def forget_recording(modules: Sequence[Any]) -> None:
    """A step was not recorded as a graph: nothing of what was queued for it is there. Waits for nothing."""
    for each in (below for module in modules for below in module.modules()):
        if (forget := getattr(each, "forget_recording", None)) is not None:
            forget()


def schedule_modules(modules: Sequence[ScheduledModule]) -> None:
    """Let a schedule decide for all of these, which one rank runs."""
    for module in modules:
        module.set_is_scheduled(True)
    if len(modules) > 1:
        modules[0].share_comm_with(modules[1:])
