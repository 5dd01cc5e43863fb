"""What a rank holds while a program is played, and what all uses are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from disttrain.dtensor import DTensor
from tests.fsdp2_uses.models import DIM, Part, call, owners, parts_of, sharded_parts, taken_together
from tests.fsdp2_uses.programs import Program

Compared = Any
"""What a use gives: plain values and tensors, which are compared."""


class Session:
    """A rank and its model: sharded, or the plain one that it is judged by."""

    is_sharded = True

    def __init__(self, program: Program, model: Part, rank: int) -> None:
        self.program = program
        self.model = model
        self.rank = rank
        self.earlier: list[Part] = []
        """Models of which a copy has taken the place."""
        self.graphs: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Losses whose backward is still to come, with their inputs."""
        self.optimizers: list[torch.optim.Optimizer] = []
        self.calls: list[str] = []
        """Of hooks, since the last use."""
        self.is_unsharded = False
        """The user has gathered something, and not freed it."""
        self.is_refused = False
        """The use is one that the sharded model refuses."""
        self.keeps_after_backward = False
        self.hooks: dict[str, list[tuple[str, str]]] = {}
        """Hooks of parameters, by name: the name that they tell, and what they do."""
        self.fresh: set[str] = set()
        """Parameters that no forward of what takes them has seen yet."""

    def inputs(self, batch: int, asks: bool = False) -> torch.Tensor:
        """This rank's rows of a batch."""
        generator = torch.Generator().manual_seed(1000 * batch + self.rank)
        num_rows = 1 + (batch + self.rank) % 3
        return torch.randn(num_rows, DIM, generator=generator, dtype=torch.float64).requires_grad_(asks)

    def part(self, at: int) -> Part:
        parts = parts_of(self.model)
        return parts[at % len(parts)]

    def callable_part(self, at: int) -> Part:
        """The root, or a part that may be called without it."""
        parts = sharded_parts(self.model)
        return self.model if at == 0 or not parts else parts[at % len(parts)]

    def roots(self) -> list[Part]:
        """Sharded parts that are below no other one."""
        found: list[Part] = []
        for part in parts_of(self.model):
            inner = {below for root in found for below in root.modules()}
            if part not in inner and self._is_sharded_part(part):
                found.append(part)
        return found

    def _is_sharded_part(self, part: Part) -> bool:
        return part in {owner.part for owner in owners(self.model).values() if owner is not None} or (
            part.node.shard is not None and not part.node.shard.together
        )

    def parameter(self, which: int) -> tuple[str, nn.Parameter] | None:
        named = list(self.model.named_parameters())
        return named[which % len(named)] if named else None

    def loss_of(self, part: Part, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        called: set[nn.Module] = set()
        watching = register_module_forward_pre_hook(lambda module, _: called.add(module))
        try:
            output = call(part, x).to(torch.float64)
        finally:
            watching.remove()
        if part is self.model and self.fresh:
            self._take_up(called)
        return output, (output.square().mean() + output.sum() * 0.1).tanh()

    def _take_up(self, called: set[nn.Module]) -> None:
        """What is not of a sharded part that was called stays as it was put in: such a part may lie where no forward
        comes."""
        taken = owners(self.model)
        together = {
            part: set(parts) for one in parts_of(self.model) if (parts := taken_together(one)) for part in parts
        }
        self.fresh = {
            name
            for name in self.fresh
            if (owner := taken.get(name)) is not None and not called & together.get(owner.part, {owner.part})
        }

    def settle_shards(self) -> None:
        """Free what the user has gathered: what is written to then would be lost, by what `unshard` says."""
        for part in self.units() if self.is_unsharded and self.is_sharded else ():
            part.reshard()
        self.is_unsharded = False

    def units(self) -> list[Any]:
        """What `fully_shard` was called on, alone or in a list."""
        together = {part for container in parts_of(self.model) for part in taken_together(container)}
        alone = {*sharded_parts(self.model)}
        return [part for part in parts_of(self.model) if part in alone or part in together]

    def unit(self, at: int) -> Any:
        """One of them, to be set up: None where there are none, and of a plain model."""
        units = self.units()
        return units[at % len(units)] if units and self.is_sharded else None

    def before_writing(self) -> None:
        self.settle_shards()
        self.graphs.clear()

    def clear_gradients(self, set_to_none: bool = True) -> None:
        """Those of all parameters, and what ranks have not reduced yet."""
        for root in self.roots():
            root.zero_grad(set_to_none)
        self.model.zero_grad(set_to_none)


def whole_of(tensor: torch.Tensor, grad: bool = False) -> torch.Tensor:
    """The values as a plain tensor of its own."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole if grad else whole.detach().clone()
