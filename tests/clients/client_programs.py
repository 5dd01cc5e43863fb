"""What libraries make of two ranks of torch's, and of two of disttrain's: arguments `NAME,... FOLDER`.

It loads the libraries, which takes seconds, and forks the four ranks. Prints lists of numbers, by name, of each rank 0.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable

import torch
from torch import nn

import disttrain

NUM_RANKS = 2


def rank_here() -> int:
    return int(os.environ["RANK"])


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
    gathered = accelerator.gather(torch.tensor([float(rank_here())])).tolist()
    return [*gathered, *(float(parameter.detach().sum()) for parameter in model.parameters())]


def metrics() -> list[float]:
    from torchmetrics import MeanMetric, MeanSquaredError

    mean, error = MeanMetric(), MeanSquaredError()
    mean.update(torch.tensor([rank_here() * 10.0, 1.0]))
    error.update(torch.tensor([1.0 + rank_here()]), torch.tensor([0.0]))
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
        parallel(torch.ones(1, 4) * (rank_here() + 1)).square().sum().backward()
        optimizer.step()
    return [float(parameter.detach().sum()) for parameter in trained]


def ddp() -> list[float]:
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for _ in range(2):
        model(torch.arange(8.0).view(2, 4) * (rank_here() + 1)).square().sum().backward()
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


FUNCTIONS: dict[Callable[[], list[float]], tuple[str, ...]] = {
    trainer: ("transformers.models.llama.modeling_llama", "transformers.trainer"),
    accelerated: ("accelerate",),
    metrics: ("torchmetrics",),
    loader: ("torchdata.stateful_dataloader.sampler",),
    adapters: ("peft",),
    ddp: (),
    sync_batch_norm: (),
}
"""With what they load."""


def run_rank(library: str, rank: int, functions: list[Callable[[], list[float]]], folder: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    )
    meeting = f"file://{folder}/{library}"
    if library == "torch":
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=NUM_RANKS)
    else:
        disttrain.init_process_group(init_method=meeting, rank=rank, world_size=NUM_RANKS)
    found = {}
    for function in functions:
        torch.manual_seed(0)
        found[function.__name__] = function()
    if rank == 0:
        print(json.dumps([library, found]), flush=True)
    (torch.distributed if library == "torch" else disttrain).destroy_process_group()


def main() -> None:
    warnings.simplefilter("ignore")
    names, folder = sys.argv[1].split(","), sys.argv[2]
    functions = [function for function in FUNCTIONS if function.__name__ in names]
    for function in functions:
        for module in FUNCTIONS[function]:
            importlib.import_module(module)
    pids = []
    for library in ("torch", "disttrain"):
        for rank in range(NUM_RANKS):
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    run_rank(library, rank, functions, folder)
                    code = 0
                except Exception:  # noqa: BLE001  -- told to whoever reads stderr
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
