"""Uses that change parameters: write to them, load, copy, replace them, hang hooks on them."""

from __future__ import annotations

import copy

import torch
from torch import nn

from disttrain.dtensor import DTensor
from tests.fsdp2_uses.models import DIM, initialised, owners, parts_of
from tests.fsdp2_uses.session import Compared, Session


class Changing(Session):
    """What may be done with parameters."""

    def do_freeze(self, which: int, asks: bool) -> Compared:
        self.settle_shards()
        if chosen := self.parameter(which):
            chosen[1].requires_grad_(asks)

    def do_freeze_part(self, at: int, asks: bool) -> Compared:
        self.settle_shards()
        self.part(at).requires_grad_(asks)

    def do_write(self, which: int, how: str) -> Compared:
        self.before_writing()
        chosen = self.parameter(which)
        if chosen is None:
            return
        parameter = chosen[1]
        with torch.no_grad():
            if how == "in place":
                parameter.mul_(0.9)
            elif how == "data in place":
                parameter.data.mul_(0.9)
            elif how == "data":
                parameter.data = parameter.data * 0.9
            elif how == "copy":
                parameter.copy_(parameter.detach().clone() * 0.9)
            elif how == "init":
                nn.init.constant_(parameter, 0.3)
            elif how == "foreach":
                torch._foreach_mul_([parameter], 0.9)
            else:
                (parameter.to_local() if isinstance(parameter, DTensor) else parameter).mul_(0.9)

    def do_drop_gradient(self, which: int) -> Compared:
        self.settle_shards()
        if chosen := self.parameter(which):
            chosen[1].grad = None

    def do_load(self, factor: float, assign: bool) -> Compared:
        """Load what was saved, times a factor."""
        self.before_writing()
        state = self.model.state_dict()
        names = " ".join(state)
        state = {name: value.detach() * factor if value.is_floating_point() else value for name, value in state.items()}
        # Assigned to a plain model, what two parts share would become two.
        is_tied = any(part.node.kind.startswith("tied") for part in parts_of(self.model))
        self.model.load_state_dict(state, assign=assign and not is_tied)
        if assign and not is_tied:
            self.hooks.clear()
        return names

    def do_copy(self) -> Compared:
        """Go on with a deep copy."""
        self.settle_shards()
        self.graphs.clear()
        self.earlier.append(self.model)
        self.model = copy.deepcopy(self.model)
        self.hooks.clear()

    def do_hook(self, which: int, does: str) -> Compared:
        """Let a parameter's gradient be changed before it is added ("double"), or used as soon as it is ("step")."""
        self.settle_shards()
        chosen = self.parameter(which)
        if chosen is None or not chosen[1].requires_grad:
            return
        name, parameter = chosen
        if does == "step" and self._comes_in_pieces(name):
            # A step at each of them would change what the next one is made of.
            does = "count"
        self.hooks.setdefault(name, []).append((name, does))
        if self.is_sharded and does == "double":
            parameter.register_hook(lambda grad: self.doubled(name, grad))
        elif self.is_sharded:
            parameter.register_post_accumulate_grad_hook(lambda found: self.used(name, found, does))

    def _comes_in_pieces(self, name: str) -> bool:
        """Whether a parameter's gradient is that of several backwards within one, each of which calls hooks."""
        kinds = {part.node.kind for part in parts_of(self.model)}
        return "recomputed reentrant" in kinds and (
            owners(self.model)[name] is None or bool(kinds & {"twice", "shared"})
        )

    def doubled(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """What one kind of hook does."""
        self.calls.append(f"{name} double")
        return grad * 2

    def used(self, name: str, parameter: torch.Tensor, does: str) -> None:
        """What the other kinds do."""
        self.calls.append(f"{name} {does}")
        if does == "step" and parameter.grad is not None:
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

    def do_replace(self, at: int, what: str) -> Compared:
        """Put another layer in a part's place, or another parameter into a part, or one more."""
        self.before_writing()
        before = {id(parameter): name for name, parameter in self.model.named_parameters()}
        parents = [part for part in parts_of(self.model) if len(part.parts)]
        part = self.part(at)
        if what == "layer" and parents:
            parent = parents[at % len(parents)]
            place = at % len(parent.parts)
            if set(parts_of(parent.parts[place])) & set(self.units()):
                # With it `fully_shard`'s work goes, of which the new one knows nothing.
                return
            parent.parts[place] = part = initialised(parent.parts[place].node, 77)
        elif what == "one more":
            if "added" in part._parameters:
                return
            part.added = nn.Parameter(torch.full((DIM,), 0.1, dtype=torch.float64))
        else:
            own = [name for name, parameter in part.named_parameters(recurse=False) if parameter.ndim]
            if not own:
                return
            old = getattr(part, own[0])
            values = torch.linspace(-0.3, 0.3, old.numel(), dtype=old.dtype).view(old.shape)
            setattr(part, own[0], nn.Parameter(values))
        new = {id(parameter) for parameter in part.parameters()}
        names = {name for name, parameter in self.model.named_parameters() if id(parameter) in new}
        if what != "layer":
            own_path = next(path for path, module in self.model.named_modules() if module is part)
            changed = "added" if what == "one more" else own[0]
            names = {f"{own_path}.{changed}".lstrip(".")}
        self.fresh |= names
        gone = {name: self.hooks.pop(name, None) for name in names}
        for name, parameter in self.model.named_parameters():
            # What is used at two places may be left at one, and has its hooks there.
            if hooks := gone.get(before.get(id(parameter), "")):
                self.hooks[name] = hooks
