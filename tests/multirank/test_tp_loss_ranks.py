"""The vocabulary-parallel loss over Gloo: compiled, within a model's step, and refused by one rank alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import disttrain
from disttrain.dtensor import CommDebugMode, Replicate, Shard, distribute_tensor
from disttrain.errors import BackendError, ShapeError
from disttrain.pieces import piece
from disttrain.testing.pytest_plugin import on_ranks
from disttrain.tp.loss.context import loss_parallel
from disttrain.tp.loss.vocab_parallel import vocab_parallel_cross_entropy
from tests.cases.shardings import mesh_of, normal

TARGET = torch.tensor([0, 3, -100, 6, 2])
WEIGHT = normal(7, seed=3).square().float()
WANTED = normal(5, 7, seed=1).softmax(1).float()


def part(whole: torch.Tensor) -> torch.Tensor:
    size, first = piece(whole.shape[-1], disttrain.get_world_size(), disttrain.get_rank())
    return whole.narrow(-1, first, size)


ALL_TERMS: dict[str, Any] = {"weight": WEIGHT, "label_smoothing": 0.2, "z_loss": 0.1}
CASES: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
    "plain": (TARGET, {}),
    "all terms": (TARGET, ALL_TERMS),
    "probabilities": (WANTED, ALL_TERMS),
}


@pytest.mark.sweep(1)
@on_ranks(2, timeout_s=360)
@pytest.mark.parametrize(
    ("name", "backend"), [("plain", "aot_eager"), ("all terms", "inductor"), ("probabilities", "aot_eager")]
)
def test_compiled_steps_from_hidden_states_to_gradients(name: str, backend: str) -> None:
    torch._dynamo.reset()
    target, options = CASES[name]
    dtype = torch.float32 if name == "plain" else torch.bfloat16

    def step(hidden: torch.Tensor, head: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_cross_entropy(hidden @ head, target, vocab_size=7, **options)

    hidden, head = normal(5, 4).to(dtype), part(normal(4, 7, seed=1)).to(dtype).contiguous()
    results = []
    for run in (step, torch.compile(step, backend=backend, fullgraph=True)):
        own = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
        with CommDebugMode() as comms:
            loss = run(*own, target)
            loss.backward()
        assert comms.get_comm_counts() == {"all_gather_into_tensor": 1}
        results.append([loss, *[each.grad for each in own]])
    tolerance = {} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 2e-2}
    torch.testing.assert_close(results[1], results[0], **tolerance)


@on_ranks(2, timeout_s=360)
def test_compiled_steps_of_dtensors() -> None:
    mesh = mesh_of((2,))
    torch._dynamo.reset()
    target = distribute_tensor(TARGET, mesh, [Replicate()])

    def step(logits: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_cross_entropy(logits * 2, target, z_loss=0.1)

    def in_context(logits: torch.Tensor) -> torch.Tensor:
        with loss_parallel():
            return F.cross_entropy(logits * 2, target)

    # What Inductor makes of the loss is tested above.
    for function in (step, in_context):
        results = []
        for run in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
            logits = distribute_tensor(normal(5, 7).float(), mesh, [Shard(1)]).detach().requires_grad_()
            with CommDebugMode() as comms:
                loss = run(logits)
                loss.backward()
            assert comms.get_comm_counts() == {"all_gather_into_tensor": 1}
            results.append([loss.to_local(), logits.grad.to_local()])
        torch.testing.assert_close(results[1], results[0])


@on_ranks(2)
def test_what_one_rank_refuses_the_other_does_not_wait_for() -> None:
    logits = normal(3, 4)
    if disttrain.get_rank():
        with pytest.raises(ShapeError, match="of shape"):
            vocab_parallel_cross_entropy(logits, TARGET, vocab_size=8)
    else:
        with pytest.raises(BackendError, match="rank 1 refused vocab_parallel_cross_entropy: target has shape"):
            vocab_parallel_cross_entropy(logits, TARGET[:3].abs() % 8, vocab_size=8)


@on_ranks(2)
def test_a_wrong_target_in_one_part_of_the_batch() -> None:
    mesh = mesh_of((2, 1))
    logits = distribute_tensor(normal(4, 7), mesh, [Shard(0), Shard(1)])
    if disttrain.get_rank():
        with pytest.raises(IndexError, match="there are 7 classes"):
            vocab_parallel_cross_entropy(logits, torch.tensor([1, 7]))
    else:
        with pytest.raises(BackendError, match="rank 1 refused vocab_parallel_cross_entropy: IndexError"):
            vocab_parallel_cross_entropy(logits, torch.tensor([1, 6]))
