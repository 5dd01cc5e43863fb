"""The styles of layers: by columns, by rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn
from torch.nn.parameter import UninitializedParameter

from disttrain.dtensor import Placement, Replicate, Shard
from disttrain.dtensor.spec.placement import converted
from disttrain.errors import ShardingError
from disttrain.mesh import DeviceMesh
from disttrain.tp._torch import own_parameters
from disttrain.tp.layers.axis import Axis
from disttrain.tp.layers.layers import ColumnLayer, ColumnLinear, Parallel, RowLayer, RowLinear, become
from disttrain.tp.layers.linears import column_cuts, matrix_of, row_cuts
from disttrain.tp.layers.params import REPLICATED, Cut, lay_out
from disttrain.tp.modules import FinishOutput, hook
from disttrain.tp.style_hooks import StyleHooks

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class ParallelStyle(ABC):
    """The way in which `parallelize_module` cuts one module. Derive from it to write your own."""

    src_data_rank: int | None = 0
    """The rank along the axis whose parameters count; None: all ranks have the same, and nothing is sent."""

    def _cuts(self, module: nn.Module, axis: Axis) -> Mapping[str, Cut] | None:
        """The cuts of `module`'s own parameters, those without one replicated; None where they are left alone.

        Asked of every style of a plan before any is applied. Raises ShardingError where the style does not fit.
        """
        return None

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Cut `module` along the axis of `device_mesh`, in place, and return it. Collective."""

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if name != "src_data_rank" and value is not None}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class ColwiseParallel(StyleHooks, ParallelStyle):
    """Each rank computes some of a layer's outputs. For linear layers, embeddings and convolutions."""

    desired_input_layouts: Placement = Replicate()

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        head_dim: int | None = None,
        num_blocks: int = 1,
        overlap: bool | None = None,
    ) -> None:
        """
        Args: input_layouts     how a plain input lies; default Replicate. Shard(dim) is gathered.
              output_layouts    how the output is wanted; default: as it is computed, sharded along the last dim, of
                                convolutions along the channels.
              use_local_output  give this rank's part, not a DTensor.
              head_dim          the outputs of a linear layer belong together in heads of so many. With fewer heads
                                than ranks, as of keys and values in grouped-query attention, ranks share a head.
              num_blocks        the outputs are so many equal blocks, such as query, key and value in one layer.
              overlap           send a gathered input part by part under the multiplications; default: where it pays.
        """
        self.input_layouts = Replicate() if input_layouts is None else converted(input_layouts)
        self.output_layouts = converted(output_layouts)
        self.use_local_output = use_local_output
        self.head_dim = head_dim
        self.num_blocks = num_blocks
        self.overlap = overlap

    def _cuts(self, module: nn.Module, axis: Axis) -> Mapping[str, Cut]:
        check_uncut(self, module, axis)
        check_placements(self, axis, input_layouts=self.input_layouts, output_layouts=self.output_layouts)
        _check_weight(self, module, axis)
        matrix = matrix_of(module)
        if matrix is not None:
            return column_cuts(module, matrix, axis, self.head_dim, self.num_blocks)
        weight_dim, _ = _column_dims(self, module, axis)
        if self.head_dim is not None or self.num_blocks != 1:
            _refuse(
                f"{self} is for {type(module).__name__}, whose outputs come in no heads or blocks.",
                "Leave head_dim and num_blocks to linear layers.",
                axis,
            )
        return {"weight": Cut(Shard(weight_dim)), "bias": Cut(Shard(0))}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = Axis.of("parallelize_module", device_mesh)
        cuts = self._cuts(module, axis)
        lay_out(module, cuts, axis, self.src_data_rank)
        matrix = matrix_of(module)
        if matrix is not None:
            weight, bias = cuts["weight"], cuts["bias"]
            state = ColumnLayer(
                axis, matrix, weight, bias, self.num_blocks,
                self.input_layouts, self.output_layouts, self.use_local_output, self.overlap,
            )  # fmt: skip
            become(module, ColumnLinear, state)
            return module
        _mark(module, axis)
        output = self.output_layouts or Shard(_column_dims(self, module, axis)[1])
        hook(
            module,
            axis,
            self.input_layouts,
            Replicate(),
            FinishOutput(output, self.use_local_output),
        )
        return module


class RowwiseParallel(StyleHooks, ParallelStyle):
    """Each rank computes with some of a layer's inputs. For linear layers, embeddings and convolutions."""

    desired_input_layouts: Placement = Shard(-1)

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        overlap: bool | None = None,
    ) -> None:
        """
        Args: input_layouts     how a plain input lies; default: sharded along the last dim, of convolutions along the
                                channels, of embeddings Replicate.
              output_layouts    how the output is wanted; default Replicate. Shard(dim) scatters the sum.
              use_local_output  give this rank's part, not a DTensor.
              overlap           send a scattered sum part by part under the multiplications; default: where it pays.
        """
        self.input_layouts = converted(input_layouts)
        self.output_layouts = Replicate() if output_layouts is None else converted(output_layouts)
        self.use_local_output = use_local_output
        self.overlap = overlap

    def _cuts(self, module: nn.Module, axis: Axis) -> Mapping[str, Cut]:
        check_uncut(self, module, axis)
        check_placements(self, axis, input_layouts=self.input_layouts, output_layouts=self.output_layouts)
        _check_weight(self, module, axis)
        matrix = matrix_of(module)
        if matrix is not None:
            return row_cuts(matrix)
        return {"weight": Cut(Shard(_row_dims(self, module, axis)[0])), "bias": REPLICATED}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = Axis.of("parallelize_module", device_mesh)
        cuts = self._cuts(module, axis)
        lay_out(module, cuts, axis, self.src_data_rank)
        matrix = matrix_of(module)
        if matrix is not None:
            state = RowLayer(
                axis, matrix, cuts["weight"], cuts["bias"],
                self.input_layouts or Shard(-1), self.output_layouts, self.use_local_output, self.overlap,
            )  # fmt: skip
            become(module, RowLinear, state)
            return module
        _, wanted = _row_dims(self, module, axis)
        _mark(module, axis)
        hook(
            module,
            axis,
            self.input_layouts or wanted,
            wanted,
            FinishOutput(self.output_layouts, self.use_local_output),
        )
        return module


def check_uncut(style: ParallelStyle, module: nn.Module, axis: Axis) -> None:
    """Raise ShardingError when the module has been cut before."""
    if isinstance(module, Parallel) or _MARK in module.__dict__:
        _refuse(
            f"{style} is applied to a {type(module).__name__}, which another style has cut already.",
            "Give each module one style.",
            axis,
        )


def check_placements(style: ParallelStyle, axis: Axis, **placements: Any) -> None:
    """Raise ShardingError where one of `placements`, by name, is neither a placement nor None."""
    for name, value in placements.items():
        if value is not None and not isinstance(value, Placement):
            _refuse(
                f"{name} of {type(style).__name__} is {value!r}.",
                "Give one placement, such as Shard(1) or Replicate().",
                axis,
            )


def _check_weight(style: ParallelStyle, module: nn.Module, axis: Axis) -> None:
    """Raise ShardingError for a module that is known, and whose weight cannot be cut."""
    name = type(module).__name__
    if isinstance(getattr(module, "weight", None), UninitializedParameter):
        _refuse(
            f"{style} is applied to a {name}, whose weight has no shape yet.",
            "Run the module once, or give it its sizes, before parallelize_module.",
            axis,
        )
    is_known = matrix_of(module) is not None or isinstance(module, (nn.Linear, nn.Embedding, *_CONVOLUTIONS))
    if is_known and own_parameters(module, "weight") == [None]:
        _refuse(
            f"{style} is applied to a {name}, whose weight is no parameter of its own but computed.",
            "Remove the parametrization, or write a ParallelStyle that cuts what it is computed from.",
            axis,
        )


def _column_dims(style: ParallelStyle, module: nn.Module, axis: Axis) -> tuple[int, int]:
    """The dim to cut a weight along, and the one the output is cut along then."""
    if isinstance(module, nn.Embedding):
        return 1, -1
    if isinstance(module, _CONVOLUTIONS):
        return 0, -1 - len(module.kernel_size)
    if isinstance(module, nn.Linear):
        return 0, -1
    raise _unknown(style, module, axis)


def _row_dims(style: ParallelStyle, module: nn.Module, axis: Axis) -> tuple[int, Placement]:
    """The dim to cut a weight along, and how the input must lie then."""
    if isinstance(module, nn.Embedding):
        return 0, Replicate()
    if isinstance(module, _CONVOLUTIONS):
        return 1, Shard(-1 - len(module.kernel_size))
    if isinstance(module, nn.Linear):
        return 1, Shard(-1)
    raise _unknown(style, module, axis)


_MARK = "_disttrain_parallel"


def _mark(module: nn.Module, axis: Axis) -> None:
    module.__dict__[_MARK] = axis


def _refuse(problem: str, remedy: str, axis: Axis) -> NoReturn:
    raise ShardingError("parallelize_module", problem, remedy, rank=axis.world_rank)


def _unknown(style: ParallelStyle, module: nn.Module, axis: Axis) -> ShardingError:
    return ShardingError(
        "parallelize_module",
        f"{type(style).__name__} does not know {type(module).__module__}.{type(module).__qualname__}.",
        "It cuts nn.Linear, nn.Embedding and nn.Conv1d to nn.Conv3d; write a ParallelStyle for other modules.",
        rank=axis.world_rank,
    )
