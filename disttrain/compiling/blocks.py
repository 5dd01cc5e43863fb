"""compile_blocks: a model's repeated blocks, compiled in place, with one graph for each kind.

The `forward` of a block is compiled, its own where it has one; its hooks stay outside. So `fully_shard` gathers and
frees around a graph, whether it is called before or after, and tensor parallel lays out a block's inputs there. Each
kind has a copy of its `forward`'s code. Dynamo keeps graphs by code, so other kinds' graphs are not tried then, and do
not count for a kind's limit of recompilations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from disttrain.compiling._torch import is_compiled, is_under_policy
from disttrain.compiling.guards import with_few_guards
from disttrain.compiling.kinds import Blocks, Kind, find_blocks, kinds_of, unwrapped
from disttrain.console import table
from disttrain.errors import CompileError

Forward = Callable[..., Any]


@dataclass(frozen=True)
class CompiledBlocks:
    """The blocks that `compile_blocks` has found. As text, a table."""

    kinds: Sequence[Kind]

    def __str__(self) -> str:
        rows = [[kind.name, str(len(kind.paths)), _span(kind.paths)] for kind in self.kinds]
        return table(["kind", "blocks", "where"], rows, words=[0, 2])


def compile_blocks(
    model: nn.Module, blocks: Blocks | None = None, *, fullgraph: bool = True, **options: Any
) -> CompiledBlocks:
    """Compile the blocks of `model` in place, each kind once; their first calls do it.

    Args:    blocks  which they are, when not those of the model's lists (`find_blocks`);
             fullgraph, options  torch.compile's: `dynamic`, `backend`, `mode`, `options`. Other than there, what would
             break a graph is an error, unless `fullgraph` is False.
    Raises:  CompileError for a model without blocks, for blocks that are compiled already or whose parts `fully_shard`
             has been called on; with `fullgraph`, for experts that are divided among ranks; when a block is called, for
             a selective policy of activation checkpointing around it, which a graph would not hear of.
    Sharding, cutting and checkpointing may come before or after, but for selective checkpointing, which must come
    before. Parameters and their names stay as they are.
    """
    found_blocks = find_blocks(model, blocks)
    for path, module in (("", model), *found_blocks.items()):
        _check_not_compiled(path, module)
    for path, block in found_blocks.items():
        _check_parts(path, block, fullgraph)
    kinds = kinds_of(found_blocks)
    for kind in kinds:
        compiled: dict[Forward, Forward] = {}
        for path in kind.paths:
            block = found_blocks[path]
            function, owner = _forward_of(block)
            # Blocks of a kind have the same one, but for what torch.fx writes anew for each.
            key = function if owner is None else type(block).forward
            if key not in compiled:
                graph = torch.compile(_copy(function), fullgraph=fullgraph, **with_few_guards(options))
                compiled[key] = _guarded(graph, kind.name, fullgraph, is_bound=owner is None)
            block.forward = MethodType(compiled[key], block if owner is None else owner)
    return CompiledBlocks(kinds)


def _forward_of(block: nn.Module) -> tuple[Forward, Any]:
    """The function that a call of the block runs, and its `self`; None where it takes none.

    A block may have a forward of its own: a function, or a method, also of another module (a torch.fx.GraphModule).
    """
    forward = vars(block).get("forward")
    if forward is None:
        return type(block).forward, block
    return (forward.__func__, forward.__self__) if isinstance(forward, MethodType) else (forward, None)


def _guarded(compiled: Forward, name: str, fullgraph: bool, is_bound: bool) -> Forward:
    """`compiled`, but with an error where something done since would be silently wrong, or hard to understand.

    Args: is_bound  it is not given the block, as it has it already.
    """
    seen: WeakSet[nn.Module] = WeakSet()

    def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inputs = args if is_bound else (block, *args)
        if torch.compiler.is_compiling():
            return compiled(*inputs, **kwargs)
        if block not in seen:
            _check_parts(name, block, fullgraph)
            seen.add(block)
        if is_under_policy():
            raise CompileError(
                f"{name}.forward",
                "a policy of selective checkpointing is around a compiled block; what its graph computes would be"
                " recomputed whatever the policy says.",
                "Wrap the blocks first, and call compile_blocks then.",
            )
        return compiled(*inputs, **kwargs)

    forward._is_compiled_block = True  # type: ignore[attr-defined]
    return forward


def _copy(forward: Forward) -> Forward:
    """The same function with code of its own; what is no plain function is left as it is."""
    if not isinstance(forward, FunctionType):
        return forward
    code = forward.__code__.replace()
    copied = FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    copied.__dict__.update(forward.__dict__)
    return copied


def _check_not_compiled(path: str, module: nn.Module) -> None:
    is_ours = hasattr(getattr(vars(module).get("forward"), "__func__", None), "_is_compiled_block")
    if is_ours or is_compiled(module):
        subject = f"block {path!r}" if path else "the model"
        raise CompileError(
            "compile_blocks", f"{subject} is compiled already.", "Compile it once, as a whole or by blocks."
        )


def _check_parts(path: str, block: nn.Module, fullgraph: bool) -> None:
    """Gathering is no part of a graph, nor is what modules say of themselves."""
    for name, module in block.named_modules():
        reason = getattr(module, "breaks_graphs", "") if fullgraph else ""
        if reason:
            problem = f"no graph holds all of {f'{path}.{name}' if name else path}: {reason}."
            raise CompileError("compile_blocks", problem, "Give fullgraph=False.")
        if name and hasattr(module, "set_requires_gradient_sync"):
            wrapped = module is unwrapped(block)
            raise CompileError(
                "compile_blocks",
                f"fully_shard has been called on {path}.{name}, which is within the block {path!r}.",
                "Wrap blocks for checkpointing first and shard what comes of it."
                if wrapped
                else "Shard whole blocks, or give blocks= the parts that are sharded.",
            )


def _span(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} … {paths[-1]}"
