"""Training with 2:4 sparse weights: of every four neighbours in a row of a linear layer's matrix two are zero.

The model's weights are the sparse ones. The optimizer keeps the dense ones, trains them, and writes them into the model
sparse. So gathers, sharded layers, pipelines, compilers and saves need no change, and a save of the model is sparse.
Gradients of the sparse weights are used for the dense ones, and masked weights decay to zero, so that masks settle.
Products with them are dense ones, or sparse: `sparse24/product.py`.

Source: Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch" (SR-STE, arXiv
2102.04010).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

import torch
from torch import nn

from disttrain.console import write
from disttrain.dtensor import DTensor
from disttrain.errors import ShapeError, ShardingError
from disttrain.kernels.linear_choice import Filter, choose_linears
from disttrain.kernels.sparse24.product import Packed24, mask24_of_tiles, sparse24_linear, takes_packed, takes_tiles
from disttrain.kernels.use import Replaced

GROUP: Final = 4
_DENSE: Final = "dense24"
"""The name of the dense weight in the optimizer's state."""

_STEPS: Final = "steps24"
"""The name of the number of steps in the optimizer's groups, which are saved with its state."""


class SparseLinear(nn.Linear):
    """nn.Linear whose weight is 2:4 sparse, once a `Sparse24` keeps it so."""

    weight: nn.Parameter
    packed: Packed24 | None = None
    """Of the weight, for sparse products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None or isinstance(x, DTensor):
            return super().forward(x)
        return sparse24_linear(x, self.weight, self.bias, self.packed)


def use_sparse24(
    model: nn.Module, *, filter: Filter | None = None, report: Callable[[str], None] = write
) -> tuple[Replaced, ...]:
    """Choose the linear layers of `model` whose weights become 2:4 sparse; see `Sparse24`, which makes them so.

    The model stays the same object with the same parameters and names. Left alone are inputs that are no multiple of
    4, weights that several modules share, subclasses of nn.Linear, and the head, as by `use_float8`.

    Call it before `parallelize_module` and `fully_shard`.

    Args:    filter  says of a layer's name and the layer whether it is to change; then the head is not left alone.
             report  is given the lines that say what was changed and what was left; the default prints them.
    Returns: all that was changed, by the modules' names.
    """

    def obstacle(layer: nn.Linear) -> str:
        return f"inputs are no multiples of {GROUP}" if layer.in_features % GROUP else ""

    layers = choose_linears("use_sparse24", model, SparseLinear, obstacle, filter, report)
    for _, layer in layers:
        layer.__class__ = SparseLinear
    return tuple(Replaced(name, "2:4 sparse linear") for name, _ in layers)


def mask24(weight: torch.Tensor) -> torch.Tensor:
    """True for the two largest by magnitude of each four along the last dim, of equal ones the first."""
    size = weight.abs().unflatten(-1, (-1, GROUP))
    num_larger = torch.zeros(size.shape, dtype=torch.uint8, device=weight.device)
    for first in range(GROUP):
        for second in range(first + 1, GROUP):
            is_first = size[..., first] >= size[..., second]
            num_larger[..., second] += is_first
            num_larger[..., first] += ~is_first
    return (num_larger < GROUP // 2).flatten(-2)


class Sparse24:
    """Keeps the weights of a model's `SparseLinear` layers 2:4 sparse through the steps of `optimizer`.

        kernels.use_sparse24(model)
        fully_shard(model)
        optimizer = kernels.AdamW(model.parameters())
        kernels.Sparse24(model, optimizer)

    Masks are chosen by magnitude, now and after every `every` steps. Before a step, a masked weight's gradient gets
    `decay` times its dense value, whatever the step's `grad_scale`. The dense weights are in the optimizer's state,
    under "dense24", from its first step on, and steps are counted in its groups; a step takes no closure.

    Args:   products  "sparse": masks are 2:4 in columns too, and weights in half precision on a GPU are packed after
                      each step, for forward and the input's gradient by cuSPARSELt, where that is faster. They take
                      1.125 times their memory more. Of sizes that are no multiples of 16, all stays as with "dense".
    Raises: ShardingError where no such layer's weight is trained, ranks would have parts of a group of four, or
            products are to be sparse with weights that are sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 10,
        decay: float = 2e-4,
        products: Literal["dense", "sparse"] = "dense",
    ) -> None:
        if every < 1:
            raise ShapeError("Sparse24", f"every is {every}.", "Give a number of steps.")
        if products not in ("dense", "sparse"):
            raise ShapeError("Sparse24", f"products is {products!r}.", "Give one of dense, sparse.")
        trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        named = {
            f"{name}.weight": module.weight
            for name, module in model.named_modules()
            if isinstance(module, SparseLinear)
        }
        self._weights = [parameter for parameter in named.values() if parameter in trained]
        if not self._weights:
            problem = f"the optimizer has no weight of the model's {len(named)} sparse layers."
            raise ShardingError(
                "Sparse24", problem, "Call use_sparse24 first, and make the optimizer after fully_shard."
            )
        for name, parameter in named.items():
            _check_groups(name, parameter)
            if products == "sparse" and isinstance(parameter, DTensor):
                problem = f"{name} lies as {parameter._spec.layout}, and sparse products take whole weights."
                raise ShardingError("Sparse24", problem, 'Leave them dense: products="dense".')
        self._products = products
        layers = [module for module in model.modules() if isinstance(module, SparseLinear)]
        self._layers = [layer for layer in layers if products == "sparse" and layer.weight in trained]
        self._optimizer, self._every, self._decay = optimizer, every, decay
        self._num_steps_before = 0
        """Of the one that is being taken; other `Sparse24` of the optimizer count it too."""
        self._before: dict[nn.Parameter, torch.Tensor] = {}
        """Dense weights that the optimizer's state has no place for yet."""
        self._masks: dict[nn.Parameter, torch.Tensor] = {}
        """Of the weights that are being stepped."""
        with torch.no_grad():
            for parameter in self._weights:
                if _DENSE not in optimizer.state.get(parameter, {}):
                    self._before[parameter] = parameter.detach().clone()
                local = _local(parameter)
                local.mul_(self._mask(local))
        self._pack()
        optimizer.register_step_pre_hook(self._show_dense)
        optimizer.register_step_post_hook(self._show_sparse)

    def _show_dense(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(callable(argument) for argument in (*args[1:], *kwargs.values())):
            problem = "the step is given a closure, which would see the dense weights."
            raise ShapeError("Sparse24", problem, "Compute the gradients before the step.")
        scale = kwargs.get("grad_scale")
        self._num_steps_before = self._optimizer.param_groups[0].get(_STEPS, 0)
        with torch.no_grad():
            for parameter, dense in self._stepped():
                local = _local(parameter)
                # Those of a step that has failed are still there.
                mask = self._masks.setdefault(parameter, local != 0)
                decayed = dense * ~mask * self._decay
                # The gradient is multiplied by it in the step.
                _local(parameter.grad).add_(decayed if scale is None else decayed / scale)
                local.copy_(dense)

    def _show_sparse(self, *_: Any) -> None:
        num_steps = self._num_steps_before
        for group in self._optimizer.param_groups:
            group[_STEPS] = num_steps + 1
        is_due = num_steps % self._every == 0
        with torch.no_grad():
            for parameter, dense in self._stepped():
                local = _local(parameter)
                dense.copy_(local)
                mask = self._masks.pop(parameter)
                local.mul_(self._mask(local) if is_due else mask)
                if parameter in self._before:
                    # A state that was loaded in the meantime has its own.
                    self._optimizer.state[parameter].setdefault(_DENSE, self._before.pop(parameter))

        self._pack()

    def _mask(self, weight: torch.Tensor) -> torch.Tensor:
        return mask24_of_tiles(weight) if self._products == "sparse" and takes_tiles(weight) else mask24(weight)

    def _pack(self) -> None:
        """Packs the weights for the products until the next step."""
        for layer in self._layers:
            if not takes_packed(layer.weight):
                layer.packed = None
            elif layer.packed is None or not layer.packed.holds(layer.weight):
                layer.packed = Packed24(layer.weight)
            else:
                layer.packed.update(layer.weight)

    def _stepped(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Weights with a gradient, and this rank's part of their dense ones."""
        for parameter in self._weights:
            if parameter.grad is not None:
                dense = self._optimizer.state.get(parameter, {}).get(_DENSE)
                yield parameter, _local(self._before[parameter] if dense is None else dense)


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _check_groups(name: str, parameter: nn.Parameter) -> None:
    if not isinstance(parameter, DTensor):
        return
    layout = parameter._spec.layout
    num_parts = 1
    for placement, size in zip(layout.placements, parameter.device_mesh.shape, strict=True):
        if placement.is_shard(1):
            num_parts *= size
    if parameter.shape[1] % (GROUP * num_parts):
        problem = f"{name} has shape {tuple(parameter.shape)} and lies as {layout}."
        raise ShardingError("Sparse24", problem, f"Cut its inputs into parts that are multiples of {GROUP}.")
