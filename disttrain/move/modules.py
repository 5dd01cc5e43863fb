"""Torch's modules, and what is in place of each: one of ours, torch's own as it is, or a person's decision."""

from __future__ import annotations

from disttrain.move.findings import Reason

MODULES = {
    "torch.distributed": "disttrain",
    "torch.distributed._composable.fsdp": "disttrain.fsdp2",
    "torch.distributed._composable.fsdp.fully_shard": "disttrain.fsdp2",
    "torch.distributed._functional_collectives": "disttrain.process_group.functional",
    "torch.distributed._tensor": "disttrain.dtensor",
    "torch.distributed._tensor.api": "disttrain.dtensor",
    "torch.distributed._tensor.device_mesh": "disttrain",
    "torch.distributed._tensor.placement_types": "disttrain.dtensor",
    "torch.distributed.checkpoint": "disttrain.checkpoint",
    "torch.distributed.checkpoint._fsspec_filesystem": "disttrain.checkpoint",
    "torch.distributed.checkpoint.api": "disttrain.checkpoint",
    "torch.distributed.checkpoint.default_planner": "disttrain.checkpoint",
    "torch.distributed.checkpoint.filesystem": "disttrain.checkpoint",
    "torch.distributed.checkpoint.format_utils": "disttrain.checkpoint",
    "torch.distributed.checkpoint.hf_storage": "disttrain.checkpoint",
    "torch.distributed.checkpoint.metadata": "disttrain.checkpoint",
    "torch.distributed.checkpoint.planner": "disttrain.checkpoint",
    "torch.distributed.checkpoint.quantized_hf_storage": "disttrain.checkpoint",
    "torch.distributed.checkpoint.staging": "disttrain.checkpoint",
    "torch.distributed.checkpoint.state_dict": "disttrain.checkpoint",
    "torch.distributed.checkpoint.state_dict_loader": "disttrain.checkpoint",
    "torch.distributed.checkpoint.state_dict_saver": "disttrain.checkpoint",
    "torch.distributed.checkpoint.stateful": "disttrain.checkpoint",
    "torch.distributed.checkpoint.storage": "disttrain.checkpoint",
    "torch.distributed.constants": "disttrain",
    "torch.distributed.device_mesh": "disttrain",
    "torch.distributed.distributed_c10d": "disttrain",
    "torch.distributed.fsdp": "disttrain.fsdp2",
    "torch.distributed.fsdp._fully_shard": "disttrain.fsdp2",
    "torch.distributed.fsdp._fully_shard._fsdp_api": "disttrain.fsdp2",
    "torch.distributed.fsdp._fully_shard._fsdp_init": "disttrain.fsdp2",
    "torch.distributed.fsdp._fully_shard._fully_shard": "disttrain.fsdp2",
    "torch.distributed.fsdp.api": "disttrain.fsdp2",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "disttrain.fsdp2",
    "torch.distributed.pipelining": "disttrain.pipelining",
    "torch.distributed.pipelining._IR": "disttrain.pipelining",
    "torch.distributed.pipelining.microbatch": "disttrain.pipelining",
    "torch.distributed.pipelining.schedules": "disttrain.pipelining",
    "torch.distributed.pipelining.stage": "disttrain.pipelining",
    "torch.distributed.rendezvous": "disttrain",
    "torch.distributed.tensor": "disttrain.dtensor",
    "torch.distributed.tensor._api": "disttrain.dtensor",
    "torch.distributed.tensor._dtensor_spec": "disttrain.dtensor",
    "torch.distributed.tensor.debug": "disttrain.dtensor",
    "torch.distributed.tensor.debug._comm_mode": "disttrain.dtensor",
    "torch.distributed.tensor.debug._visualize_sharding": "disttrain.dtensor",
    "torch.distributed.tensor.device_mesh": "disttrain",
    "torch.distributed.tensor.experimental": "disttrain.dtensor",
    "torch.distributed.tensor.experimental._attention": "disttrain.context_parallel",
    "torch.distributed.tensor.experimental._context_parallel": "disttrain.context_parallel",
    "torch.distributed.tensor.experimental._context_parallel._attention": "disttrain.context_parallel",
    "torch.distributed.tensor.experimental._func_map": "disttrain.dtensor",
    "torch.distributed.tensor.experimental._register_sharding": "disttrain.dtensor",
    "torch.distributed.tensor.parallel": "disttrain.tp",
    "torch.distributed.tensor.parallel.api": "disttrain.tp",
    "torch.distributed.tensor.parallel.ddp": "disttrain.tp",
    "torch.distributed.tensor.parallel.fsdp": "disttrain.tp",
    "torch.distributed.tensor.parallel.input_reshard": "disttrain.tp",
    "torch.distributed.tensor.parallel.loss": "disttrain.tp",
    "torch.distributed.tensor.parallel.style": "disttrain.tp",
    "torch.distributed.tensor.placement_types": "disttrain.dtensor",
}
"""And ours, whose names are theirs."""

STAYS = (
    "torch.distributed._composable.checkpoint_activation",
    "torch.distributed._composable.contract",
    "torch.distributed._composable.replicate",
    "torch.distributed._tools",
    "torch.distributed.algorithms",
    "torch.distributed.checkpoint._nested_dict",
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.nn",
    "torch.distributed.optim",
)
"""They know nothing of process groups, or run on those that are registered with torch, and work as they are."""

ELSEWHERE = {"torch.distributed.tensor.experimental.context_parallel": "disttrain.context_parallel"}
"""Names that are in another package of ours than their module's."""

STAYING_NAMES = frozenset(("torch.distributed.checkpoint.state_dict._init_optim_state",))
"""Of modules that move, the names that need not: they ask nothing of groups, and know DTensors of ours."""

_MOVING = "docs/moving_over.md"
_ELASTIC = Reason("disttrain-launch starts workers, and keeps what they fail of", "docs/launching.md")
LEFT = {
    "torch.distributed._local_tensor": Reason("Ranks as threads: disttrain.testing.run_threads", "docs/testing.md"),
    "torch.distributed._mesh_layout": Reason("disttrain.mesh.MeshLayout, which is not alike", "docs/mesh.md"),
    "torch.distributed._symmetric_memory": Reason(
        "What it is used for, tensor parallel does", "docs/tensor_parallel.md"
    ),
    "torch.distributed.checkpoint._consolidate_hf_safetensors": Reason(
        "HuggingFaceStorageWriter writes whole tensors at once", "docs/differences.md#checkpoints"
    ),
    "torch.distributed.elastic": _ELASTIC,
    "torch.distributed.flight_recorder": Reason("The recorder is on in every job", "docs/flight_recorder.md"),
    "torch.distributed.fsdp.sharded_grad_scaler": Reason(
        "For FSDP1; torch.amp.GradScaler takes DTensors", "docs/fsdp2.md"
    ),
    "torch.distributed.fsdp.wrap": Reason("For FSDP1; fully_shard is called for each block", "docs/fsdp2.md"),
    "torch.distributed.launch": _ELASTIC,
    "torch.distributed.launcher": _ELASTIC,
    "torch.distributed.rpc": Reason("There are no remote calls here", _MOVING),
    "torch.distributed.run": _ELASTIC,
    "torch.distributed.tensor._random": Reason(
        "Random values are those of a single process with the same seed", "docs/differences.md#dtensor"
    ),
}
"""Modules without one of ours, all below them too, unless these stand above."""

PAGES = {
    "disttrain": "docs/differences.md#names-of-torchdistributed-that-are-not-here",
    "disttrain.dtensor": "docs/differences.md#names-of-torchdistributedtensor-that-are-not-here",
    "disttrain.context_parallel": "docs/differences.md#context-parallel",
    "disttrain.fsdp2": "docs/differences.md#names-of-torchdistributedfsdp-that-are-not-here",
    "disttrain.tp": "docs/differences.md#names-of-torchdistributedtensorparallel-that-are-not-here",
    "disttrain.pipelining": "docs/differences.md#names-of-torchdistributedpipelining-that-are-not-here",
    "disttrain.checkpoint": "docs/differences.md#names-of-torchdistributedcheckpoint-that-are-not-here",
    "disttrain.process_group.functional": "docs/collectives.md",
}
"""The modules of ours that name what they lack."""
