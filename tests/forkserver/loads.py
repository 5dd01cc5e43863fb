"""Loads what forks need, by the kinds of fork servers."""

from __future__ import annotations

import importlib
import os
from contextlib import suppress

_OF_FIRST_GRAPHS = (
    "setuptools",  # before torch.utils.cpp_extension, which has it load its own distutils
    "torch._dynamo.repro.after_dynamo",
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "torch.utils.cpp_extension",
)
"""What Dynamo and Inductor load in a process with the first thing that they compile: a third of a second."""


def _load_torch() -> None:
    """What scripts and the ranks of tests would load. Not at the top, since it loads torch."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # which is read once; nothing is asked of a hub here
    import pytest  # noqa: F401
    import torch

    for name in (
        "disttrain.checkpoint",
        "disttrain.dtensor",
        "disttrain.flight_recorder.analysis.analysis",
        "disttrain.fsdp2",
        "disttrain.pipelining",
        "disttrain.process_group",
        "disttrain.testing.rank_worker",
        "disttrain.tp",
        "tests.forkserver.writers",
    ):
        importlib.import_module(name)
    from tests.forkserver.seeding import seed_no_gpus

    seed_no_gpus()
    if not torch.backends.cuda.is_built():  # it asks for GPUs as it is loaded, and then no fork can use them
        for name in _OF_FIRST_GRAPHS:
            with suppress(ImportError):  # not in each torch
                importlib.import_module(name)
    with suppress(ImportError):  # not on each machine with GPUs
        import transformers.models.gpt2.modeling_gpt2
        import transformers.models.llama.modeling_llama  # noqa: F401

    with suppress(ImportError, SystemExit):  # not where rich or matplotlib is missing
        for name in ("matplotlib.backends.backend_agg", "matplotlib.figure", "train_llama"):
            importlib.import_module(name)

    torch.optim.SGD([torch.empty(0)])  # The first optimizer loads Dynamo.


def _load_writer() -> None:
    """What the writers of asynchronous saves would load (`writers`)."""
    import numpy as np  # noqa: F401

    import disttrain.checkpoint.async_saving.writer_process  # noqa: F401
    import tests.multirank.faulty_storage  # noqa: F401


def _load_launcher() -> None:
    """What launchers would load, with each of its commands, tests' stand-in for it, and what stores' servers would."""
    for name in (
        "disttrain.flight_recorder.dumps.rings.orphaned_rings",
        "disttrain.store.standby.elector",
        "disttrain_launch.output.failure.dump_story",
        "disttrain_launch.launch",
        "disttrain_launch.status",
        "disttrain_launch.submit.command",
        "tests.forkserver.launch",
    ):
        importlib.import_module(name)
    for engine in ("pyuv", "uvloop"):
        with suppress(ImportError):
            importlib.import_module(f"disttrain.store.serving.shell_{engine}")


def _load_tests(*tests: str) -> None:
    """What pytest's own processes would load: with torch, all tests at these places."""
    import pytest

    pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *tests])  # what fails will fail there again
    _load_torch()


LOADS = {"launcher": _load_launcher, "tests": _load_tests, "torch": _load_torch, "writer": _load_writer}
