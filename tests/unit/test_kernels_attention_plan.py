"""Which implementations serve a call, which blocks FlexAttention skips, and what is kept of measured choices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask

from disttrain.kernels import Causal, Documents, Prefix, SlidingWindow, attention
from disttrain.kernels.attention import choice as attention_choice
from disttrain.kernels.attention.choice import AttentionChoice, attention_choices
from disttrain.kernels.attention.flex import _KEPT, _NUM_KEPT, block_masks, flex, prepare
from disttrain.kernels.attention.plan import Call, Machine, candidates, serving
from disttrain.kernels.attention.rules import BLOCK_SIZE, name_of, seen, window_of
from disttrain.kernels.attention.runs import indices_of
from tests.cases.attention import NAMES, rule_called, tensors, wished

HOPPER = Machine("cuda", 90, has_triton=True, is_deterministic=False)
AMPERE = HOPPER._replace(capability=80)
CPU = Machine("cpu", 0, has_triton=True, is_deterministic=False)
CALL = Call(torch.bfloat16, 1, 32, 8, 4096, 4096, 128, 128, (-1, 0), has_changes=False, needs_grad=True)


def test_causal_attention_of_a_llama() -> None:
    assert candidates(HOPPER, CALL) == ("cudnn", "flash", "efficient")
    assert serving(HOPPER, CALL) == ("cudnn", "flash", "efficient", "flex")
    assert candidates(AMPERE, CALL) == ("flash", "efficient")
    assert candidates(HOPPER._replace(is_deterministic=True), CALL) == ("flash",)
    assert candidates(CPU, CALL) == ("sdpa",)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"window": (1023, 0)}, ("flash", "flex")),
        ({"window": None}, ("flex",)),
        ({"has_changes": True}, ("flex",)),
        ({"num_queries": 7}, ("efficient",)),
        ({"num_queries": 7, "window": (-1, -1)}, ("cudnn", "flash", "efficient")),
        ({"num_queries": 1, "num_keys": 1}, ("flash", "efficient")),
        ({"head_dim": 256, "value_dim": 256}, ("flash", "efficient")),
        ({"value_dim": 64}, ("efficient",)),
        ({"dtype": torch.float32}, ("efficient",)),
        ({"dtype": torch.float64}, ("dense",)),
        ({"head_dim": 8, "value_dim": 8, "has_changes": True}, ("dense",)),
        ({"batch_size": 0}, ("dense",)),
    ],
    ids=str,
)
def test_other_calls(change: dict[str, Any], wanted: tuple[str, ...]) -> None:
    assert candidates(HOPPER, CALL._replace(**change)) == wanted


def test_without_triton_what_needs_it_is_dense() -> None:
    assert candidates(HOPPER._replace(has_triton=False), CALL._replace(window=None)) == ("dense",)
    assert candidates(CPU, CALL._replace(has_changes=True)) == ("dense",)


def test_windows_of_rules() -> None:
    assert window_of(None) == (-1, -1)
    assert window_of(Causal()) == (-1, 0)
    assert window_of(SlidingWindow(8)) == (7, 7)
    assert window_of(Causal() & SlidingWindow(8) & SlidingWindow(4)) == (3, 0)
    assert window_of(Causal() & Prefix(torch.tensor([1]))) is None
    assert name_of(Causal() & SlidingWindow(8) & Documents(torch.zeros(2))) == "Causal & SlidingWindow 8 & Documents"


@given(st.integers(1, 600), st.sampled_from(NAMES))
def test_blocks_tell_what_places_do(length: int, name: str) -> None:
    """No block is skipped of which something is seen, none is whole of which something is not; here, none in vain."""
    rule = rule_called(name, 2, 1, length)
    some, every = block_masks(rule, length, length, torch.device("cpu"))
    is_seen = seen(rule, indices_of((2, 1, length, length), torch.device("cpu")))
    is_seen = torch.ones(()).bool() if is_seen is None else is_seen
    is_seen = is_seen.expand(2, 1, length, length)
    rest = -length % BLOCK_SIZE
    parts = F.pad(is_seen, (0, rest, 0, rest)).unflatten(-1, (-1, BLOCK_SIZE)).unflatten(-3, (-1, BLOCK_SIZE))
    parts = parts.transpose(-2, -3).flatten(-2)
    assert torch.equal(parts.any(-1), some.expand_as(parts[..., 0])) or (
        name == "all" and (parts.any(-1) <= some).all()
    )
    assert torch.equal(parts.all(-1), every.expand_as(parts[..., 0]))


def test_ids_in_any_order_are_taken_as_they_are() -> None:
    ids = torch.randint(0, 3, (1, 300), generator=torch.Generator().manual_seed(0))
    some, every = block_masks(Documents(ids), 300, 300, torch.device("cpu"))
    assert some.all()
    assert not every.any()


def test_flex_within_a_graph() -> None:
    """Forward: on CPUs it has no other. A second length makes a graph for all."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda rule, *own: flex(*own, rule, None), fullgraph=True, backend="aot_eager")
    for length in (200, 300, 400):
        rule = rule_called("all", 2, 4, length)
        inputs = [one.float() for one in tensors(2, (4, 2), length, 16)]
        torch.testing.assert_close(compiled(rule, *inputs), wished(rule)(*inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_as_torch_makes_them(name: str) -> None:
    rule = rule_called(name, 2, 1, 300)
    blocks = prepare(rule, torch.zeros(2, 1, 300, 4), 300).blocks
    if blocks is None:
        assert name in ("none", "cap")
        return
    some, _ = block_masks(rule, 300, 300, torch.device("cpu"))
    assert torch.equal(blocks.to_dense().bool(), some)
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    wanted = BlockMask.from_kv_blocks(*(getattr(blocks, one) for one in names), seq_lengths=(300, 300))
    for one in ("q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(blocks, one), getattr(wanted, one))
    for numbers, one in (("q_num_blocks", "q_indices"), ("full_q_num_blocks", "full_q_indices")):
        is_used = torch.arange(3) < getattr(wanted, numbers)[..., None]
        assert torch.equal(getattr(blocks, one)[is_used], getattr(wanted, one)[is_used])


def test_blocks_are_kept_for_the_next_layer_and_bounded() -> None:
    query = torch.zeros(1, 1, 50, 4)
    rule = Causal() & SlidingWindow(9)
    first = _KEPT.prepared(rule, query, 50)
    assert _KEPT.prepared(Causal() & SlidingWindow(9), query, 50) is first
    documents = Documents(torch.zeros(50))
    own = _KEPT.prepared(documents, query, 50)
    assert _KEPT.prepared(documents, query, 50) is own
    assert _KEPT.prepared(Documents(documents.ids), query, 50) is not own
    for size in range(_NUM_KEPT):
        _KEPT.prepared(SlidingWindow(size + 1), query, 50)
    assert _KEPT.prepared(rule, query, 50) is not first


def test_a_shape_is_measured_once_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock of our own, and two implementations that a CPU has."""
    asked: list[tuple[str, ...]] = []

    def measure(names: tuple[str, ...], *_: object) -> dict[str, float]:
        asked.append(names)
        return {name: 1e-3 * (1 + (name == "sdpa")) for name in names}

    monkeypatch.setattr(attention_choice, "candidates", lambda machine, call: ("sdpa", "dense"))
    monkeypatch.setattr(attention_choice, "measure", measure)
    monkeypatch.setattr(attention_choice, "_CHOICES", attention_choice._Choices())
    inputs = tensors(1, (2, 1), 6, 4)
    attention(*inputs)
    assert not asked  # a CPU's are not timed
    monkeypatch.setattr(attention_choice, "_may_measure", lambda tensors: True)
    for _ in range(2):
        attention(*inputs, Causal())
    assert asked == [("sdpa", "dense")]
    (choice,) = attention_choices()
    assert isinstance(choice, AttentionChoice)
    assert str(choice) == ("Causal, 1 x 2/1 heads of 4, 6 x 6, float64, forward: dense (sdpa 2.000 ms, dense 1.000 ms)")
    attention(*(one.requires_grad_() for one in inputs), Causal())
    assert len(asked) == 2
    # What may not be measured goes by what was, of the same kind.
    monkeypatch.setattr(attention_choice, "_may_measure", lambda tensors: False)
    call = attention_choices()[0].call._replace(num_queries=9)
    assert attention_choice.chosen(call, (inputs[0], inputs[1], inputs[2]), Causal(), None) == "dense"
    assert attention_choice.chosen(call, (inputs[0], inputs[1], inputs[2]), None, None) == "sdpa"


def test_what_fails_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "candidates", lambda machine, call: ("sdpa", "dense"))
    monkeypatch.setattr(attention_choice, "_may_measure", lambda tensors: True)
    monkeypatch.setattr(attention_choice, "_CHOICES", attention_choice._Choices())
    monkeypatch.setattr(attention_choice, "measure", lambda *_: {"dense": 1.0})
    attention(*tensors(1, (2, 1), 6, 4))
    assert attention_choices()[0].name == "dense"


def test_a_graph_goes_by_what_calls_of_its_kind_were_measured_to_be_served_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "candidates", lambda machine, call: ("sdpa", "dense"))
    monkeypatch.setattr(attention_choice, "_CHOICES", attention_choice._Choices())
    codes: list[str] = []

    def keep(graph: Any, inputs: Any) -> Any:
        codes.append(graph.code)
        return graph

    inputs = [one.bfloat16() for one in tensors(1, (2, 1), 6, 4)]
    for name in ("sdpa", "dense"):
        torch._dynamo.reset()
        torch.compile(lambda *own: attention(*own, Causal()), backend=keep, fullgraph=True)(*inputs)
        assert ("scaled_dot_product_attention" in codes[-1]) == (name == "sdpa")
        call = CALL._replace(dtype=torch.bfloat16, needs_grad=False)
        attention_choice._CHOICES.add(AttentionChoice(call, "Causal", "dense", ()))
