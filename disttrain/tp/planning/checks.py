"""Checks that a plan fits a module, before any of it is applied: nothing is ever half cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from disttrain.errors import ShardingError
from disttrain.tp.layers.axis import Axis
from disttrain.tp.layers.params import REPLICATED, Cut, check_uncut_parameter, refuse_left, refuse_other_cut
from disttrain.tp.styles import ParallelStyle


def check_plan(module: nn.Module, styles: Sequence[tuple[str, ParallelStyle]], axis: Axis) -> None:
    """Ask every style whether it fits the module of this name.

    Raises: ShardingError where one does not, where two cut one module, and for parameters that are cut already, or
    shared with a module that lays them out otherwise or not at all.
    """
    cuts: dict[nn.Module, Mapping[str, Cut]] = {}
    names: dict[nn.Module, str] = {}
    unknown = set()
    for name, style in styles:
        part = module.get_submodule(name)
        own_cuts = style._cuts(part, axis)
        if own_cuts is None:
            unknown.add(part)
        elif part in cuts:
            both = repr(name) if name == names[part] else f"{names[part]!r} and {name!r}, which are one module"
            raise ShardingError(
                "parallelize_module",
                f"two styles of the plan cut {both}.",
                "Give each module one style; patterns with wildcards may name it as well.",
                rank=axis.world_rank,
            )
        else:
            cuts[part], names[part] = own_cuts, name
    _check_parameters(module, cuts, unknown, axis)


def _check_parameters(
    module: nn.Module, cuts: Mapping[nn.Module, Mapping[str, Cut]], unknown: set[nn.Module], axis: Axis
) -> None:
    """`unknown`: modules with a style that may or may not cut them."""
    laid_out: dict[nn.Parameter, Cut] = {}
    for part, of_part in cuts.items():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            what, cut = f"{name} of {type(part).__name__}", of_part.get(name, REPLICATED)
            check_uncut_parameter(what, parameter, axis)
            others = laid_out.setdefault(parameter, cut)
            if others.placement != cut.placement:
                refuse_other_cut(what, others.placement, cut.placement, axis)
    for part_name, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in laid_out and part not in cuts and part not in unknown:
                refuse_left(f"{part_name}.{name}", axis)
