"""What libraries make of a job of two ranks that disttrain, or torch, has begun: arguments `torch|disttrain NAME,...`.

Rank 0 prints lists of numbers, by name.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings

import torch
from torch import nn

warnings.simplefilter("ignore")
if sys.argv[1] == "torch":
    import torch.distributed as dist

    dist.init_process_group("gloo")
else:
    import disttrain as dist  # type: ignore[no-redef]

    dist.init_process_group()
RANK = dist.get_rank()


def trainer() -> list[float]:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    rows = torch.randint(0, 16, (8, 6), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=2,
        max_steps=2,
        learning_rate=0.1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )
    Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows]).train()
    return [arguments.world_size, *(float(parameter.detach().double().sum()) for parameter in model.parameters())]


def accelerated() -> list[float]:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.arange(32.0).view(8, 4) / 32)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
    for (batch,) in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    gathered = accelerator.gather(torch.tensor([float(RANK)])).tolist()
    return [*gathered, *(float(parameter.detach().sum()) for parameter in model.parameters())]


def metrics() -> list[float]:
    from torchmetrics import MeanMetric, MeanSquaredError

    mean, error = MeanMetric(), MeanSquaredError()
    mean.update(torch.tensor([RANK * 10.0, 1.0]))
    error.update(torch.tensor([1.0 + RANK]), torch.tensor([0.0]))
    return [float(mean.compute()), float(error.compute())]


def loader() -> list[float]:
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    data = list(range(12))

    def made() -> StatefulDataLoader:
        return StatefulDataLoader(data, batch_size=2, sampler=StatefulDistributedSampler(data, shuffle=False))

    first, second = made(), made()
    batches = iter(first)
    next(batches)
    second.load_state_dict(first.state_dict())
    return [float(next(iter(second)).sum()), float(next(batches).sum()), len(DistributedSampler(data))]


def adapters() -> list[float]:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), LoraConfig(r=2, target_modules=["0"]))
    parallel = nn.parallel.DistributedDataParallel(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        parallel(torch.ones(1, 4) * (RANK + 1)).square().sum().backward()
        optimizer.step()
    return [float(parameter.detach().sum()) for parameter in trained]


def ddp() -> list[float]:
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for _ in range(2):
        model(torch.arange(8.0).view(2, 4) * (RANK + 1)).square().sum().backward()
    gradients = [float(parameter.grad.sum()) for parameter in model.parameters()]
    return [*gradients, *(float(buffer.double().sum()) for buffer in model.buffers())]


def sync_batch_norm() -> list[float]:
    """It is for GPUs alone, and says so where it finds a group."""
    torch.distributed.barrier()
    try:
        nn.SyncBatchNorm(2)(torch.ones(4, 2))
    except ValueError as error:
        return [float("expected input tensor to be on" in str(error))]
    return [-1.0]


FUNCTIONS = (trainer, accelerated, metrics, loader, adapters, ddp, sync_batch_norm)
found = {}
for function in FUNCTIONS:
    if function.__name__ in sys.argv[2].split(","):
        torch.manual_seed(0)
        found[function.__name__] = function()
if RANK == 0:
    print("found", json.dumps(found))
dist.destroy_process_group()
