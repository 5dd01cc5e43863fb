"""compile_blocks: one graph for each kind of block, the values of eager blocks, and orders that would be wrong."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from llama.config import PRESETS
from llama.model import Llama
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from disttrain.compiling import Kind, compile_blocks
from disttrain.compiling.kinds import find_blocks, kinds_of
from disttrain.errors import CompileError

pytestmark = [
    # Dynamo looks at all of a tensor, and AOTAutograd loads what torch itself finds old.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
]

TOKENS = torch.arange(2 * 33).reshape(2, 33) % 256


@pytest.fixture(autouse=True)
def no_graphs_of_others() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def llama() -> Llama:
    torch.manual_seed(0)
    model = Llama(PRESETS["tiny"])
    model.length = 64  # so that what blocks save of the angles is little
    model.init()
    return model


def outcome(model: nn.Module, tokens: torch.Tensor = TOKENS) -> list[torch.Tensor]:
    """A loss and all gradients."""
    model.zero_grad()
    loss = model(tokens).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


class Block(nn.Module):
    def __init__(self, dim: int, *, number: int = 0, doubles: bool = False) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(dim, dim), nn.GELU()
        self.number, self.doubles = number, doubles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.linear(x))
        return 2 * x if self.doubles else x


class Stack(nn.Module):
    """Blocks, told apart by their attribute only."""

    def __init__(self, flags: list[bool]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"at{n}": Block(4, number=n, doubles=flag) for n, flag in enumerate(flags)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def test_one_graph_serves_all_blocks() -> None:
    model, expected = llama(), outcome(llama())
    names = list(model.state_dict())
    found = compile_blocks(model, backend="aot_eager")
    assert found.kinds == [Kind("Block", ("blocks.0", "blocks.1"))]
    torch.testing.assert_close(outcome(model), expected)
    assert num_graphs() == 1
    assert list(model.state_dict()) == names


def test_a_graph_for_each_kind_and_not_for_each_number() -> None:
    flags = [False, True] * 10
    model, x = Stack(flags), torch.ones(3, 4, requires_grad=True)
    expected = model(x)
    found = compile_blocks(model, backend="eager")
    assert [len(kind.paths) for kind in found.kinds] == [10, 10]
    torch.testing.assert_close(model(x), expected)
    assert num_graphs() == 2
    assert str(found).splitlines() == [
        "kind   blocks  where",
        "Block      10  layers.at0 … layers.at18",
        "Block      10  layers.at1 … layers.at19",
    ]


def test_more_kinds_than_dynamo_keeps_graphs_for_one_function() -> None:
    sizes = range(1, 2 * torch._dynamo.config.recompile_limit)
    model = nn.ModuleList(nn.ModuleList(Block(size) for _ in range(2)) for size in sizes)
    found = compile_blocks(model, backend="eager")
    assert len(found.kinds) == len(sizes)
    for pair, size in zip(model, sizes, strict=True):
        for block in pair:
            block(torch.ones(2, size))
    assert num_graphs() == len(sizes)


def test_another_length_is_compiled_once() -> None:
    model = Stack([False] * 3)
    eager = copy.deepcopy(model)
    compile_blocks(model, backend="aot_eager")
    for length in (16, 23, 57, 16):
        x = torch.linspace(-1, 1, 8 * length).view(2, length, 4).requires_grad_()
        # No leaf, as behind an embedding: for that blocks would have another graph.
        torch.testing.assert_close(outcome(model, x * 1), outcome(eager, x * 1))
    assert num_graphs() == 2


def test_a_copy_has_blocks_of_its_own() -> None:
    model = llama()
    compile_blocks(model, backend="aot_eager")
    before = outcome(model)
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        nn.init.zeros_(parameter)
    torch.testing.assert_close(outcome(model), before)
    assert not any(grad.any() for grad in outcome(copied))
    assert num_graphs() == 1


def saves_products(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = {"context_fn": functools.partial(create_selective_checkpoint_contexts, saves_products)}


def wrap(model: Llama, **options: Any) -> Llama:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block, **options)
    return model


def saved_bytes(model: nn.Module) -> int:
    found = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal found
        found += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(TOKENS)
    return found


@pytest.mark.sweep(1)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("is_wrapped_first", [True, False])
def test_checkpointing_before_and_after(is_wrapped_first: bool) -> None:
    model, expected = llama(), outcome(llama())
    if is_wrapped_first:
        wrap(model)
    kinds = compile_blocks(model, backend="aot_eager").kinds
    if not is_wrapped_first:
        wrap(model)
    assert [kind.name for kind in kinds] == ["Block"]
    torch.testing.assert_close(outcome(model), expected)
    assert num_graphs() == 1


@pytest.mark.sweep(0)
def test_a_policy_within_a_graph_is_kept() -> None:
    sizes = []
    for options in ({}, SELECTIVE, None):
        model = llama() if options is None else wrap(llama(), **options)
        compile_blocks(model, backend="aot_eager_decomp_partition")
        torch.testing.assert_close(outcome(model), outcome(llama()))
        sizes.append(saved_bytes(model))
        torch._dynamo.reset()
    assert sizes[0] < sizes[1] < sizes[2]


def test_a_policy_around_a_graph_is_refused() -> None:
    model = llama()
    compile_blocks(model, backend="aot_eager")
    wrap(model, **SELECTIVE)
    with pytest.raises(
        CompileError, match=r"Block\.forward: a policy .* Wrap the blocks first, and call compile_blocks"
    ):
        model(TOKENS)


def test_functional_checkpointing_around_a_graph() -> None:
    model = Stack([False] * 3)
    expected = outcome(model, torch.ones(3, 4))
    compile_blocks(model, backend="aot_eager")
    plain = model.forward
    model.forward = lambda x: checkpoint(plain, x, use_reentrant=False)
    torch.testing.assert_close(outcome(model, torch.ones(3, 4)), expected)


@pytest.mark.parametrize(
    ("blocks", "paths"),
    [
        (None, ["blocks.0", "blocks.1"]),
        ("blocks.1", ["blocks.1"]),
        (
            ["blocks.*.feed_forward", "blocks.*.attention"],
            [f"blocks.{n}.{part}" for n in "01" for part in ("attention", "feed_forward")],
        ),
        (nn.Linear, None),
        (lambda path, _: path == "head", ["head"]),
        ("*", ["embedding", "blocks", "norm", "head"]),
    ],
)
def test_which_modules_are_blocks(blocks: Any, paths: list[str] | None) -> None:
    found = list(find_blocks(llama(), blocks))
    if paths is None:
        paths = [path for path, module in llama().named_modules() if isinstance(module, nn.Linear)]
    assert found == paths


def test_lists_within_blocks_and_single_layers_are_no_blocks() -> None:
    inner = functools.partial(nn.Sequential, nn.Linear(2, 2), nn.Linear(2, 2))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Sequential(inner(), inner()), inner())
    assert list(find_blocks(model)) == ["2", "3"]


def test_kinds_tell_shapes_and_what_is_trained() -> None:
    blocks = {str(number): Block(4, number=number) for number in range(4)}
    blocks["1"].requires_grad_(False)
    blocks["4"] = Block(5)
    assert [kind.paths for kind in kinds_of(blocks)] == [("0", "2", "3"), ("1",), ("4",)]


def _compiled_by_torch(model: Llama) -> Any:
    return torch.compile(model)


def _twice(model: Llama) -> Any:
    compile_blocks(model)
    return model


def _one_block(model: Llama) -> Any:
    model.blocks[1].compile()
    return model


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_compiled_by_torch, "the model is compiled already. Compile it once"),
        (_twice, "block 'blocks.0' is compiled already. Compile it once"),
        (_one_block, "block 'blocks.1' is compiled already. Compile it once"),
        (lambda _: nn.Linear(2, 2), "no list of modules holds two of one class in this Linear. Give blocks="),
        (lambda model: model.blocks[:1], "no list of modules holds two of one class in this ModuleList. Give blocks="),
    ],
)
def test_what_cannot_be_compiled(change: Callable[[Llama], nn.Module], text: str) -> None:
    model = change(llama())
    with pytest.raises(CompileError) as caught:
        compile_blocks(model)
    assert text in str(caught.value)


def test_blocks_that_are_not_there() -> None:
    with pytest.raises(CompileError, match=r"none is meant by blocks='layers\.\*' in this Llama\."):
        compile_blocks(llama(), "layers.*")


def with_own_forwards(kind: str) -> nn.Module:
    model = nn.Sequential(*(Block(4) for _ in range(3)))
    for block in model:
        traced = torch.fx.symbolic_trace(block)
        if kind == "method":
            block.forward = MethodType(twice, block)
        elif kind == "method of a graph":
            block.forward = MethodType(type(traced).forward, block)
        elif kind == "a graph's":
            block.forward = traced.forward
        else:
            block.forward = functools.partial(twice, block)
    return model


def twice(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = type(block).forward(block, x) * 2
    return result


@pytest.mark.parametrize("kind", ["method", "method of a graph", "a graph's", "function"])
def test_a_block_s_own_forward_is_what_is_compiled(kind: str) -> None:
    model = with_own_forwards(kind)
    x = torch.ones(2, 4, requires_grad=True)
    wished = model(x)
    found = compile_blocks(model, backend="eager")
    torch.testing.assert_close(model(x), wished)
    assert len(found.kinds) == (3 if kind == "function" else 1)
    if kind.startswith("method"):
        assert num_graphs() == 1


def test_one_block_with_a_forward_of_its_own_is_of_another_kind() -> None:
    model = nn.Sequential(*(Block(4) for _ in range(3)))
    model[1].forward = MethodType(twice, model[1])
    wished = model(torch.ones(2, 4))
    assert [kind.paths for kind in compile_blocks(model, backend="eager").kinds] == [("0", "2"), ("1",)]
    torch.testing.assert_close(model(torch.ones(2, 4)), wished)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class Activated(nn.Module):
    """Calls a function of this module, one of torch's and an attribute, which tests give other values."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(doubled(x)) * self.factor


def test_names_that_are_bound_anew_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.ModuleList(), nn.Sequential(Activated(), Activated()))
    compile_blocks(model[1], backend="eager", blocks=["0", "1"])
    x = torch.tensor([-1.0, 3.0])
    assert torch.equal(model[1](x), torch.tensor([0.0, 12.0]))
    monkeypatch.setattr(nn.functional, "relu", torch.neg)
    assert torch.equal(model[1](x), 4 * x)
    monkeypatch.setitem(globals(), "doubled", lambda x: 3 * x)
    assert torch.equal(model[1](x), 9 * x)
    model[1][1].factor = 2.0
    assert torch.equal(model[1](x), 18 * x)


def test_options_of_torch_compile_stay() -> None:
    def keep_all(entries: Any) -> list[bool]:
        asked.append(len(entries))
        return [True] * len(entries)

    asked: list[int] = []
    for options in (
        {"mode": "default"},
        {"options": {"guard_filter_fn": keep_all}},
        {"options": {"max_autotune": False}},
        {},
    ):
        torch._dynamo.reset()
        model = llama()
        compile_blocks(model, **({"backend": "aot_eager"} if options.get("mode") else {}), **options)
        model(TOKENS)
        assert bool(asked) is ("guard_filter_fn" in (options.get("options") or {}))
        asked.clear()
