"""Parameters and buffers of an attention that are of its heads, beside the linear layers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from disttrain.errors import ShardingError
from disttrain.tp.attributes import DivideAttributes
from disttrain.tp.heads import HeadParallel
from disttrain.tp.layers.linears import matrix_of
from disttrain.tp.styles import ColwiseParallel, ParallelStyle

_COUNTS: Final = ("n_heads", "num_heads", "num_attention_heads", "n_head")
"""Attributes by which an attention says how many heads it has."""
_GROUPS: Final = ("num_key_value_groups", "num_queries_per_kv", "n_rep")
"""Attributes by which it says how many heads of queries share one of keys and values."""
_OF_PROJECTIONS: Final = re.compile(r"(^|_)(q|k|query|key)(_|norm|$)")
"""Names of norms of queries and keys."""


@dataclass(frozen=True)
class Heads:
    """The heads of one attention, for queries, and for keys and values; and the model's hidden size."""

    num: int
    num_kv: int
    head_dim: int
    hidden_size: int

    def own_styles(self, name: str, module: nn.Module) -> Iterator[ParallelStyle]:
        """The style of what the module itself holds for its heads; none where it holds nothing.

        Raises: ShardingError where sizes don't say what a parameter is.
        """
        parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        places = {key: self._place(f"{name}.{key}", parameter) for key, parameter in parameters.items()}
        persistent = module.state_dict(keep_vars=True)
        for key, buffer in module.named_buffers(recurse=False):
            if self._is_of_heads(buffer):
                if key in persistent:
                    raise _refusal(
                        f"{name}.{key} is a buffer with a number for each head, which is saved",
                        "Register it with persistent=False",
                    )
                places[key] = (list(buffer.shape).index(self.num), 1)
        sizes = {size for dim, size in places.values() if dim is not None}
        if len(sizes) > 1:
            raise _refusal(f"{name} holds numbers of heads and numbers of each head's dims: {', '.join(places)}")
        if places:
            yield HeadParallel({key: dim for key, (dim, _) in places.items()}, head_dim=next(iter(sizes), 1))

    def _place(self, what: str, tensor: torch.Tensor) -> tuple[int | None, int]:
        """The dim that heads lie along, None where all have the same; and how many numbers are one head's there."""
        for size, unit in ((self.num, 1), (self.num_kv, 1), (self.num * self.head_dim, self.head_dim)):
            if size in tensor.shape and not (unit > 1 and size == self.hidden_size):
                return list(tensor.shape).index(size), unit
        if tensor.ndim and tensor.shape[-1] == self.head_dim and tensor.numel() == self.head_dim:
            return None, 1
        raise _refusal(
            f"{what} has shape {tuple(tensor.shape)}, which does not say how it lies over {self.num} heads"
            f" ({self.num_kv} of keys and values) of {self.head_dim}"
        )

    def _is_of_heads(self, buffer: torch.Tensor) -> bool:
        """Slopes, and not a mask or a table of positions."""
        return buffer.is_floating_point() and buffer.numel() == self.num > 1 and self.num in buffer.shape

    def counted(self, module: nn.Module) -> DivideAttributes | None:
        """The style that divides the numbers of heads by which the module counts."""
        names = [name for name in _COUNTS if vars(module).get(name) == self.num]
        return DivideAttributes(*names) if names else None

    def grouped(self, module: nn.Module) -> DivideAttributes | None:
        """The style of what says how many heads of queries one of keys and values serves, which ranks may share."""
        names = [name for name in _GROUPS if vars(module).get(name) == self.num // self.num_kv]
        is_shared = self.num_kv < self.num and not self.num % self.num_kv
        return DivideAttributes(*names, num_kv_heads=self.num_kv) if names and is_shared else None

    def of_part(self, name: str, module: nn.Module) -> ParallelStyle | None:
        """The style of a module within the attention that is no norm of single heads and no linear layer."""
        if isinstance(module, nn.Embedding):
            return ColwiseParallel() if module.embedding_dim == self.num else None
        if matrix_of(module) is not None:
            return None
        return next(self.own_styles(name, module), None) if self._has_heads(module) else None

    def check_norm(self, name: str, module: nn.Module) -> bool:
        """True for a norm with weights of its own for each head, False for one with the same for all.

        Raises: ShardingError for a norm over all heads at once, which a rank with some of them cannot compute.
        """
        weight: Any = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or tuple(weight.shape) in ((self.head_dim,), ()):
            return False
        # By name: a norm of what comes into the attention may be as wide.
        is_wide = weight.ndim == 1 and weight.numel() in (self.num * self.head_dim, self.num_kv * self.head_dim)
        if is_wide and _OF_PROJECTIONS.search(name.rpartition(".")[2]):
            raise _refusal(
                f"{name} is a norm over all heads at once ({weight.numel()} numbers), of which a rank has some"
            )
        return weight.ndim > 1 and self._has_heads(module)

    def _has_heads(self, module: nn.Module) -> bool:
        tensors = [*module.parameters(recurse=False), *filter(self._is_of_heads, module.buffers(recurse=False))]
        return any(self.num in tensor.shape or self.num_kv in tensor.shape for tensor in tensors)


def has_embedding_of_heads(module: nn.Module, num_heads: int) -> bool:
    """True for an attention that learns a bias for each head and each distance."""
    return any(isinstance(child, nn.Embedding) and child.embedding_dim == num_heads for child in module.children())


def _refusal(
    problem: str, remedy: str = "Write the plan by hand: a dict from names of modules to styles"
) -> ShardingError:
    return ShardingError("plan_for", f"{problem}.", f"{remedy}.")
