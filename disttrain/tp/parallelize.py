"""parallelize_module: which style goes to which module."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from disttrain.errors import ShardingError
from disttrain.mesh import DeviceMesh
from disttrain.tp._torch import absent_children
from disttrain.tp.layers.axis import Axis
from disttrain.tp.layers.params import check_none_is_left
from disttrain.tp.modules import check_module
from disttrain.tp.planning.checks import check_plan
from disttrain.tp.prepare import find_shared_layers
from disttrain.tp.styles import ParallelStyle


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Cut `module`, or modules in it, along a mesh axis, in place.

    Args:    device_mesh       a mesh of one axis, such as mesh["tp"].
             parallelize_plan  a style, or styles by module name, in which each part between dots may have wildcards:
                               "layers.*.attention.wq"; "" is `module` itself. What means a child that is None, as
                               a pipeline's stage has for what lies elsewhere, is passed over.
             src_data_rank     the rank along the axis whose parameters count; None: all have the same, nothing is sent.
    Returns: `module`.
    Raises:  ShardingError when a key matches nothing, a style does not fit its module, or parameters are cut already;
             before anything is changed where that can be told.
    Collective: every rank of the axis.
    """
    axis = Axis.of("parallelize_module", device_mesh)
    check_module("parallelize_module", module)
    styles = {"": parallelize_plan} if isinstance(parallelize_plan, ParallelStyle) else parallelize_plan
    if not isinstance(styles, Mapping) or not all(isinstance(style, ParallelStyle) for style in styles.values()):
        raise ShardingError(
            "parallelize_module",
            f"{parallelize_plan!r} is no plan{_whose(styles)}.",
            "Give a ParallelStyle, or a dict from names of modules to styles.",
            rank=axis.world_rank,
        )
    matched = _matched(module, styles, axis)
    check_plan(module, matched, axis)
    for name, style in matched:
        style.src_data_rank = src_data_rank
        submodule = module.get_submodule(name)
        changed = style._apply(submodule, axis.mesh)
        if changed is not submodule and name:
            module.set_submodule(name, changed)
        elif changed is not submodule:
            module = changed
    check_none_is_left(module, axis)
    find_shared_layers(module)
    return module


def _matched(module: nn.Module, styles: Mapping[str, ParallelStyle], axis: Axis) -> list[tuple[str, ParallelStyle]]:
    """Names of modules and what goes to each, in the order of the plan."""
    modules = dict(module.named_modules(remove_duplicate=False))
    names = list(modules)
    cuts = []
    for pattern, style in styles.items():
        # A module that is there under two names is meant once.
        matching = list({modules[name]: name for name in names if _matches(name, pattern)}.values())
        if not matching and _is_left_out(modules, pattern):
            continue
        if not matching:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
            remedy = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"There are {_some(names)}."
            raise ShardingError(
                "parallelize_module",
                f"the key {pattern!r} of the plan matches no module in {type(module).__name__}.",
                remedy,
                rank=axis.world_rank,
            )
        cuts += [(name, style) for name in matching]
    return cuts


def _is_left_out(modules: Mapping[str, nn.Module], pattern: str) -> bool:
    """True where the pattern means a module that is None, or a part of one, as in a pipeline stage that lacks it."""
    absent = [f"{name}.{child}".lstrip(".") for name, module in modules.items() for child in absent_children(module)]
    parts = pattern.split(".")
    return any(_matches(name, ".".join(parts[: name.count(".") + 1])) for name in absent)


def _matches(name: str, pattern: str) -> bool:
    """Part by part: a wildcard does not reach over a dot."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _some(names: list[str]) -> str:
    shown = [repr(name) for name in names if name][:8]
    return ", ".join(shown) + (", ..." if len(names) - 1 > len(shown) else "") or "no modules in it"


def _whose(styles: object) -> str:
    """Of styles that are torch's, which have the names of ours."""
    candidates = list(styles.values()) if isinstance(styles, Mapping) else [styles]
    kinds = [type(style) for style in candidates if not isinstance(style, ParallelStyle)]
    torch_style = next((kind for kind in kinds if kind.__module__.startswith("torch.")), None)
    return (
        ""
        if torch_style is None
        else f" of disttrain's: {torch_style.__name__} is torch's, of {torch_style.__module__}"
    )
