"""The example's loss curve on several ranks is that of one process of plain torch on the same batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import train_lm
from lm.model import PRESETS, Llama
from lm.ranks import mean_over_ranks, own_rows
from lm.text import Text

from disttrain.checkpoint import Checkpointer, get_state_dict, set_state_dict
from disttrain.testing import RankPool

CPU = torch.device("cpu")
NUM_STEPS = 20
TOLERANCE = 1e-5
SEED = 3


def batches(steps: range) -> list[torch.Tensor]:
    """The global batches, of a text that nobody edits."""
    data = torch.tensor(list(" ".join(str(number * number) for number in range(5000)).encode()), dtype=torch.uint8)
    text = Text("square numbers", 1, data, data[:1000], b"")
    return [text.batch(step, seed=SEED, batch_size=8, seq_size=32) for step in steps]


def rate(step: int) -> float:
    return train_lm.learning_rate(step, NUM_STEPS, 0.003)


def dense_model() -> Llama:
    model = Llama(PRESETS["tiny"])
    torch.manual_seed(SEED)
    model.init()
    return model


@pytest.fixture(scope="module")
def curve_of_one_process() -> list[float]:
    """Torch alone: no ranks, nothing sharded."""
    model = dense_model()
    optimizer = train_lm.make_optimizer(model)
    losses = [
        train_lm.train_step(model, optimizer, batch, rate(step)).item()
        for step, batch in enumerate(batches(range(NUM_STEPS)))
    ]
    assert losses[-1] < losses[0] - 1.5
    return losses


def train(model: Llama, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """On a rank: losses of these steps, averaged over all ranks."""
    return [
        mean_over_ranks(train_lm.train_step(model, optimizer, own_rows(batch), rate(step)))
        for step, batch in zip(steps, batches(steps), strict=True)
    ]


def sharded_model(*, is_meta_init: bool = True, seed: int = SEED) -> Llama:
    if is_meta_init:
        return train_lm.make_model("tiny", seed=seed, device=CPU, dtype=torch.float32)
    return train_lm.shard(dense_model(), device=CPU, dtype=torch.float32)


def whole_run(is_meta_init: bool) -> list[float]:
    """Rank task."""
    model = sharded_model(is_meta_init=is_meta_init)
    return train(model, train_lm.make_optimizer(model), range(NUM_STEPS))


def first_half(folder: str) -> list[float]:
    """Rank task: train and save."""
    model = sharded_model()
    optimizer = train_lm.make_optimizer(model)
    losses = train(model, optimizer, range(NUM_STEPS // 2))
    Checkpointer(folder).save(NUM_STEPS // 2, get_state_dict(model, optimizer))
    return losses


def second_half(folder: str) -> list[float]:
    """Rank task: go on from the save, in a model that was drawn from another seed."""
    model = sharded_model(seed=SEED + 1)
    optimizer = train_lm.make_optimizer(model)
    state = get_state_dict(model, optimizer)
    first_step = Checkpointer(folder).load(state)
    set_state_dict(model, optimizer, state)
    return train(model, optimizer, range(first_step, NUM_STEPS))


def assert_same_curve(by_rank: list[list[float]], expected: list[float]) -> None:
    for losses in by_rank:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("is_meta_init", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_follow_a_single_process(
    rank_pool: RankPool, curve_of_one_process: list[float], num_ranks: int, is_meta_init: bool
) -> None:
    assert_same_curve(rank_pool.run(num_ranks, whole_run, {"is_meta_init": is_meta_init}), curve_of_one_process)


@pytest.mark.parametrize(("num_ranks", "num_ranks_later"), [(2, 4), (4, 1)])
def test_a_run_goes_on_with_other_ranks(
    rank_pool: RankPool, tmp_path: Path, curve_of_one_process: list[float], num_ranks: int, num_ranks_later: int
) -> None:
    arguments = {"folder": str(tmp_path)}
    half = NUM_STEPS // 2
    assert_same_curve(rank_pool.run(num_ranks, first_half, arguments), curve_of_one_process[:half])
    assert_same_curve(rank_pool.run(num_ranks_later, second_half, arguments), curve_of_one_process[half:])
