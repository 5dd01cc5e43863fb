"""Cut modules compute what whole ones do, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from disttrain.dtensor import Replicate, Shard
from disttrain.tp import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from tests.cases.tensor_parallel import (
    Block,
    Decoder,
    GatedMLP,
    block_plan,
    decoder_plan,
    gathered,
    same_as_alone,
    scattered,
)

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS = [1, 2, 3, 4]


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("hidden", [12, 7, 2])
def test_a_pair_of_layers_needs_no_sequence(num_ranks: int, hidden: int) -> None:
    plan = lambda: {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}  # noqa: E731
    same_as_alone(lambda: GatedMLP(6, hidden), plan, torch.randn(2, 3, 6), num_ranks)
    same_as_alone(lambda: GatedMLP(6, hidden), plan, torch.randn(5, 6), num_ranks)
    same_as_alone(lambda: GatedMLP(6, hidden), plan, torch.randn(6), num_ranks)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("sequence_dim", [0, 1])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_pair_of_layers_on_parts_of_the_sequence(
    num_ranks: int, sequence_dim: int, shared: bool, overlap: bool
) -> None:
    cut = Shard(sequence_dim)

    def plan() -> dict[str, object]:
        come = None if shared else cut
        found: dict[str, object] = {
            "gate": ColwiseParallel(input_layouts=come, overlap=overlap),
            "up": ColwiseParallel(input_layouts=come, overlap=overlap),
            "down": RowwiseParallel(output_layouts=cut, overlap=overlap),
        }
        if shared:
            found[""] = PrepareModuleInput(input_layouts=cut, desired_input_layouts=Replicate())
        return found

    x = torch.randn(12, 2, 6) if sequence_dim == 0 else torch.randn(2, 12, 6)
    enter, leave = scattered(sequence_dim), gathered(sequence_dim)
    for hidden in (10, 3):
        same_as_alone(lambda hidden=hidden: GatedMLP(6, hidden), plan, x, num_ranks, enter=enter, leave=leave)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_block_whose_ranks_share_heads(num_ranks: int, sequence: bool) -> None:
    ends = {"enter": scattered(1), "leave": gathered(1)} if sequence else {}
    same_as_alone(Block, lambda: block_plan(2, sequence=sequence), torch.randn(2, 8, 8), num_ranks, **ends)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder(num_ranks: int, sequence: bool, tied: bool) -> None:
    tokens = torch.randint(0, 16, (2, 8))
    same_as_alone(lambda: Decoder(tied=tied), lambda: decoder_plan(2, sequence=sequence), tokens, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("size", [12, 7])
def test_activations_may_be_dtensors(num_ranks: int, size: int) -> None:
    """Uneven sequences as well: a DTensor says what its parts are parts of."""

    def plan() -> dict[str, object]:
        return {
            "0": SequenceParallel(),
            "1": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            "4": SequenceParallel(),
        }

    def enter(x: torch.Tensor, mesh: object) -> torch.Tensor:
        from disttrain.dtensor import DTensor

        return DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(1)])

    def make() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6), nn.RMSNorm(6))

    same_as_alone(make, plan, torch.randn(2, size, 6), num_ranks, enter=enter, leave=gathered(1))


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("make", "style", "x"),
    [
        (lambda: nn.Embedding(7, 5), ColwiseParallel(output_layouts=Replicate()), torch.randint(0, 7, (3, 4))),
        (lambda: nn.Embedding(7, 5), RowwiseParallel(), torch.randint(0, 7, (3, 4))),
        (lambda: nn.Embedding(7, 5, padding_idx=3), RowwiseParallel(), torch.randint(0, 7, (3, 4))),
        (lambda: nn.Conv1d(4, 5, 3), ColwiseParallel(output_layouts=Replicate()), torch.randn(2, 4, 9)),
        (lambda: nn.Conv2d(4, 5, 3, padding=1), ColwiseParallel(output_layouts=Replicate()), torch.randn(2, 4, 6, 5)),
        (lambda: nn.Conv2d(5, 3, 3), RowwiseParallel(input_layouts=Replicate()), torch.randn(2, 5, 6, 5)),
        (lambda: nn.Linear(6, 5), ColwiseParallel(output_layouts=Replicate()), torch.randn(3, 4, 6)),
        (lambda: nn.Linear(6, 5), RowwiseParallel(input_layouts=Replicate()), torch.randn(3, 4, 6)),
    ],
)
def test_layers_alone(num_ranks: int, make: Callable[[], nn.Module], style: object, x: torch.Tensor) -> None:
    same_as_alone(make, lambda: style, x, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_one_layer_of_several_blocks(num_ranks: int) -> None:
    """As query, key and value in one matrix: each rank has its share of each."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.Linear(6, 3 * 6)
            self.out = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.all(x).chunk(3, dim=-1)
            return self.out(q * k.sigmoid() + v)

    plan = lambda: {"all": ColwiseParallel(num_blocks=3), "out": RowwiseParallel()}  # noqa: E731
    same_as_alone(Fused, plan, torch.randn(4, 6), num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_uneven_columns_come_plain(num_ranks: int) -> None:
    """A layer knows how many inputs there are in all."""
    for plan in (
        lambda: ColwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate()),
        RowwiseParallel,
    ):
        same_as_alone(lambda: nn.Linear(7, 5), plan, torch.randn(3, 4, 7), num_ranks, enter=scattered(2))
