"""Attained rates of GPUs and their links: data sheets' peaks times the shares that real steps attain.

The shares are those of four H200 under our benchmarks (`benchmarks/results`: kernels, collectives_gpu, pipeline_gpu),
and are taken for the other GPUs' too, which nobody has measured here; but products on A100 attain what makes the
estimates fit 15 runs of FSDP on 8 to 64 of them that others have published: llm-foundry's (scripts/train/benchmarking,
MPT of 3B to 70B) and torchtitan's (docs/performance.md of 2024, Llama 2 and 3). `--measure` measures yours.
Sources: NVIDIA's data sheets of A100, H100, H200 and B200 (dense rates, without sparsity; NVLink per direction); of
H800, an H100 with less NVLink, "Insights into DeepSeek-V3" (arXiv:2505.09343) says 400 GB/s in both directions; for
hops of a ring the latencies of NVLink (LL128) and of a network (Simple) in NCCL's model, src/graph/tuning.cc.
"""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from disttrain.doctor.links import Links
from disttrain.errors import SettingError

_OPERATION = "plan --hardware"
_MAY_BE_ZERO = ("float8_flops", "node_latency_s", "network_latency_s", "node_step_s", "network_step_s")


@dataclass(frozen=True)
class Hardware:
    """Rates that are attained, per GPU.

    Args: memory_gib  of a GPU;  peak_flops  the data sheet's in bfloat16, for utilization only;  matmul_flops,
          float8_flops  of large products (0: none in float8);  attention_forward_flops, attention_backward_flops  of
          causal attention, whose unneeded half is not counted;  memory_bytes_per_s  of a copy, reads and writes
          counted;  node_bytes_per_s  what one GPU sends in a ring within a node;  network_bytes_per_s  out of it, for
          each GPU;  node_latency_s, network_latency_s  of a message, or of a collective of two ranks, however small;
          node_step_s, network_step_s  what each further hop of a collective adds;  num_multiprocessors  of a GPU.
    """

    name: str
    memory_gib: float
    peak_flops: float
    matmul_flops: float
    float8_flops: float
    attention_forward_flops: float
    attention_backward_flops: float
    memory_bytes_per_s: float
    node_bytes_per_s: float
    network_bytes_per_s: float
    node_latency_s: float = 25e-6
    network_latency_s: float = 40e-6
    node_step_s: float = 1.9e-6
    network_step_s: float = 9.6e-6
    num_multiprocessors: int = 132

    def __post_init__(self) -> None:
        for rate in fields(self)[1:]:
            value = getattr(self, rate.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            may_be_zero = rate.name in _MAY_BE_ZERO
            if not is_number or value < 0 or (value == 0 and not may_be_zero):
                raise SettingError(_OPERATION, f"{rate.name} is {value!r}.", "Give a number above 0, in the SI unit.")

    def with_changes(self, **changes: float | None) -> Hardware:
        """The same with what is not None."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]

    def with_links(self, links: Links) -> Hardware:
        """The same with the network that `disttrain-launch doctor --links` has measured."""
        return replace(
            self,
            name=f"{self.name} (measured links)",
            network_bytes_per_s=min(links.bytes_per_s, self.node_bytes_per_s),
            network_latency_s=links.latency_s,
            network_step_s=links.step_s,
        )


def _attained(
    name: str,
    memory_gib: float,
    tflops: float,
    float8_tflops: float,
    memory_gb: float,
    node_gb: float,
    network_gb: float,
    num_multiprocessors: int,
    matmul_share: float = 0.70,
) -> Hardware:
    """By data sheet: TFLOP/s, and GB/s per direction."""
    return Hardware(
        name=name,
        memory_gib=memory_gib,
        peak_flops=tflops * 1e12,
        matmul_flops=matmul_share * tflops * 1e12,
        float8_flops=0.60 * float8_tflops * 1e12,
        attention_forward_flops=0.38 * tflops * 1e12,
        attention_backward_flops=0.31 * tflops * 1e12,
        memory_bytes_per_s=0.85 * memory_gb * 1e9,
        node_bytes_per_s=0.71 * node_gb * 1e9,
        network_bytes_per_s=0.85 * network_gb * 1e9,
        num_multiprocessors=num_multiprocessors,
    )


HARDWARE = {
    "a100": _attained("NVIDIA A100 SXM 80GB", 79.2, 312, 0, 2039, 300, 25, 108, matmul_share=0.73),
    "a100-40": _attained("NVIDIA A100 SXM 40GB", 39.4, 312, 0, 1555, 300, 25, 108, matmul_share=0.73),
    "h100": _attained("NVIDIA H100 SXM", 79.2, 989, 1979, 3350, 450, 50, 132),
    "h200": _attained("NVIDIA H200 SXM", 139.8, 989, 1979, 4800, 450, 50, 132),
    "h800": _attained("NVIDIA H800 SXM", 79.2, 989, 1979, 3350, 200, 50, 132),
    "b200": _attained("NVIDIA B200 SXM", 178.4, 2250, 4500, 8000, 900, 50, 148),
}


def read_hardware(name_or_path: str) -> Hardware:
    """One of `HARDWARE`, or a JSON file as `--measure` writes it. Raises: SettingError when it is neither."""
    if name_or_path.lower() in HARDWARE:
        return HARDWARE[name_or_path.lower()]
    names = ", ".join(HARDWARE)
    if not name_or_path.endswith(".json"):
        close = difflib.get_close_matches(name_or_path.lower(), HARDWARE, 1)
        hint = f"Did you mean {close[0]}? " if close else ""
        problem = f"There is no hardware {name_or_path!r}."
        raise SettingError(_OPERATION, problem, f"{hint}There are {names}, or a JSON file that --measure has written.")
    try:
        return Hardware(**json.loads(Path(name_or_path).read_text(encoding="utf-8")))
    except OSError as error:
        raise SettingError(_OPERATION, f"{name_or_path}: {error.strerror}.", f"Or give one of {names}.") from None
    except (ValueError, TypeError) as error:
        if isinstance(error, SettingError):
            raise
        problem = f"{name_or_path} does not hold hardware: {error}."
        raise SettingError(_OPERATION, problem, "Write one by --measure FILE.") from None


def to_json(hardware: Hardware) -> str:
    return json.dumps(asdict(hardware), indent=1) + "\n"
