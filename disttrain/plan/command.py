"""The command line that runs a plan: our launcher, and examples/train_llama.py."""

from __future__ import annotations

import shlex
from pathlib import Path

from disttrain.plan.job import Choice, Job
from disttrain.plan.model.named import BYTES, preset_named
from disttrain.plan.model.sizes import LlamaSizes

SCRIPT = Path("examples/train_llama.py")
"""Where `python -m disttrain.examples examples` puts it, and the repository has it."""
TOKENIZER = "tokenizer.json"


def unsaid(job: Job) -> list[str]:
    """Returns the properties of a choice that the example has no flag for."""
    return lacks(job.sizes) + ["--float8"] * job.uses_float8 + ["--precision bf16"] * (not job.precision.is_sharded)


def lacks(sizes: LlamaSizes) -> list[str]:
    """Returns the properties of a model that the example's has not."""
    heads = ["latent attention"] if sizes.latent is not None else ["head_dim"] * (sizes.query_size != sizes.dim)
    heads += ["biases and gains of heads"] * (sizes.extra_elements > 0)
    return heads + ["first blocks without experts"] * (sizes.num_dense > 0)


def steps_to_run(job: Job, choice: Choice, model: str) -> list[str]:
    """The command, and what it needs that need not be there yet."""
    command = command_of(job, choice, model)
    copying = [] if SCRIPT.is_file() else [f"python -m disttrain.examples {SCRIPT.parent}"]
    needs_tokenizer = TOKENIZER in shlex.split(command) and not Path(TOKENIZER).is_file()
    note = f"({TOKENIZER} is the model's own, as Hugging Face has it; {SCRIPT.parent}/README.md tells of --data)"
    return [*copying, command, *[note] * needs_tokenizer]


def command_of(job: Job, choice: Choice, model: str) -> str:
    """Args: model  as it was given: a TOML file is the example's configuration, a folder is Hugging Face's."""
    mesh = choice.mesh
    num_nodes = -(-mesh.num_gpus // job.node_size)
    words = ["disttrain-launch"]
    if num_nodes == 1:
        words += ["--standalone", "--nproc-per-node", str(mesh.num_gpus)]
    else:
        words += ["--nnodes", str(num_nodes), "--nproc-per-node", str(job.node_size), "--rdzv-endpoint", "HOST0:29500"]
    words.append(str(SCRIPT))
    path = Path(model)
    if path.suffix == ".toml":
        words += ["--config", model]
    elif path.name == "config.json" or path.is_dir():
        folder = path if path.is_dir() else path.parent
        words += ["--model", str(folder)]
        if (folder / "tokenizer.json").is_file():
            words += ["--tokenizer", str(folder)]
    else:
        words += ["--model", job.sizes.spelled if preset_named(model) is None else model]
        # Without a tokenizer the example reads bytes.
        words += ["--tokenizer", TOKENIZER] * (job.sizes.vocab_size != BYTES)
    words += ["--mesh", str(mesh), "--batch", str(job.num_sequences), "--seq", str(job.seq_size)]
    words += ["--microbatches", str(choice.num_microbatches)]
    if choice.schedule is not None:
        words += ["--schedule", choice.schedule]
        words += ["--stages-per-rank", str(choice.stages_per_rank)] if choice.stages_per_rank else []
    words += ["--dtype", "bf16"] + ["--capture", "off"] * (not job.captures)
    for name, is_on in (
        ("kernels", job.has_kernels),
        ("recompute", choice.recomputes),
        ("compile", choice.is_compiled),
        ("reduce-each", choice.reduces_each),
    ):
        # A configuration may say the contrary.
        words += [f"--{name}"] if is_on else [f"--no-{name}"] * (path.suffix == ".toml")
    return shlex.join(words)
