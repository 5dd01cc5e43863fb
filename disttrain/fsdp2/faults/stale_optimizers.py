"""An optimizer that was built before sharding: its parameters are no longer the module's, and it would train nothing.

It is recognized when it steps: the model has gradients, and the parameters that the optimizer holds have none. This is
checked only if a parameter from before sharding is still alive when the model first runs.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from disttrain.errors import ShardingError
from disttrain.fsdp2.params.param import ShardedParam
from disttrain.fsdp2.params.param_group import ParamGroup

_WATCHED: Final[weakref.WeakKeyDictionary[object, _Replaced]] = weakref.WeakKeyDictionary()
"""The checks of optimizers before they step, by the owner of the model."""
_MUTEX: Final = threading.Lock()
"""Ranks may be threads."""


def watch_stale_optimizers(owner: object, groups: Sequence[ParamGroup]) -> None:
    """Let each optimizer that holds what parameters of `groups` were before sharding refuse to step on them, for as
    long as `owner` lives."""
    replaced = _Replaced(groups)
    if replaced.by_id:
        _hook_into_all()
        with _MUTEX:
            _WATCHED[owner] = replaced


@functools.cache
def _hook_into_all() -> None:
    """Registered once, and asked when an optimizer steps. Searching all objects for optimizers would hold references to
    tuples that other threads are still filling, and these would fail with a SystemError
    (https://bugs.python.org/issue15108)."""
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with _MUTEX:
        watched = [*_WATCHED.values()]
    for replaced in watched:
        replaced.check(optimizer)


def _nothing() -> None:
    """Stands for a reference whose object has gone."""


class _Replaced:
    """The parameters from before sharding that somebody still holds, and what they have become."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self.by_id: dict[int, tuple[weakref.ref[nn.Parameter], weakref.ref[ShardedParam]]] = {}
        self._healthy: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._rank = groups[0].sharding.mesh.get_rank() if groups else 0
        for param in (param for group in groups for param in group.params):
            original = None if param.original is None else param.original()
            if original is not None and param.original is not None:
                self.by_id[id(original)] = (param.original, weakref.ref(param))

    def in_(self, optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, ShardedParam]]:
        """Those that the optimizer holds, with what they have become."""
        pairs = []
        for group in getattr(optimizer, "param_groups", ()):
            for parameter in group["params"]:
                original, param = self.by_id.get(id(parameter), (_nothing, _nothing))
                replaced, became = original(), param()
                if replaced is parameter and replaced is not None and became is not None:
                    pairs.append((replaced, became))
        return pairs

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ShardingError if the optimizer is about to miss the model's gradients."""
        if optimizer in self._healthy:
            return
        pairs = self.in_(optimizer)
        if not pairs:
            self._healthy.add(optimizer)
            return
        if any(parameter.grad is not None for parameter, _ in pairs):
            return
        missed = [param for _, param in pairs if param.sharded.grad is not None]
        if missed:
            raise ShardingError(
                f"{type(optimizer).__name__}.step",
                f"it was built before fully_shard: {len(missed)} of its parameters, such as {missed[0].fqn}, are no "
                "longer the model's.",
                "Build the optimizer after the last call of fully_shard.",
                rank=self._rank,
            )
