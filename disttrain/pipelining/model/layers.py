"""Layers with a backward in two parts: their class is replaced by one whose forward is an autograd Function of ours."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import fx, nn

from disttrain._python.made_classes import made_by
from disttrain.autocast import is_within_autocast
from disttrain.pipelining.model import functions

_CONV1D = ("transformers.pytorch_utils", "Conv1D")
"""GPT-2's linear layer, whose matrix is (in, out). Known by its name: transformers need not be there."""


def split_layers(module: nn.Module) -> int:
    """Let the linear, embedding and norm layers in `module` leave their weights' gradients to whoever keeps them.

    They compute the same, bit for bit; `isinstance` with their former class stays true. To be called before
    `fully_shard`, and after `parallelize_module`, whose layers do this themselves. Layers with a forward of their own,
    with sparse gradients or renormalised embeddings are left alone, and so is, within, what a compiler traces and what
    is given tensors of other kinds, such as DTensors: the gradients of these weights are computed at once.
    Of a stage that `pipeline` has made the linear operators are changed.
    Returns: how many layers were changed; 0 the second time.
    """
    layers = [(layer, kind) for layer in module.modules() if (kind := _kind(layer)) is not None]
    for layer, kind in layers:
        layer.__class__ = _joined(cast(Any, kind), cast(Any, type(layer)))
    return len(layers) + sum(_split_graph(child) for child in module.modules() if isinstance(child, fx.GraphModule))


def _split_graph(stage: fx.GraphModule) -> int:
    nodes = stage.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    for node in nodes:
        node.target = functions.linear
    if nodes:
        stage.recompile()
    return len(nodes)


class SplitLayer(nn.Module):
    """A layer that `split_layers` has changed."""

    weight: nn.Parameter

    def _goes_its_own_way(self, x: torch.Tensor) -> bool:
        """Compilers know the layer's own operators better; other kinds of tensors have rules of their own."""
        return torch.compiler.is_compiling() or not functions.are_plain(x, self.weight)


class _Linear(SplitLayer):
    bias: nn.Parameter | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return super().forward(x)  # type: ignore[no-any-return]
        return functions.linear(x, self.weight, self.bias)


class _Conv1D(SplitLayer):
    bias: nn.Parameter | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() < 2 or self._goes_its_own_way(x) or self.bias is None:
            return super().forward(x)  # type: ignore[no-any-return]
        return functions.addmm(x, self.weight, self.bias)


class _Embedding(SplitLayer):
    padding_idx: int | None
    scale_grad_by_freq: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._goes_its_own_way(x):
            return super().forward(x)  # type: ignore[no-any-return]
        return functions.embedding(x, self.weight, self.padding_idx, self.scale_grad_by_freq)


class _LayerNorm(SplitLayer):
    normalized_shape: tuple[int, ...]
    eps: float
    bias: nn.Parameter | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if is_within_autocast(x.device) or self._goes_its_own_way(x):
            return super().forward(x)  # type: ignore[no-any-return]
        return functions.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class _RMSNorm(SplitLayer):
    normalized_shape: tuple[int, ...]
    eps: float | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Otherwise torch composes it of other operators, and the weight's gradient is computed in I.
        is_one_operator = x.is_cuda and x.is_contiguous() and x.dtype == self.weight.dtype and x.is_floating_point()
        if not is_one_operator or is_within_autocast(x.device) or self._goes_its_own_way(x):
            return super().forward(x)  # type: ignore[no-any-return]
        return functions.rms_norm(x, self.normalized_shape, self.weight, self.eps)


_KINDS: dict[Any, type[SplitLayer]] = {
    nn.Linear.forward: _Linear,
    nn.Embedding.forward: _Embedding,
    nn.LayerNorm.forward: _LayerNorm,
    nn.RMSNorm.forward: _RMSNorm,
}


def _kind(layer: nn.Module) -> type[SplitLayer] | None:
    if isinstance(layer, SplitLayer) or "forward" in vars(layer) or getattr(layer, "weight", None) is None:
        return None
    if isinstance(layer, nn.Embedding) and (layer.sparse or layer.max_norm is not None):
        return None
    if (type(layer).__module__, type(layer).__qualname__) == _CONV1D:
        return _Conv1D
    return _KINDS.get(type(layer).forward)


@functools.cache
def _joined(kind: Any, cls: Any) -> type[nn.Module]:
    return made_by(type(f"Split{cls.__name__}", (kind, cls), {}), _joined, kind, cls)
