"""Inputs and outputs of modules that hold layers of several styles, laid out as these want them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from disttrain.dtensor import Placement, Replicate, Shard
from disttrain.dtensor.spec.placement import converted_all
from disttrain.errors import LayoutError, ShardingError
from disttrain.mesh import DeviceMesh
from disttrain.tp._torch import graph_root, hook_after, hook_before, hooks_before
from disttrain.tp.layers.axis import Axis
from disttrain.tp.layers.layers import as_dtensor, given_out
from disttrain.tp.layers.shared_input import Sharing
from disttrain.tp.modules import as_tuple, first_input_name
from disttrain.tp.styles import ParallelStyle, check_placements

Layouts = Placement | Sequence[Placement | None] | None
KeywordLayouts = Mapping[str, Placement | None] | None


class PrepareModuleInput(ParallelStyle):
    """Make a module's inputs DTensors, laid out as the layers in it want them.

    Where the first input is gathered for the module and its own linear layers are ColwiseParallel, these are computed
    together: one gather, one reduction of the gradient, both under the multiplications.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: KeywordLayouts = None,
        desired_input_kwarg_layouts: KeywordLayouts = None,
        use_local_output: bool = False,
        shared_by: Sequence[str] | None = None,
    ) -> None:
        """
        Args: input_layouts          how plain positional inputs lie, None for what is left alone; one placement,
                                     not in a list, is that of the first input, however it is passed.
              desired_input_layouts  how they are wanted; as many.
              input_kwarg_layouts, desired_input_kwarg_layouts  the same by name.
              use_local_output       give this rank's parts, not DTensors.
              shared_by              names of the ColwiseParallel layers that take the gathered input as it is; default:
                                     those of the module's own children that turn out to, `()` for none.
        """
        self.input_layouts = converted_all(input_layouts)
        self.desired_input_layouts = converted_all(desired_input_layouts)
        self.input_kwarg_layouts = converted_all(input_kwarg_layouts)
        self.desired_input_kwarg_layouts = converted_all(desired_input_kwarg_layouts)
        self.use_local_output = use_local_output
        self.shared_by = shared_by

    def _cuts(self, module: nn.Module, axis: Axis) -> None:
        layouts, wanted = as_tuple(self.input_layouts), as_tuple(self.desired_input_layouts)
        if self.input_layouts is None and self.input_kwarg_layouts is None:
            _refuse("neither input_layouts nor input_kwarg_layouts are given.", "Say how the inputs lie.", axis)
        if self.input_layouts is not None:
            _check_pairs(self, "input_layouts", layouts, "desired_input_layouts", wanted, axis)
        by_name, wanted_by_name = self.input_kwarg_layouts or {}, self.desired_input_kwarg_layouts or {}
        if by_name.keys() != wanted_by_name.keys():
            _refuse(
                f"input_kwarg_layouts name {sorted(by_name)}, desired_input_kwarg_layouts {sorted(wanted_by_name)}.",
                "Give the same names to both.",
                axis,
            )
        check_placements(self, axis, **{f"the input {name!r}": value for name, value in by_name.items()})
        check_placements(self, axis, **{f"the input {name!r}": value for name, value in wanted_by_name.items()})
        names = dict(module.named_modules())
        unknown = [name for name in self.shared_by or () if name not in names]
        if unknown:
            _refuse(
                f"shared_by names {unknown}, which are no modules in {type(module).__name__}.", "Name layers.", axis
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = Axis.of("parallelize_module", device_mesh)
        self._cuts(module, axis)
        layouts, wanted = as_tuple(self.input_layouts), as_tuple(self.desired_input_layouts)
        positional = None
        if self.input_layouts is not None:
            positional = tuple(
                _Conversion(axis, g, w, self.use_local_output) for g, w in zip(layouts, wanted, strict=True)
            )
        wanted_by_name = self.desired_input_kwarg_layouts or {}
        named = {
            name: _Conversion(axis, placement, wanted_by_name[name], self.use_local_output)
            for name, placement in (self.input_kwarg_layouts or {}).items()
        }
        first_name = None
        if isinstance(self.input_layouts, Placement):
            first_name = first_input_name(module)
        prepare = PrepareInputs(positional, named, self.shared_by, first_name)
        hook_before(module, prepare)
        for sharing in prepare.sharings:
            hook_after(module, sharing.release, always=True)
        return module


class PrepareModuleOutput(ParallelStyle):
    """Lay out a module's outputs as whoever takes them wants them."""

    def __init__(
        self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True
    ) -> None:
        """
        Args: output_layouts          how plain outputs lie; None for what is left alone.
              desired_output_layouts  how they are wanted; as many.
              use_local_output        give this rank's parts, not DTensors.
        """
        self.output_layouts = converted_all(output_layouts)
        self.desired_output_layouts = converted_all(desired_output_layouts)
        self.use_local_output = use_local_output

    def _cuts(self, module: nn.Module, axis: Axis) -> None:
        layouts, wanted = as_tuple(self.output_layouts), as_tuple(self.desired_output_layouts)
        _check_pairs(self, "output_layouts", layouts, "desired_output_layouts", wanted, axis)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = Axis.of("parallelize_module", device_mesh)
        self._cuts(module, axis)
        layouts, wanted = as_tuple(self.output_layouts), as_tuple(self.desired_output_layouts)
        conversions = tuple(
            _Conversion(axis, g, w, self.use_local_output) for g, w in zip(layouts, wanted, strict=True)
        )
        hook_after(module, _PrepareOutputs(conversions))
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """PrepareModuleInput and PrepareModuleOutput in one."""

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: KeywordLayouts = None,
        desired_input_kwarg_layouts: KeywordLayouts = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
        shared_by: Sequence[str] | None = None,
    ) -> None:
        """As the two; `use_local_input` is the former's `use_local_output`."""
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
            shared_by=shared_by,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _cuts(self, module: nn.Module, axis: Axis) -> None:
        self.prepare_module_input._cuts(module, axis)
        self.prepare_module_output._cuts(module, axis)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.prepare_module_input._apply(module, device_mesh)
        return self.prepare_module_output._apply(module, device_mesh)


class _Conversion:
    """Of one input or output, which lies as `layout` if it is plain; None leaves it alone."""

    def __init__(self, axis: Axis, layout: Placement | None, wanted: Placement | None, use_local: bool) -> None:
        self.axis, self.layout, self.use_local = axis, layout, use_local
        self.wanted = wanted or layout
        self.sharing: Sharing | None = None

    def __call__(self, value: Any) -> Any:
        if self.layout is None or self.wanted is None or value is None:
            return value
        if not isinstance(value, torch.Tensor):
            raise LayoutError(
                "tensor parallel",
                f"a layout {self.layout} is given for {type(value).__name__} {value!r}.",
                "Give None for what is no tensor.",
                rank=self.axis.world_rank,
            )
        return given_out(as_dtensor(value, self.layout, self.axis), self.wanted, self.use_local)

    @property
    def gathered_from(self) -> Shard | None:
        """The cut of a plain input that is gathered, so that layers can be computed together; None for others."""
        is_gather = not self.use_local and self.wanted == Replicate()
        return self.layout if is_gather and isinstance(self.layout, Shard) else None


class PrepareInputs:
    """A forward pre-hook. It belongs to one module, and is copied with it."""

    def __init__(
        self,
        positional: tuple[_Conversion, ...] | None,
        named: Mapping[str, _Conversion],
        shared_by: Sequence[str] | None,
        first_name: str | None,
    ) -> None:
        """`first_name`: that of the one input that `positional` is for, where others may come as well."""
        self.positional, self.named, self.first_name = positional, dict(named), first_name
        # Each lies with its conversion, not in a dict by it: Dynamo guards the keys of a dict by their identity, and
        # would compile each block of a model anew.
        self.sharings: list[Sharing] = []
        for conversion in (*(positional or ()), *named.values()):
            if conversion.gathered_from is not None:
                conversion.sharing = Sharing(conversion.axis, conversion.gathered_from, shared_by)
                self.sharings.append(conversion.sharing)
        if positional is not None and first_name is not None:
            self.named.setdefault(first_name, positional[0])

    def find_layers(self, module: nn.Module) -> None:
        """Before a graph is made of the module: it would hold what is only so in the first call."""
        if len(self.sharings) == 1:
            self.sharings[0].find_layers(module)

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], by_name: dict[str, Any]) -> Any:
        if self.positional is not None and inputs:
            if self.first_name is None and len(inputs) != len(self.positional):
                raise LayoutError(
                    "tensor parallel",
                    f"{type(module).__name__} is called with {len(inputs)} positional inputs, and "
                    f"{len(self.positional)} input_layouts are given.",
                    "Give one per positional input, None for those to be left alone; others go by input_kwarg_layouts.",
                )
            converted = [
                self._converted(module, how, value) for how, value in zip(self.positional, inputs, strict=False)
            ]
            inputs = (*converted, *inputs[len(converted) :])
        if by_name and self.named:
            by_name = {
                name: self._converted(module, self.named[name], value) if name in self.named else value
                for name, value in by_name.items()
            }
        return inputs, by_name

    def _converted(self, module: nn.Module, conversion: _Conversion, value: Any) -> Any:
        sharing = conversion.sharing
        # What torch's own modules call beneath a compiled one, such as this, Dynamo may take for a graph of its own:
        # the forward is another then, and the layers' results would be outputs that nobody takes.
        is_alone = torch.compiler.is_dynamo_compiling() and graph_root() == _OWN_ROOT
        if sharing is not None and isinstance(value, torch.Tensor) and not is_alone:
            whole = sharing.gathered(module, value)
            if whole is not None:
                return whole
        return conversion(value)


_OWN_ROOT = PrepareInputs.__call__.__qualname__


class _PrepareOutputs:
    """A forward hook."""

    def __init__(self, conversions: tuple[_Conversion, ...]) -> None:
        self.conversions = conversions

    def __call__(self, module: nn.Module, _inputs: Any, output: Any) -> Any:
        outputs = output if isinstance(output, tuple) else (output,)
        if len(outputs) != len(self.conversions):
            raise LayoutError(
                "tensor parallel",
                f"{type(module).__name__} gives {len(outputs)} outputs, and {len(self.conversions)} output_layouts are "
                "given.",
                "Give one per output, None for those to be left alone.",
            )
        prepared = tuple(conversion(value) for conversion, value in zip(self.conversions, outputs, strict=True))
        return prepared if isinstance(output, tuple) else prepared[0]


def _check_pairs(
    style: ParallelStyle, name: str, layouts: Sequence[Any], wanted_name: str, wanted: Sequence[Any], axis: Axis
) -> None:
    for each, values in ((name, layouts), (wanted_name, wanted)):
        for value in values:
            check_placements(style, axis, **{each: value})
    if len(layouts) != len(wanted):
        _refuse(f"{len(layouts)} {name} and {len(wanted)} {wanted_name} are given.", "Give as many of both.", axis)


def _refuse(problem: str, remedy: str, axis: Axis) -> None:
    raise ShardingError("parallelize_module", problem, remedy, rank=axis.world_rank)


def find_shared_layers(module: nn.Module) -> None:
    """Of all modules whose input is gathered for several layers, once these are cut."""
    for submodule in module.modules():
        for hook in hooks_before(submodule):
            if isinstance(hook, PrepareInputs):
                hook.find_layers(submodule)
