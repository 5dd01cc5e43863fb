"""A model with float8 linears learns as one in bf16: over many steps its losses differ by no more than noise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from llama.config import PRESETS
from llama.model import Llama

from disttrain.kernels import use_float8

NUM_STEPS = 120
STEPS_PER_POINT = 20


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are small; several threads wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def batch_of(step: int) -> torch.Tensor:
    """Numbers that count up by a step that the beginning tells."""
    begins = torch.randint(0, 256, (4, 1), generator=torch.Generator().manual_seed(step))
    return (begins + (begins % 5 + 1) * torch.arange(17)) % 256


def curve_of(model: Llama, num_steps: int = NUM_STEPS) -> torch.Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(num_steps):
        tokens = batch_of(step)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).view(-1, STEPS_PER_POINT).mean(1)


def fresh() -> Llama:
    torch.manual_seed(0)
    model = Llama(PRESETS["tiny"])
    model.init()
    return model


@pytest.fixture(scope="module")
def wished() -> torch.Tensor:
    """The curve of the model in bf16."""
    return curve_of(fresh())


@pytest.mark.parametrize(("recipe", "num_steps"), [("tensorwise", NUM_STEPS), ("rowwise", 60)])
def test_losses(recipe: str, num_steps: int, wished: torch.Tensor) -> None:
    model = fresh()
    assert use_float8(model, recipe, report=lambda _: None)
    found = curve_of(model, num_steps)
    assert wished[-1] < 0.6 * wished[0]
    torch.testing.assert_close(found, wished[: len(found)], rtol=0.05, atol=0.0)
