"""Models as plain values: a tree of nodes, each a layer or a container, some of them sharded.

All parts map rows of DIM numbers to such rows, so any part fits anywhere, and a tree with a part left out is a model.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

DIM = 5


class _Short:
    """A dataclass that is printed without what is as ever."""

    def __repr__(self) -> str:
        own = [field for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{field.name}={getattr(self, field.name)!r}' for field in own)})"


@dataclass(frozen=True, repr=False)
class Shard(_Short):
    """How `fully_shard` is called on a part; `together`: on the list of its parts; `on_host`: with a policy that keeps
    shards there; `transfers`: the form in which values travel."""

    reshard: bool | int | None = None
    policy: str = ""
    cuts_last: bool = False
    together: bool = False
    on_host: bool = False
    transfers: str = ""


@dataclass(frozen=True, repr=False)
class Node(_Short):
    """A part of a model. `io`: in what its inputs and outputs come."""

    kind: str
    children: tuple[Node, ...] = ()
    shard: Shard | None = None
    io: str = "plain"
    frozen: bool = False


@dataclass
class Carried:
    """Inputs and outputs of `io` "dataclass"."""

    x: torch.Tensor
    depth: int = 0


class Part(nn.Module):
    """A node's module."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node = node
        self.parts = nn.ModuleList(map(Part, node.children))
        if node.kind == "shared" and len(self.parts):
            self.again = self.parts[0]
        if node.kind == "tied parts":
            tie(self)
        self.syncs = True
        """Also said to `fully_shard`; the reference goes by it."""
        self.sums_copies = True
        self.reached: Callable[[Part], None] | None = None
        """Told when a backward reaches a sharded part of the reference."""
        for name, shape in SHAPES.get(node.kind, {}).items():
            dtype = torch.float32 if node.kind == "narrow" else torch.float64
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype), not node.frozen))
        if node.kind == "buffer":
            self.register_buffer("mean", torch.zeros(DIM, dtype=torch.float64))
        if node.kind == "tied":
            self.first, self.second = (nn.Linear(DIM, DIM, dtype=torch.float64) for _ in range(2))
            self.second.weight = self.first.weight
            self.requires_grad_(not node.frozen)

    def forward(self, given: Any = None, *, named: torch.Tensor | None = None) -> Any:
        x = named if named is not None else opened(given, self.node.io)
        y = COMPUTE[self.node.kind](self, x).to(x.dtype)
        if "added" in self._parameters:
            y = y + self.added.to(x.dtype)
        if self.reached is not None and y.requires_grad:
            y.register_hook(lambda _: self.reached(self))
        if self.node.io in ("pair", "spare"):
            return y, y * 0.5
        if self.node.io == "parameter":
            return y, next((parameter for _, parameter in self.named_parameters(recurse=False)), None)
        return wrapped(y, self.node.io)

    def extra(self, given: Any) -> torch.Tensor:
        """Another method than forward, which calls that, too."""
        return COMPUTE[self.node.kind](self, call(self, opened(given, self.node.io))) * 0.5


def tie(part: Part) -> None:
    """Let all linear layers below have one weight, but for those that are sharded apart."""
    found: list[Part] = []

    def visit(below: Part) -> None:
        if below.node.shard is None:
            found.extend([below] if below.node.kind == "linear" else [])
            for child in below.parts:
                visit(child)

    for child in part.parts:
        visit(child)
    for below in found:
        below.weight = found[0].weight


def call(part: Part, x: torch.Tensor) -> torch.Tensor:
    """The part's output as a plain tensor, by whatever its inputs and outputs are."""
    io = part.node.io
    output = part(named=x) if io == "named" else part(wrapped(x, io))
    if io == "pair":
        return (output[0] + output[1]).to(x.dtype)
    if io == "parameter" and output[1] is not None and output[1].numel():
        return output[0].to(x.dtype) * (1 + output[1].to(x.dtype).mean())
    return (opened(output, io) if io not in ("spare", "parameter") else output[0]).to(x.dtype)


def wrapped(x: torch.Tensor, io: str) -> Any:
    return {"tuple": (x,), "dict": {"x": x, "depth": 1}, "dataclass": Carried(x), "list": [x, None]}.get(io, x)


def opened(given: Any, io: str) -> torch.Tensor:
    x = given.x if io == "dataclass" else given["x"] if io == "dict" else given
    return x[0] if io in ("tuple", "list") else x


IO = ("plain", "tuple", "dict", "dataclass", "list", "named", "pair", "spare", "parameter")

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "linear": {"weight": (DIM, DIM), "bias": (DIM,)},
    "narrow": {"weight": (DIM, DIM)},
    "wide": {"up": (2 * DIM + 1, DIM), "down": (DIM, 2 * DIM + 1)},
    "scale": {"scale": (DIM,)},
    "one": {"one": (1,)},
    "row": {"row": (1, DIM)},
    "cube": {"cube": (2, DIM, DIM)},
    "empty": {"nothing": (0, 3), "scale": (DIM,)},
    "scalar": {"scalar": ()},
    "unused": {"scale": (DIM,), "never": (3, 2)},
    "table": {"table": (3, DIM)},
    "norm": {"scale": (DIM,), "shift": (DIM,)},
    "buffer": {"scale": (DIM,)},
}


def _own(part: Part, x: torch.Tensor, *names: str) -> list[torch.Tensor]:
    """The part's parameters, in the dtype of what it computes with."""
    return [getattr(part, name).to(x.dtype) for name in names]


def _linear(part: Part, x: torch.Tensor) -> torch.Tensor:
    return x + F.linear(x, *_own(part, x, *SHAPES[part.node.kind])).tanh()


def _wide(part: Part, x: torch.Tensor) -> torch.Tensor:
    up, down = _own(part, x, "up", "down")
    return x + F.linear(F.linear(x, up).tanh(), down)


def _cube(part: Part, x: torch.Tensor) -> torch.Tensor:
    return x + torch.einsum("bi,kij->bj", x, *_own(part, x, "cube")).tanh()


def _scale(part: Part, x: torch.Tensor) -> torch.Tensor:
    return x * _own(part, x, "scale")[0]


def _empty(part: Part, x: torch.Tensor) -> torch.Tensor:
    scale, nothing = _own(part, x, "scale", "nothing")
    return x * scale + nothing.sum()


def _buffer(part: Any, x: torch.Tensor) -> torch.Tensor:
    if part.training:
        part.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return _scale(part, x - part.mean.to(x.dtype, copy=True))


def _table(part: Part, x: torch.Tensor) -> torch.Tensor:
    return x + F.embedding((x.detach()[:, 0].abs() * 10).long() % 3, *_own(part, x, "table"))


def _tied(part: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in (part.first, part.second):
        x = x + F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype)).tanh()
    return x


def _seq(part: Part, x: torch.Tensor) -> torch.Tensor:
    for child in part.parts:
        x = call(child, x)
    return x


def _twice(part: Part, x: torch.Tensor) -> torch.Tensor:
    return _seq(part, _seq(part, x))


def _shared(part: Part, x: torch.Tensor) -> torch.Tensor:
    x = _seq(part, x)
    return call(part.again, x) if len(part.parts) else x


def _dropped(part: Part, x: torch.Tensor) -> torch.Tensor:
    _seq(part, x)
    return x.tanh()


def _detached(part: Part, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        known = _seq(part, x)
    return x + known


COMPUTE: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "linear": _linear,
    "narrow": _linear,
    "wide": _wide,
    "scale": _scale,
    "one": lambda part, x: x.tanh() * _own(part, x, "one")[0],
    "row": lambda part, x: x.tanh() + _own(part, x, "row")[0],
    "cube": _cube,
    "empty": _empty,
    "scalar": lambda part, x: x.tanh() + _own(part, x, "scalar")[0],
    "unused": _scale,
    "table": _table,
    "norm": lambda part, x: F.layer_norm(x, (DIM,), *_own(part, x, "scale", "shift")),
    "buffer": _buffer,
    "tied": _tied,
    "plain": lambda part, x: x.tanh(),
    "seq": _seq,
    "residual": lambda part, x: x + _seq(part, x).tanh(),
    "branches": lambda part, x: x + sum(call(child, x).tanh() for child in part.parts),
    "twice": _twice,
    "shared": _shared,
    "tied parts": _seq,
    "dropped": _dropped,
    "detached": _detached,
    "in training": lambda part, x: _seq(part, x) if part.training else x,
    "recomputed": lambda part, x: checkpoint(_seq, part, x, use_reentrant=False),
    "recomputed reentrant": lambda part, x: checkpoint(_seq, part, x, use_reentrant=True),
}
LEAVES = (*SHAPES, "tied", "plain")
CONTAINERS = tuple(kind for kind in COMPUTE if kind not in LEAVES)


def initialised(node: Node, seed: int) -> Part:
    """The whole model with values of the seed, each parameter's by its name alone."""
    model = Part(node)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw(parameter, name, seed)
    return model


def draw(parameter: torch.Tensor, name: str, seed: int) -> None:
    """Give a parameter the values of its name."""
    generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    shift = 1.0 if name.endswith("scale") else 0.0
    values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    parameter.copy_(values * 0.4 + shift)


def parts_of(model: nn.Module) -> list[Part]:
    return [module for module in model.modules() if isinstance(module, Part)]


def sharded_parts(model: nn.Module) -> list[Part]:
    """Those that `fully_shard` is called on by themselves, from the root down."""
    return [part for part in parts_of(model) if part.node.shard is not None and not part.node.shard.together]


def taken_together(part: Part) -> list[Part]:
    """The parts of this one that `fully_shard` takes as a list."""
    if part.node.shard is None or not part.node.shard.together:
        return []
    return [child for child in part.parts if child.node.shard is None or child.node.shard.together]


@dataclass(frozen=True)
class Owner:
    """What takes a parameter: the call of `fully_shard` on `part`, or on a list of which `part` is the first."""

    part: Part
    shard: Shard


def owners(model: Part) -> dict[str, Owner | None]:
    """For each parameter what takes it, if anything does."""
    chosen: dict[nn.Module, Owner | None] = {}

    def visit(module: nn.Module, owner: Owner | None, lists: dict[Part, Owner]) -> None:
        if isinstance(module, Part) and module in lists:
            owner = lists[module]
        if isinstance(module, Part) and module.node.shard is not None:
            if not module.node.shard.together:
                owner = Owner(module, module.node.shard)
            elif together := taken_together(module):
                lists = {**lists, **dict.fromkeys(together, Owner(together[0], module.node.shard))}
        chosen[module] = owner
        for child in module.children():
            visit(child, owner, lists)

    visit(model, None, {})
    found = {}
    for name, parameter in model.named_parameters():
        owner = chosen[model.get_submodule(name.rpartition(".")[0])]
        found[name] = owner if parameter.ndim else None
    return found
