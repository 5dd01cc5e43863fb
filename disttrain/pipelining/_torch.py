"""The only file of `pipelining` that uses torch's private names, of tensors, autograd and nested values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_map_only,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

Structure = TreeSpec
"""The structure of nested values."""

Root = torch.Tensor | GradientEdge
"""The point at which a backward begins."""


def run_backward(roots: Sequence[Root], grads: Sequence[torch.Tensor]) -> None:
    """torch.autograd.backward, without the checks and conversions of its arguments, which take as long as it does."""
    _engine_run_backward(tuple(roots), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True)


def gradients_of(
    inputs: Sequence[torch.Tensor], roots: Sequence[Root], grads: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """torch.autograd.grad, likewise; None for inputs that take no part."""
    return _engine_run_backward(tuple(roots), tuple(grads), False, False, tuple(inputs), True, accumulate_grad=False)


def edge_of(output: torch.Tensor) -> GradientEdge | None:
    """Returns the node at which a backward of this output begins, which keeps less than the output does; None when it
    has no gradient."""
    node: Any = output.grad_fn
    if node is None and not output.requires_grad:
        return None
    if node is None or isinstance(node, torch._C._FunctionBase):
        # The Python object of a node written in Python does not keep the node alive, and a leaf has no node yet.
        return get_gradient_edge(output)
    return GradientEdge(node, output.output_nr)


@contextmanager
def without_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within it, hooks that `register_hook` has put on these tensors are not called."""
    hooks = [(tensor, tensor._backward_hooks) for tensor in tensors if tensor._backward_hooks]
    for tensor, _ in hooks:
        tensor._backward_hooks = None
    try:
        yield
    finally:
        for tensor, of_tensor in hooks:
            tensor._backward_hooks = of_tensor


def has_hooks(parameter: torch.Tensor) -> bool:
    """True if a hook is called with, or after, each of its gradients."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeSpec]:
    """The leaves of nested tuples, lists, dicts and registered classes, and their structure."""
    return tree_flatten(tree, is_leaf)


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The same nest with `function` applied to its tensors."""
    return tree_map_only(torch.Tensor, function, tree)


def flatten_with_paths(tree: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[tuple[str, Any]], TreeSpec]:
    """The same with the path to each leaf, such as `['mask'][0]`."""
    leaves, structure = tree_flatten_with_path(tree, is_leaf)
    return [(keystr(path), leaf) for path, leaf in leaves], structure


def unflatten(leaves: Sequence[Any], structure: TreeSpec) -> Any:
    """The inverse of `flatten`."""
    return tree_unflatten(leaves, structure)


def structure_text(structure: Structure) -> str:
    """As JSON. Raises: NotImplementedError for a class that has not been registered by a name."""
    return treespec_dumps(structure)


def structure_from_text(text: str) -> Structure:
    """The inverse: classes are looked up by registered names. Raises: ValueError for a text that names modules."""
    if "__enum__" in text:
        raise ValueError("a structure with enumerations would have modules imported by name")
    return treespec_loads(text)


def num_holders(tensor: torch.Tensor) -> int:
    """Counts the tensors, views and saved ones included, that keep this one's memory."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1
