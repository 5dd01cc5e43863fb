"""Finds patterns in a module's forward that a kernel computes at once, and puts kernels in their place.

The forward is traced with stand-ins (torch.fx); its submodules are called as before, with their hooks. Each call
decides again by its arguments: if shapes and dtypes don't fit, or submodules were replaced or have hooks, the original
operators run. A forward is not changed if a trace may not show all that it does (`tracing.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from disttrain.autocast import is_within_autocast
from disttrain.kernels._torch import has_hooks
from disttrain.kernels.attention.sdpa import attended
from disttrain.kernels.cross_entropy.linear import linear_cross_entropy
from disttrain.kernels.glu.operator import GELUS, geglu, swiglu
from disttrain.kernels.norms.modules import KernelLayerNorm, KernelRMSNorm, add_then_norm
from disttrain.kernels.rotary.operator import rotate
from disttrain.kernels.tracing import Trace, trace

SWIGLU, GEGLU, ADD_NORM, LOSS, ROTATION, ATTENTION = (
    "SwiGLU",
    "GeGLU",
    "residual + norm",
    "linear + cross-entropy",
    "rotation",
    "attention",
)


def rewritten(module: nn.Module) -> tuple[Trace, list[str]] | None:
    """The module's forward with kernels, and what they replace; None where there is nothing to replace, or no trace."""
    traced = trace(module)
    if traced is None:
        return None
    replaced = [
        *_gated_products(module, traced.graph),
        *_rotations(traced.graph),
        *_attentions(traced.graph),
        *_losses(module, traced.graph),
        *_residual_norms(module, traced.graph),
    ]
    return (traced, replaced) if replaced else None


def _gated_products(module: nn.Module, graph: fx.Graph) -> Iterator[str]:
    for node in _calls(graph, operator.mul, torch.mul, "mul"):
        for gate, up in (node.args[:2], node.args[1::-1]):
            activation = _activation(module, gate)
            if activation is None or not isinstance(gate, fx.Node) or not isinstance(up, fx.Node) or node.kwargs:
                continue
            by: Any = activation
            if gate.op == "call_module":
                with graph.inserting_before(node):
                    by = graph.get_attr(str(gate.target))
            _replace(graph, node, [gate], gated_product, (gate.args[0], up, by))
            yield SWIGLU if activation == "silu" else GEGLU
            break


def _activation(module: nn.Module, node: Any) -> Any:
    """The name of the activation, of a node that activates its one input and is used once; else None."""
    if not isinstance(node, fx.Node) or len(node.users) != 1 or len(node.args) != 1:
        return None
    options = dict(node.kwargs)
    if node.op == "call_module":
        return None if options else _name_of(module.get_submodule(str(node.target)))
    options.pop("inplace", None)
    if node.target is F.silu and not options:
        return "silu"
    if node.target is F.gelu and options.keys() <= {"approximate"}:
        approximate = options.get("approximate", "none")
        return approximate if approximate in GELUS else None
    return None


def _name_of(activation: nn.Module) -> str | None:
    if has_hooks(activation):
        return None
    if type(activation) is nn.SiLU:
        return "silu"
    return activation.approximate if type(activation) is nn.GELU else None


def _residual_norms(module: nn.Module, graph: fx.Graph) -> Iterator[str]:
    for total in _calls(graph, operator.add, torch.add, "add"):
        x, residual = total.args[0], total.args[-1]
        if len(total.args) != 2 or total.kwargs or not isinstance(x, fx.Node) or not isinstance(residual, fx.Node):
            continue
        norm = next((user for user in total.users if _is_norm(module, user)), None)
        if norm is None:
            continue
        with graph.inserting_before(total):
            weight = graph.get_attr(str(norm.target))
            pair = graph.call_function(add_then_norm, (weight, x, residual))
            normed, summed = (graph.call_function(operator.getitem, (pair, index)) for index in (0, 1))
        norm.replace_all_uses_with(normed)
        graph.erase_node(norm)
        total.replace_all_uses_with(summed)
        graph.erase_node(total)
        yield ADD_NORM


def _is_norm(module: nn.Module, node: fx.Node) -> bool:
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return False
    return type(module.get_submodule(str(node.target))) in (KernelRMSNorm, KernelLayerNorm)


def _losses(module: nn.Module, graph: fx.Graph) -> Iterator[str]:
    for node in _calls(graph, F.cross_entropy):
        # Through stand-ins all arguments come by name; torch has two that it keeps for what was before.
        options = dict(node.kwargs)
        is_old = any(options.pop(name, None) is not None for name in ("size_average", "reduce"))
        way = [] if is_old or len(node.args) != 2 else _way_from_head(module, node.args[0])
        if way:
            head, between = way[-1], {str(between_node.target) for between_node in way[:-1]}
            with graph.inserting_before(node):
                weight = graph.get_attr(str(head.target))
            has_rows, is_wide = not between.isdisjoint(_AS_ROWS), not between.isdisjoint(_AS_WIDE)
            _replace(graph, node, way, loss_of_linear, (weight, *head.args, node.args[1], has_rows, is_wide), options)
            yield LOSS


_AS_ROWS = ("flatten", "view", "reshape")
_AS_WIDE = ("float", "to")


def _way_from_head(module: nn.Module, node: Any) -> list[fx.Node]:
    """The nodes from `node` back to the linear layer whose output it is, as rows, perhaps in fp32; empty where there is
    none.

    Nobody else may read what lies between.
    """
    way: list[fx.Node] = []
    widths: list[Any] = []
    while isinstance(node, fx.Node) and len(node.users) == 1:
        way.append(node)
        if node.op == "call_module" and len(node.args) == 1 and not node.kwargs:
            head = module.get_submodule(str(node.target))
            is_head = type(head) is nn.Linear and all(width == head.out_features for width in widths)
            return way if is_head else []
        arguments = node.args[1:]
        if node.op != "call_method" or node.kwargs:
            return []
        if node.target in ("view", "reshape") and len(arguments) == 2 and arguments[0] == -1:
            widths.append(arguments[1])
        elif (node.target, arguments) not in _HARMLESS:
            return []
        node = node.args[0]
    return []


_HARMLESS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("float", ()),
    ("to", (torch.float32,)),
    ("flatten", (0, 1)),
    ("flatten", (0, -2)),
)


def _rotations(graph: fx.Graph) -> Iterator[str]:
    """cat((a cos - b sin, a sin + b cos), -1) of the halves a and b of one tensor, and that in its dtype."""
    for node in _calls(graph, torch.cat):
        halves = node.args[0]
        if not node.users or _dim_of(node, 1) != -1 or not isinstance(halves, tuple | list) or len(halves) != 2:
            continue
        turned = _angle_of(*halves)
        if turned is None:
            continue
        x, cos, sin, pattern = turned
        last = next(iter(node.users))
        if len(node.users) == 1 and last.target == "type_as" and last.args == (node, x):
            _replace(graph, last, [node, *pattern], rotated_halves, (x, cos, sin, True))
        else:
            _replace(graph, node, pattern, rotated_halves, (x, cos, sin, False))
        yield ROTATION


def _angle_of(first: Any, second: Any) -> tuple[fx.Node, fx.Node, fx.Node, list[fx.Node]] | None:
    """The tensor that is turned, cosine and sine, and all nodes that are then needed no more, each behind those that
    read it."""
    if not (_is_call(first, operator.sub) and _is_call(second, operator.add)):
        return None
    products = [*first.args, *second.args]
    if len(products) != 4 or not all(_is_call(product, operator.mul) for product in products):
        return None
    (a, cos), (b, sin), (a_again, sin_again), (b_again, cos_again) = (product.args for product in products)
    if (a, b, cos, sin) != (a_again, b_again, cos_again, sin_again):
        return None
    if not all(_is_call(half, operator.getitem) and half.args[1] == index for index, half in enumerate((a, b))):
        return None
    both = a.args[0]
    if both is not b.args[0] or both.target != "chunk" or both.args[1] != 2 or _dim_of(both, 2) != -1:
        return None
    if not isinstance(cos, fx.Node) or not isinstance(sin, fx.Node):
        return None
    return both.args[0], cos, sin, [first, second, *products, a, b, both]


def _attentions(graph: fx.Graph) -> Iterator[str]:
    for node in _calls(graph, F.scaled_dot_product_attention):
        _replace(graph, node, [], attended, node.args, node.kwargs)
        yield ATTENTION


def _dim_of(node: fx.Node, index: int) -> Any:
    """The dim that it is called with, by place or by name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get("dim")


def _is_call(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target and not node.kwargs


def rotated_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_rounded: bool) -> torch.Tensor:
    """The halves of x's last dim turned by the angles, in x's dtype if `is_rounded`; by a kernel where shapes fit."""
    fits = x.dim() == 4 and cos.shape == sin.shape == (x.shape[2], x.shape[3] // 2) and not x.shape[3] % 2
    fits = fits and not (cos.requires_grad or sin.requires_grad)
    if fits and (is_rounded or torch.promote_types(x.dtype, cos.dtype) == x.dtype):
        return rotate(x, cos, sin)
    first, second = x.chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, first * sin + second * cos), -1)
    return turned.type_as(x) if is_rounded else turned


def gated_product(gate: torch.Tensor, up: torch.Tensor, activation: str | nn.Module) -> torch.Tensor:
    """activation(gate) * up, by a kernel where both are alike, and a module is still what it was."""
    name = activation if isinstance(activation, str) else _name_of(activation)
    if name is not None and gate.shape == up.shape and gate.dtype == up.dtype:
        return swiglu(gate, up) if name == "silu" else geglu(gate, up, name)
    if not isinstance(activation, str):
        activated: torch.Tensor = activation(gate)
        return activated * up
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate=activation)) * up


def loss_of_linear(
    head: nn.Module,
    hidden: torch.Tensor,
    target: torch.Tensor,
    has_rows: bool,
    is_wide: bool,
    weight: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """F.cross_entropy of the head's output, perhaps as rows or in fp32; without it where the head is a plain layer."""
    is_of_classes = not target.is_floating_point() and target.numel() * hidden.shape[-1] == hidden.numel()
    is_plain = type(head) is nn.Linear and not has_hooks(head)
    if isinstance(head, nn.Linear) and is_plain and is_of_classes and (has_rows or hidden.dim() == 2):
        rows = hidden.reshape(-1, hidden.shape[-1])
        loss = linear_cross_entropy(rows, head.weight, target.flatten(), head.bias, class_weight=weight, **options)
        return loss if is_wide or is_within_autocast(hidden.device) else loss.to(hidden.dtype)
    logits = head(hidden)
    logits = logits.reshape(-1, logits.shape[-1]) if has_rows else logits
    return F.cross_entropy(logits.float() if is_wide else logits, target, weight, **options)


def _calls(graph: fx.Graph, *targets: Any) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op in ("call_function", "call_method") and node.target in targets]


def _replace(
    graph: fx.Graph,
    node: fx.Node,
    pattern: Sequence[fx.Node],
    function: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any] | None = None,
) -> None:
    """Put a call in the node's place; what of the pattern nobody else reads goes with it."""
    with graph.inserting_before(node):
        other = graph.call_function(function, args, kwargs)
    node.replace_all_uses_with(other)
    for unused in (node, *pattern):
        if not unused.users:
            graph.erase_node(unused)
