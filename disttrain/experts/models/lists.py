"""Experts that are modules of their own, in a ModuleList: their linear layers computed in grouped products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, NoReturn

import torch
from torch import nn

from disttrain.errors import ShardingError
from disttrain.experts.crossing import GatedExperts
from disttrain.experts.exchange.expert_cut import ExpertCut
from disttrain.experts.expert_layer import ExpertLayer, local_part, without_experts
from disttrain.experts.models.computation import Assumed, Computation, Stacks, named
from disttrain.experts.models.stacking import lie_evenly, stacked
from disttrain.kernels._torch import has_hooks
from disttrain.kernels.grouped.rows import ExpertOrder
from disttrain.kernels.sparse24.training import SparseLinear
from disttrain.mesh import DeviceMesh
from disttrain.process_group import broadcast


@dataclass(frozen=True)
class ListedWeights:
    """The names of the linear layers in each expert.

    Args: into   one name, of gate and up together or of what has no gate; or gate's and up's;  down  the way back.
          num_experts  how many there are;  width  what goes into an expert.
    """

    into: tuple[str, ...]
    down: str
    num_experts: int
    width: int
    hidden: int
    has_gate: bool
    is_transposed: bool = False

    def stacks(self, experts: Sequence[nn.Module]) -> Stacks:
        """The experts' weights, one behind the other."""
        linears = [[named(expert, name) for name in (*self.into, self.down)] for expert in experts]
        into = _together([row[:-1] for row in linears], "weight")
        down = stacked([local_part(row[-1].weight) for row in linears])
        if linears[0][0].bias is None and linears[0][-1].bias is None:
            return Stacks(into, down)
        biases = () if linears[0][0].bias is None else _together([row[:-1] for row in linears], "bias")
        down_bias = None if linears[0][-1].bias is None else stacked([local_part(row[-1].bias) for row in linears])
        return Stacks(into, down, biases, down_bias)


def _together(rows: Sequence[Sequence[nn.Module]], name: str) -> tuple[torch.Tensor, ...]:
    """The layers' parameters, stacked: gate's and up's each for itself where that copies nothing, else together."""
    columns = [[local_part(getattr(layer, name)) for layer in column] for column in zip(*rows, strict=True)]
    if len(columns) == 1 or all(lie_evenly(column) for column in columns):
        return tuple(stacked(column) for column in columns)
    both = stacked([part for row in zip(*columns, strict=True) for part in row])
    return (both.view(len(rows), -1, *both.shape[2:]),)


def listed_weights(experts: nn.ModuleList) -> list[ListedWeights]:
    """Reads the experts by the shapes of their linear layers: all ways that fit."""
    layers = [_linears(expert) for expert in experts]
    kinds = {type(expert) for expert in experts}
    shapes = [[(name, layer.weight.shape, layer.bias is None) for name, layer in each.items()] for each in layers]
    if len(experts) < 2 or len(kinds) != 1 or any(each != shapes[0] for each in shapes):
        return []
    first = layers[0]
    num_parameters = sum(1 + (layer.bias is not None) for layer in first.values())
    if len(first) not in (2, 3) or num_parameters != len(list(experts[0].parameters())):
        return []
    ways = []
    for names in permutations(first):
        *into, down = (first[name].weight.shape for name in names)
        factor = 1 if len(into) == 2 or into[0][0] == down[1] else 2
        biases = {first[name].bias is None for name in names[:-1]}
        if len({*into}) == 1 and into[0][1] == down[0] and into[0][0] == factor * down[1] and len(biases) == 1:
            has_gate = len(into) == 2 or factor == 2
            ways.append(ListedWeights(names[:-1], names[-1], len(experts), down[0], down[1], has_gate))
    return ways


def _is_product(layer: nn.Module) -> bool:
    """True for a linear layer that multiplies by its weight as it is; a sparse one holds zeros in it."""
    return type(layer) is nn.Linear or (type(layer) is SparseLinear and layer.packed is None)


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in module.named_modules() if type(layer) is nn.Linear}


class ListedExperts(ExpertLayer):
    """Experts that are modules of their own. The other base is nn.ModuleList, or the module's own class of such."""

    _weights: ListedWeights
    _how: Computation
    _expert: type[nn.Module]
    _assumed: Assumed

    def count_experts(self) -> int:
        """The experts of all ranks."""
        return self._weights.num_experts

    def expert_width(self) -> int:
        """The columns of the rows that experts take."""
        return self._weights.width

    def expert_tensors(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        """None: an expert's parameters are its own."""
        return iter(())

    def float8_obstacle(self) -> str:
        """Why products cannot be in float8; empty where they can."""
        return self._how.float8_obstacle(self._weights.width, self._weights.hidden)

    def keep_part(self, mesh: DeviceMesh, src_data_rank: int | None) -> None:
        """Put an `AbsentExpert` in the place of each expert of another rank, so that names stay."""
        # Norms of gradients ask for it, on ranks without experts too.
        self.divided_along = mesh
        mine = ExpertCut(self.count_experts(), mesh.size()).experts_of(mesh.get_local_rank())
        for index, expert in enumerate(list(self)):  # type: ignore[call-overload]
            if src_data_rank is not None and mesh.size() > 1:
                group = mesh.get_group()
                for value in (*expert.parameters(), *expert.buffers()):
                    if value.device.type != "meta":
                        broadcast(value.data, group=group, group_src=src_data_rank)
            if index not in mine:
                self[index] = AbsentExpert(index)  # type: ignore[operator]
                continue
            for part in expert.modules():
                # `fully_shard` asks for it: these parameters are no DTensors, and other ranks have others.
                part.divided_along = mesh
                for parameter in part.parameters(recurse=False):
                    parameter.divided_along = mesh  # optimizers ask for it

    def trains_elsewhere(self) -> bool:
        """True where the list is divided: whether experts are trained may change, and no rank sees that of others'."""
        return any(isinstance(expert, AbsentExpert) for expert in self)  # type: ignore[attr-defined]

    def compute(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """This rank's experts on rows that are sorted by them; one after the other where one is not as it was."""
        experts: list[Any] = [expert for expert in self if not isinstance(expert, AbsentExpert)]  # type: ignore[attr-defined]
        if not experts:
            return without_experts(rows)
        if all(self._is_plain(expert) for expert in experts):
            return self._how.outputs(experts[0], rows, ends, self._weights.stacks(experts), self.float8)
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        *parts, rest = rows.split([*sizes, len(rows) - sum(sizes)])
        return torch.cat([*(expert(part) for expert, part in zip(experts, parts, strict=True)), rest * 0])

    def gated_experts(self) -> GatedExperts | None:
        """This rank's experts, where it has some and they are nothing but gated layers as they were."""
        experts: list[Any] = [expert for expert in self if not isinstance(expert, AbsentExpert)]  # type: ignore[attr-defined]
        if self._how.gated is None or self._how.norm or not experts or not all(map(self._is_plain, experts)):
            return None
        return self._how.gated_experts(self._weights.stacks(experts), self.float8)

    def mix_here(self, x: torch.Tensor, order: ExpertOrder, weights: torch.Tensor) -> torch.Tensor:
        """The forward where all experts are here, and tokens are sorted already."""
        experts: list[Any] = list(self)  # type: ignore[call-overload]
        if not all(self._is_plain(expert) for expert in experts):
            return super().mix_here(x, order, weights)
        return self._how.mixed(experts[0], x, order, weights, self._weights.stacks(experts), self.float8)

    def _is_plain(self, expert: nn.Module) -> bool:
        if not isinstance(expert, self._expert) or has_hooks(expert) or not self._assumed.holds(expert):
            return False
        layers = [named(expert, name) for name in (*self._weights.into, self._weights.down)]
        return all(_is_product(layer) and not has_hooks(layer) for layer in layers)


class AbsentExpert(nn.Module):
    """The place of an expert that another rank has. It has no parameters, and takes none from a state dict."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: tokens go to the rank of their expert by the list's own forward."""
        del args, kwargs
        raise ShardingError(
            "experts",
            f"expert {self.index} is on another rank of its axis.",
            "Call the module that has the experts, which sends tokens to their ranks.",
        )

    def _load_from_state_dict(self, *args: Any) -> None:
        """Take nothing, and miss nothing: the rank that has the expert loads it."""
