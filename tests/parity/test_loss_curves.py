"""The example's loss curve is that of plain torch, in one process, on the same batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import train_llama
from llama.config import config_named
from llama.model import Llama
from llama.tokens import read_tokens

from disttrain.data import Loader, Windows
from disttrain.testing import RankPool
from tests.cases.llama import SIZES, losses, trained, write_text

NUM_STEPS, BATCH_SIZE, LENGTH, SEED, HIGHEST_RATE = 12, 8, 32, 3, 0.01
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("curves") / "text")


@pytest.fixture(scope="module")
def curve_of_plain_torch(text: Path) -> list[float]:
    """No ranks, nothing sharded."""
    windows = Windows(read_tokens(str(text), "bytes", LENGTH).training, LENGTH, seed=SEED)
    batches = Loader(windows, BATCH_SIZE, replica=0, num_replicas=1, seed=SEED, endless=True)
    model = Llama(config_named(SIZES))
    model.init(SEED)
    matrices, gains = (
        [one for one in model.parameters() if (one.ndim > 1) == is_matrix] for is_matrix in (True, False)
    )
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    curve = []
    for step, batch in zip(range(NUM_STEPS), batches, strict=False):
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = train_llama.learning_rate(step, NUM_STEPS, HIGHEST_RATE)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    assert curve[-1] < curve[0] - 1.5
    return curve


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("num_ranks", "flags"), [(1, ()), (2, ()), (4, ("--mesh", "pp=2,tp=2", "--microbatches", "2"))]
)
def test_ranks_follow_plain_torch(
    rank_pool: RankPool,
    text: Path,
    tmp_path: Path,
    curve_of_plain_torch: list[float],
    num_ranks: int,
    flags: tuple[str],
) -> None:
    own = {"model": SIZES, "data": text, "steps": NUM_STEPS, "batch": BATCH_SIZE, "seq": LENGTH, "seed": SEED}
    own |= {"lr": HIGHEST_RATE, "out": tmp_path, "sample": 0, "save-every": 0, "dtype": "fp32"}
    arguments = [f"--{name}={value}" for name, value in own.items()]
    rank_pool.run(num_ranks, trained, {"arguments": [*arguments, *flags]})
    torch.testing.assert_close(
        torch.tensor(losses(tmp_path)["loss"]), torch.tensor(curve_of_plain_torch), rtol=0, atol=TOLERANCE
    )
