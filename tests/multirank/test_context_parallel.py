"""torch's context_parallel: models that call scaled_dot_product_attention compute what one process does."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.compiling import compile_blocks
from disttrain.context_parallel import context_parallel, context_parallel_unshard, set_rotate_method
from disttrain.context_parallel.attending import attending
from disttrain.errors import ArgumentError, DisttrainError, LayoutError, MeshError, RankMismatchError, ShapeError
from disttrain.kernels import Causal, Documents, attention
from disttrain.kernels.attention.context.current import state_of_block
from disttrain.kernels.attention.context.parts import mirrored
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks

WIDTH, NUM_HEADS = 16, 4


def axis() -> disttrain.DeviceMesh:
    return disttrain.init_device_mesh("cpu", (disttrain.get_world_size(),), mesh_dim_names=("cp",))


@on_ranks(1, 2, 3, 4)
def test_torchs_function_looks_across_ranks_however_it_is_imported() -> None:
    mesh = axis()
    torch.manual_seed(0)
    for length in (1, 2, 3, 13, 16):
        query, key, value = torch.randn(3, 2, NUM_HEADS, length, 8, dtype=torch.float64)
        key, value = key[:, :2], value[:, :2]
        before = [tensor.clone() for tensor in (query, key, value)]
        for is_causal in (True, False):
            options = {"is_causal": is_causal, "enable_gqa": True, "scale": 0.3}
            expected = F.scaled_dot_product_attention(query, key, value, **options)
            for named in (True, False):
                with context_parallel(mesh, buffers=[query, key, value], buffer_seq_dims=[2, 2, -2]):
                    function = imported_by_name if named else F.scaled_dot_product_attention
                    attended = function(query, key, value, **options)
                    [whole] = context_parallel_unshard(mesh, [attended], [2])
                torch.testing.assert_close(whole, expected)
                torch.testing.assert_close(context_parallel_unshard(mesh, [attended], [-2])[0], expected)
        for tensor, kept in zip((query, key, value), before, strict=True):
            assert torch.equal(tensor, kept)


@on_ranks(2)
def test_torchs_function_takes_what_torchs_takes() -> None:
    """Fewer and more dims, those that broadcast, nothing, and calls of the operator itself."""
    mesh = axis()
    torch.manual_seed(0)
    for outer, other in (
        ((), ()),
        ((3,), (3,)),
        ((2, 3, 2), (2, 3, 2)),
        ((2, 3), (1, 3)),
        ((0, 3), (0, 3)),
        ((2, 0), (2, 0)),
    ):
        query = torch.randn(*outer, 7, 4, dtype=torch.float64)
        key, value = torch.randn(2, *other, 7, 4, dtype=torch.float64)
        for function in (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention):
            expected = function(query, key, value, is_causal=True)
            tensors = [query, key.clone(), value.clone()]
            with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[-2, -2, -2]):
                [whole] = context_parallel_unshard(mesh, [function(*tensors, is_causal=True)], [-2])
            torch.testing.assert_close(whole, expected)
    x = torch.randn(2, 3, 6, 4)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]), pytest.raises(LayoutError, match="alike but for H"):
        F.scaled_dot_product_attention(x, x[:0], x[:0])


class Block(nn.Module):
    """Attention by nn.MultiheadAttention, as torch's own layers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, NUM_HEADS, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        # A mask that is never read, since it says no more than is_causal.
        mask = torch.empty(x.shape[1], x.shape[1], dtype=torch.bool)
        attended, _ = self.attention(hidden, hidden, hidden, attn_mask=mask, is_causal=True, need_weights=False)
        return x + attended


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.embedding, self.head = way, nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.blocks = nn.ModuleList(Block() for _ in range(2)).double()
        self.double()

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + positions.unsqueeze(-1) / 7
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.way == "reentrant") if "reentrant" in self.way else block(x)
        return self.head(x)


@on_ranks(2, 3)
@pytest.mark.parametrize("way", ["plain", "not reentrant", "reentrant", "compiled"])
def test_a_model_trains_as_in_one_process(way: str) -> None:
    mesh, length = axis(), 11
    set_rotate_method("alltoall" if way == "plain" else "allgather")
    tokens, targets = torch.randint(11, (2, 2, length), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(length).expand(2, length)
    reference, model = Model("plain"), Model(way)
    F.cross_entropy(reference(tokens, positions).flatten(0, 1), targets.flatten()).backward()
    if way == "compiled":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    parts = [tokens, targets, positions]
    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[1, 1, 1], no_restore_buffers={positions}):
        logits = model(tokens, positions)
        (F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (2 * length)).backward()
    assert tokens.shape == (2, length)
    assert positions.shape[1] < length
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert parameter.grad is not None
        disttrain.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, expected.grad)


@on_ranks(2)
def test_tensors_that_view_one_another_stay_what_they_are() -> None:
    mesh = axis()
    rows = torch.arange(22).view(2, 11)
    tokens, targets = rows[:, :-1], rows[:, 1:]
    with context_parallel(mesh, buffers=[tokens, targets], buffer_seq_dims=[1, 1]):
        assert torch.equal(targets, tokens + 1)
        assert tokens.shape == (2, 5)
        tokens += 100
        assert torch.equal(rows, torch.arange(22).view(2, 11))
    assert torch.equal(tokens, rows[:, :-1])
    assert tokens.data_ptr() == rows.data_ptr()


@on_ranks(2, 3)
def test_tables_may_know_more_positions_than_there_are() -> None:
    """Rotary angles are made once, for the longest sequence that a model takes."""
    mesh, tokens = axis(), torch.arange(14).view(2, 7)
    table, positions = torch.randn(32, 3), torch.arange(40)
    kept = table.clone()
    with context_parallel(mesh, buffers=[tokens, table, positions], buffer_seq_dims=[1, 0, 0]):
        own = tokens[0]
        assert torch.equal(positions, own)
        assert torch.equal(table, kept[own])
    assert torch.equal(table, kept)
    assert len(positions) == 40
    with (
        pytest.raises(ShapeError, match=r"the buffers have 7, 9 positions.*only tables along dim 0"),
        context_parallel(mesh, buffers=[tokens, torch.zeros(2, 9)], buffer_seq_dims=[1, 1]),
    ):
        pass
    with (
        pytest.raises(ShapeError, match="the buffers have 7, 5 positions"),
        context_parallel(mesh, buffers=[tokens, table[:5]], buffer_seq_dims=[1, 0]),
    ):
        pass


@on_ranks(2)
def test_nothing_of_a_block_stays_behind_it() -> None:
    mesh, before = axis(), F.scaled_dot_product_attention
    x = torch.randn(1, 2, 6, 4)
    part = x.clone()

    def fail() -> None:
        with context_parallel(mesh, buffers=[part], buffer_seq_dims=[2]):
            assert part.shape[2] == 3
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert F.scaled_dot_product_attention is before
    assert torch.equal(part, x)
    torch.testing.assert_close(F.scaled_dot_product_attention(x, x, x), attention(x, x, x))


@on_ranks(2, 3)
def test_what_cannot_be_served_is_one_error_on_all_ranks() -> None:
    mesh = axis()
    x = torch.randn(1, 2, 6, 4)
    mask = torch.ones(6, 6, dtype=torch.bool)
    heads = nn.MultiheadAttention(4, 2, batch_first=True)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        with pytest.raises(LayoutError, match=r"the mask of shape \(6, 6\) tells of this rank's alone"):
            F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        with pytest.raises(LayoutError, match=r"dropout_p is 0\.1"):
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        with pytest.raises(LayoutError, match="need_weights=False"):
            heads(x[0], x[0], x[0])
        with pytest.raises(ShapeError, match=r"give this rank \d of 6 positions"):
            F.scaled_dot_product_attention(x, torch.cat([x, x], 2), torch.cat([x, x], 2))
    disttrain.barrier()


@on_ranks(2, 3)
def test_a_mask_on_one_rank_alone_is_told_to_the_others() -> None:
    mesh = axis()
    x = torch.randn(1, 2, 6, 4)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        own = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool) if disttrain.get_rank() == 1 else None
        with pytest.raises(DisttrainError, match="the mask of shape"):
            F.scaled_dot_product_attention(x, x, x, attn_mask=own)


@on_ranks(2, 3)
def test_buffers_that_cannot_be_cut_are_refused_on_all_ranks() -> None:
    mesh, is_odd = axis(), disttrain.get_rank() == 1
    x = torch.zeros(2, 6)
    cases = [
        ({"buffers": [x], "buffer_seq_dims": [2]}, ShapeError, r"buffer 0 of shape \(2, 6\) has no dim 2"),
        ({"buffers": [x, x[:, 1:]], "buffer_seq_dims": [1, 1]}, ShapeError, "the buffers have 6, 5 positions"),
        ({"buffers": [x], "buffer_seq_dims": [1, 1]}, ShapeError, "1 buffers and 2 dims"),
        ({}, ShapeError, "0 buffers and 0 dims"),
        ({"buffers": [x, x], "buffer_seq_dims": [1, 1]}, ArgumentError, "twice"),
        ({"buffers": [nn.Parameter(x)], "buffer_seq_dims": [1]}, ArgumentError, "takes a gradient"),
        ({"buffers": ["x"], "buffer_seq_dims": [1]}, ArgumentError, "no list of tensors"),
        (
            {"buffers": [x], "buffer_seq_dims": [1], "no_restore_buffers": {torch.zeros(1)}},
            ArgumentError,
            "none of the buffers",
        ),
    ]
    for given, kind, said in cases:
        with pytest.raises(kind, match=said), context_parallel(mesh, **given):  # type: ignore[arg-type]
            pass
    # On one rank alone, which says what; and other lengths on one.
    with (
        pytest.raises(
            ShapeError if is_odd else RankMismatchError, match="has no dim" if is_odd else "rank 1 was given"
        ),
        context_parallel(mesh, buffers=[x], buffer_seq_dims=[3 if is_odd else 1]),
    ):
        pass
    with (
        pytest.raises(RankMismatchError, match="their length is 6 on rank 0, 4 on rank 1"),
        context_parallel(mesh, buffers=[x[:, :4] if is_odd else x], buffer_seq_dims=[1]),
    ):
        pass
    with pytest.raises(MeshError, match=r"is a builtins\.int"), context_parallel(2):  # type: ignore[arg-type]
        pass
    with pytest.raises(DisttrainError, match="there is no method 'ring'"):
        set_rotate_method("ring")
    with pytest.raises(ShapeError, match=r"the ranks have \[3, .*\] positions"):
        context_parallel_unshard(mesh, [x[:, : 1 if is_odd else 3]], [1])
    disttrain.barrier()


def test_ranks_that_are_threads_leave_in_any_order() -> None:
    before = F.scaled_dot_product_attention
    x = torch.randn(1, 2, 6, 4, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(x, x, x, is_causal=True)

    def body() -> None:
        mesh, part = axis(), x.clone()
        for _ in range(3):
            with context_parallel(mesh, buffers=[part], buffer_seq_dims=[2]):
                attended = F.scaled_dot_product_attention(part, part, part, is_causal=True)
                torch.testing.assert_close(context_parallel_unshard(mesh, [attended], [2])[0], expected)
            torch.testing.assert_close(F.scaled_dot_product_attention(part, part, part, is_causal=True), expected)

    run_threads(3, body)
    assert F.scaled_dot_product_attention is before


def test_recorded_steps_tell_cuts_apart() -> None:
    """By a state that is alike for the same cut, and keeps no documents alive."""

    def body() -> None:
        mesh, ids = axis(), torch.arange(6) // 3
        documents = [Documents(ids), Documents(ids)]
        states = []
        for length, way, within in (
            *[(6, None, None)] * 2,
            *[(6, None, documents[0])] * 2,
            (6, None, documents[1]),
            (8, None, None),
            (6, "ring", None),
        ):
            with attending(mirrored(length, 2), mesh, way, within):
                states.append(state_of_block())
        assert state_of_block() is None
        assert states[0] == states[1]
        assert states[2] == states[3]
        assert len({*states}) == 5
        del documents, within
        assert states[2] != states[4]

    run_threads(2, body)


@on_ranks(2, 3)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_behind_the_block_computes_anew_across_ranks(reentrant: bool) -> None:
    mesh, x = axis(), torch.randn(1, 2, 7, 4, dtype=torch.float64, requires_grad=True)
    own, positions = x.detach().clone(), torch.arange(7)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    [expected] = torch.autograd.grad(attend(x).square().sum(), x)
    with context_parallel(mesh, buffers=[own, positions], buffer_seq_dims=[2, 0], no_restore_buffers={own, positions}):
        own.requires_grad_()
        attended = checkpoint(attend, own, use_reentrant=reentrant)
    attended.square().sum().backward()
    torch.testing.assert_close(own.grad, expected[:, :, positions])
    # What was checkpointed elsewhere stays as it was.
    [grad] = torch.autograd.grad(checkpoint(attend, x, use_reentrant=False).square().sum(), x)
    torch.testing.assert_close(grad, expected)


class Projected(nn.Module):
    """Attention as models write it, with a method of Tensor that is written in Python."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(x).split([16, 8, 8], -1))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return x + self.out(attended.transpose(1, 2).flatten(-2))


@on_ranks(2)
def test_compiled_blocks_that_are_checkpointed() -> None:
    mesh = axis()
    torch.manual_seed(0)
    torch._dynamo.reset()
    reference = nn.Sequential(Projected(), Projected()).double()
    model = copy.deepcopy(reference)
    compile_blocks(model, fullgraph=False, backend="aot_eager")
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    expected = reference(x)
    expected.square().sum().backward()
    part = x.clone()
    with context_parallel(mesh, buffers=[part], buffer_seq_dims=[1]):
        hidden = part.clone().requires_grad_()
        for block in model:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        hidden.square().sum().backward()
        [whole] = context_parallel_unshard(mesh, [hidden], [1])
    torch.testing.assert_close(whole, expected)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert parameter.grad is not None
        disttrain.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, other.grad)


@on_ranks(2)
def test_what_no_graph_holds_is_said() -> None:
    mesh, x = axis(), torch.randn(1, 2, 6, 16)
    block = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="eager", fullgraph=True)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        with pytest.raises(Unsupported, match=r"exchanges keys between graphs\. Give fullgraph=False"):
            block(x)
        with pytest.raises(Unsupported, match="flex_attention: its masks and scores are functions of places"):
            flex_attention(x, x, x)
    disttrain.barrier()


@on_ranks(2)
def test_our_own_calls_are_found_too() -> None:
    mesh = axis()
    x = torch.randn(1, 2, 9, 4, dtype=torch.float64)
    expected = attention(x, x, x, Causal())
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        torch.testing.assert_close(context_parallel_unshard(mesh, [attention(x, x, x, Causal())], [2])[0], expected)
