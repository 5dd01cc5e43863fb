"""Swaps the parameters that the modules of a group have: gathered ones while they compute, and else the shards.

Outside of a module's own forward and backward, `parameters()` and attributes must give the shards, which an optimizer
holds. The memory of gathered parameters may be kept meanwhile, but the modules do not show them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from disttrain.fsdp2._torch import (
    are_same,
    parameters_of,
    storage_of,
    values_of,
    which_require_grad,
)

if TYPE_CHECKING:
    from disttrain.fsdp2.params.param import ShardedParam


@dataclass(frozen=True, eq=False)
class ForeignTensor:
    """A tensor that a module has as `name` where the parameter's shard or the gathered one is expected."""

    param: ShardedParam
    parameters: dict[str, torch.Tensor | None]
    name: str
    tensor: torch.Tensor | None


Substitutes = Sequence[tuple[ForeignTensor, torch.Tensor]]
"""Values that modules have for a call, and where."""


@dataclass(frozen=True, eq=False)
class _Swaps:
    """In columns: a module's dict of parameters, the name of one of them, its shard, the gathered parameter, and its
    storage."""

    parameters: list[dict[str, torch.Tensor | None]]
    names: list[str]
    shards: list[nn.Parameter]
    unsharded: list[nn.Parameter]
    storages: list[int]

    @classmethod
    def of(cls, params: Sequence[ShardedParam], unsharded: Sequence[nn.Parameter]) -> _Swaps:
        """One for each owner of each parameter."""
        owners = [owner for param in params for owner in param.owners]
        return cls(
            [parameters_of(owner.module) for owner in owners],
            [owner.name for owner in owners],
            [param.sharded for param in params for _ in param.owners],
            [parameter for param, parameter in zip(params, unsharded, strict=True) for _ in param.owners],
            [storage_of(parameter) for param, parameter in zip(params, unsharded, strict=True) for _ in param.owners],
        )

    def put(self, new: Sequence[nn.Parameter], old: Sequence[nn.Parameter]) -> bool:
        """Replaces each old object by the new one. False if a module has something else, which it keeps."""
        current = [*map(dict.get, self.parameters, self.names)]
        if are_same(current, old):
            for parameters, name, parameter in zip(self.parameters, self.names, new, strict=True):
                parameters[name] = parameter
            return True
        for parameters, name, now, was, parameter in zip(self.parameters, self.names, current, old, new, strict=True):
            if now is was:
                parameters[name] = parameter
        return False


class Shown:
    """Swaps the parameters of a group in its modules."""

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self.is_whole = False
        """True while modules have the gathered parameters."""
        self._params = params
        self._swaps: _Swaps | None = None
        self._asked_for: list[bool] = []
        """For each gathered parameter, whether it required a gradient when modules got it."""
        self.substitutes: Substitutes = ()
        """The values that modules have for a call, in place of those that the caller set."""
        self._noted: tuple[_Swaps, tuple[int, ...]] | None = None
        """The gathered parameters that modules had when a forward began, and their `values_of`."""
        self.is_on_request = False
        """True while the user has gathered ones that no forward has begun with."""
        self.num_data_writes = 0
        """To the shards, through their `.data`, before the last forward."""
        self.num_forwards = 0
        self.digests: tuple[tuple[int, ...], list[torch.Tensor]] | None = None
        """In some forwards, of what the gathered parameters were when it began."""

    def __getstate__(self) -> dict[str, object]:
        """The state of a deep copy: nothing is gathered."""
        return {
            "is_whole": False,
            "_params": self._params,
            "_swaps": None,
            "_asked_for": [],
            "substitutes": (),
            "_noted": None,
            "is_on_request": False,
            "num_data_writes": 0,
            "num_forwards": 0,
            "digests": None,
        }

    def forget(self) -> None:
        """Shards, or what is made of them, have become other tensors."""
        self._swaps = None

    def show(self, unsharded: Sequence[nn.Parameter]) -> list[ForeignTensor]:
        """Let modules have the gathered parameters. Returns the places where they have something else than the shard,
        which are left as they are."""
        swaps = self._swaps
        if swaps is None:
            swaps = self._swaps = _Swaps.of(self._params, unsharded)
        self.is_whole = True
        asked_for = self._asked_for = which_require_grad(swaps.shards)
        if which_require_grad(swaps.unsharded) != asked_for:
            for parameter, asks in zip(swaps.unsharded, asked_for, strict=True):
                if parameter.requires_grad is not asks:
                    parameter.requires_grad_(asks)
        return [] if swaps.put(swaps.unsharded, swaps.shards) else self._others(swaps)

    def note_values(self) -> None:
        """Remember what the gathered parameters are, to be compared with."""
        self._noted = None if self._swaps is None else (self._swaps, values_of(self._swaps.unsharded))

    def written(self) -> list[str]:
        """Names of the gathered parameters that have been written to since, or that have got other memory."""
        swaps = self._swaps
        if swaps is None or self._noted is None or self._noted[0] is not swaps:
            return []
        now, before = values_of(swaps.unsharded), self._noted[1]
        if now == before:
            return []
        params = [param for param in self._params for _ in param.owners]
        count = len(params)
        are_written = [version != was for version, was in zip(now[:count], before[:count], strict=True)]
        # A parameter that was freed meanwhile, and perhaps gathered again, still has its storage.
        have_moved = [
            storage_of(parameter) != storage for parameter, storage in zip(swaps.unsharded, swaps.storages, strict=True)
        ]
        of_each = zip(params, are_written, have_moved, strict=True)
        return [*dict.fromkeys(param.fqn for param, is_written, has_moved in of_each if is_written or has_moved)]

    def _others(self, swaps: _Swaps) -> list[ForeignTensor]:
        params = [param for param in self._params for _ in param.owners]
        return [
            ForeignTensor(param, parameters, name, parameters.get(name))
            for param, parameters, name, parameter in zip(
                params, swaps.parameters, swaps.names, swaps.unsharded, strict=True
            )
            if parameters.get(name) is not parameter
        ]

    def substitute(self, foreign: ForeignTensor, value: torch.Tensor) -> None:
        """Let a module have `value` until the shards are shown again."""
        foreign.parameters[foreign.name] = value
        self.substitutes = (*self.substitutes, (foreign, value))

    def substitute_again(self, substitutes: Substitutes) -> None:
        """Let modules have what they had before shards were shown, but where they were given other values since."""
        for foreign, value in substitutes:
            if foreign.parameters.get(foreign.name) is foreign.tensor:
                self.substitute(foreign, value)

    def hide(self) -> None:
        """Let modules have the shards again. What they were given meanwhile is left to them."""
        swaps = self._swaps
        assert swaps is not None
        self.is_whole = False
        if which_require_grad(swaps.unsharded) != self._asked_for:
            for sharded, parameter, was_asked in zip(swaps.shards, swaps.unsharded, self._asked_for, strict=True):
                if parameter.requires_grad is not was_asked:
                    # The user has frozen or unfrozen the gathered parameter.
                    sharded.requires_grad_(parameter.requires_grad)
        swaps.put(swaps.shards, swaps.unsharded)
        for foreign, value in self.substitutes:
            if foreign.parameters.get(foreign.name) is value:
                foreign.parameters[foreign.name] = foreign.tensor
        self.substitutes = ()
