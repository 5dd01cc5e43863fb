"""One stage of a pipeline on the rank that runs it, under torch.distributed.pipelining's name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from disttrain.arguments import arguments_of
from disttrain.dtensor import DTensor
from disttrain.errors import ScheduleError
from disttrain.lazy_names import absent_names
from disttrain.mesh import DeviceMesh
from disttrain.pipelining.runtime.message_metadata import metadata_of
from disttrain.pipelining.runtime.refusing import refusing
from disttrain.pipelining.runtime.routes import Value
from disttrain.pipelining.runtime.sharded import ScheduledModule, scheduled_modules
from disttrain.process_group import ProcessGroup
from disttrain.process_group.current import resolve_group

_OPERATION = "PipelineStage"


class PipelineStage:
    """A module, and its place in a pipeline.

    What the stage before returns is what this one is called with: a tuple as several arguments, anything else as one.
    Values are nested as one likes; what is no tensor must be the same for all microbatches. The first stage is called
    with the arguments of `step`, and every stage with the keyword arguments that its rank gives there.

    What a later stage does not use gets a gradient of zeros, and so do the parameters that only it comes from. Random
    numbers, those of dropout say, are the rank's own: seed the ranks differently. A module that has state of its own,
    as batch norm has, sees each microbatch as a batch.

    Args: submodule     computes on `device` already;
          stage_index   from 0 over all ranks;
          input_args, output_args  examples of one microbatch: what comes is held against them. Without them the first
                        microbatch says what all others must be like;
          output_grads, input_grads  taken for torch's sake and not used: gradients are like their tensors;
          group         the ranks of the pipeline (default: all);
          get_mesh      called with the names of a mesh's axes: the mesh of DTensors that come from another rank.
                        Default: the mesh of the submodule's parameters that has these axes;
          inputs        in place of what the stage before returns, values of several stages, as (stage, which of the
                        tensors that it returns): so connections skip stages;
          tied          by a label of your choice, the name of a parameter here that other stages have as well, under
                        the same label: the gradients of all of them are added up.
    Raises: ScheduleError for an index beyond the stages, an input that comes from no earlier stage, an unknown
            parameter, or `dw_builder`.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        input_args: Any = None,
        output_args: Any = None,
        output_grads: Any = None,
        input_grads: Any = None,
        group: ProcessGroup | None = None,
        dw_builder: object = None,
        get_mesh: Callable[..., DeviceMesh] | None = None,
        *,
        inputs: Sequence[Value] | None = None,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        group = resolve_group(_OPERATION, group)
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.group = group
        self._get_mesh = get_mesh
        with refusing(group, _OPERATION):
            with arguments_of(_OPERATION, group.world.rank, "Give a torch.device, a list of Values, a dict of names."):
                self.device = torch.device(device)
                self.inputs = None if inputs is None else tuple(inputs)
                self.tied = dict({} if tied is None else tied)
            self._check(dw_builder)
        self.input_metadata = None if input_args is None else metadata_of(as_arguments(input_args))[0].without_grad()
        self.output_metadata = None if output_args is None else metadata_of(output_args)[0].without_grad()

    def __getattr__(self, name: str) -> Any:
        """Tells schedules of torch's, which ask a stage of theirs for more, whose this one is."""
        problem = f"{type(self).__name__!r} object has no attribute {name!r}"
        if ("disttrain.pipelining", f"PipelineStage.{name}") in absent_names():
            problem += (
                ", which torch's stage has: this one is disttrain's. Run it by a schedule of disttrain.pipelining"
            )
        raise AttributeError(problem)

    @property
    def group_rank(self) -> int:
        return self.group.group_rank

    @property
    def group_size(self) -> int:
        return self.group.group_size

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    def scheduled_modules(self) -> list[ScheduledModule]:
        """The sharded modules in it, whose gathers and reductions the schedule decides."""
        return scheduled_modules(self.submod)

    def find_mesh(self, axis_names: tuple[str, ...]) -> DeviceMesh:
        """The mesh with these axes that DTensors coming from other ranks lie on here.

        Raises: ScheduleError when no parameter has one, and nobody has said which it is.
        """
        if self._get_mesh is not None:
            # torch's callbacks also take a layout, or None, which may distinguish meshes.
            takes_layout = len(inspect.signature(self._get_mesh).parameters) > 1
            return self._get_mesh(axis_names, None) if takes_layout else self._get_mesh(axis_names)
        tensors: list[torch.Tensor] = list(self.submod.parameters())
        meshes = dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
        # One of just these axes before one that has more.
        for mesh in sorted(meshes, key=lambda mesh: mesh.ndim):
            if set(axis_names) <= set(mesh.mesh_dim_names or ()):
                return mesh if mesh.mesh_dim_names == axis_names else mesh[axis_names]
        raise ScheduleError(
            _OPERATION,
            f"stage {self.stage_index} is sent a DTensor on a mesh of axes {axis_names}, on which it has no parameter.",
            "Say which mesh that is here: get_mesh=lambda axis_names: mesh.",
            rank=self.group.world.rank,
        )

    def tied_parameter(self, label: str) -> nn.Parameter:
        """The parameter that it has under this label."""
        return self.submod.get_parameter(self.tied[label])

    def _check(self, dw_builder: object) -> None:
        index, rank = self.stage_index, self.group.world.rank
        if not 0 <= index < self.num_stages:
            raise ScheduleError(
                _OPERATION, f"there is no stage {index} of {self.num_stages}.", "Count stages from 0.", rank=rank
            )
        if dw_builder is not None:
            raise ScheduleError(
                _OPERATION,
                "dw_builder is given; here a backward is divided by layers, without help.",
                "Leave it out; see split_layers.",
                rank=rank,
            )
        for source, which in self.inputs or ():
            if not (0 <= source < index and which >= 0):
                raise ScheduleError(
                    _OPERATION,
                    f"stage {index} takes value {which} of stage {source}.",
                    "Name an earlier stage, and count the tensors that it returns from 0.",
                    rank=rank,
                )
        parameters = dict(self.submod.named_parameters(remove_duplicate=False)) if self.tied else {}
        for label, name in self.tied.items():
            if name not in parameters:
                raise ScheduleError(
                    _OPERATION,
                    f"stage {index} has no parameter {name!r}, which is to be tied as {label!r}.",
                    "Name one of submodule.named_parameters().",
                    rank=rank,
                )


def as_arguments(value: Any) -> tuple[Any, ...]:
    """Returns a stage's output as the next one's positional arguments."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def stages_of(operation: str, stages: Any) -> list[PipelineStage]:
    """This rank's stages, one or several. Raises ScheduleError without any, and for what is no stage of disttrain's."""
    stage_list = list(stages) if isinstance(stages, Iterable) else [stages]
    for stage in stage_list:
        if not isinstance(stage, PipelineStage):
            kind = type(stage)
            raise ScheduleError(
                operation,
                f"a stage is a {kind.__module__}.{kind.__qualname__}, and none of disttrain's.",
                "Make each by disttrain.pipelining.PipelineStage, or by build_stage of a SplitModel or Pipe.",
            )
    if not stage_list:
        raise ScheduleError(operation, "this rank has no stage.", "Give each rank at least one.")
    return stage_list
