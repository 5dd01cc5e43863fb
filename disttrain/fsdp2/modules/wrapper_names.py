"""Names that wrappers of other libraries give a model, and a sharded module has not: `fully_shard` wraps nothing.

Who asks for one is told what to write instead. It stays an AttributeError, for code that asks by `hasattr`.
"""

from __future__ import annotations

from typing import Final

_STATE = "model.state_dict() has DTensors, whose full_tensor() is the whole; checkpoint.get_model_state_dict gathers it"
_OPTIMIZER_STATE = "checkpoint.get_optimizer_state_dict and set_optimizer_state_dict do that"
_ENGINE = "it is of DeepSpeed's engine; write loss.backward() and optimizer.step(), which are torch's"

INSTEAD: Final[dict[str, str]] = {
    # DistributedDataParallel's
    "module": "write model itself, whose keys have no prefix `module.`",
    "require_backward_grad_sync": "enter model.no_sync(), or call model.set_requires_gradient_sync(False)",
    "join": "give all ranks the same number of batches: a step takes all of them",
    "join_hook": "give all ranks the same number of batches: a step takes all of them",
    "register_comm_hook": "give fully_shard mp_policy=MixedPrecisionPolicy(reduce_dtype=...), or call "
    "model.set_gradient_divide_factor",
    "find_unused_parameters": "leave it out: a rank without a gradient takes part with zeros",
    "reducer": "there is none: each sharded module reduces its gradients in backward",
    # FullyShardedDataParallel's
    "clip_grad_norm_": "call torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), whose norm is over all ranks",
    "summon_full_params": "call full_tensor() of a parameter, or model.unshard() before and model.reshard() after it",
    "state_dict_type": _STATE,
    "set_state_dict_type": _STATE,
    "get_state_dict_type": _STATE,
    **dict.fromkeys(
        (
            "optim_state_dict",
            "optim_state_dict_to_load",
            "full_optim_state_dict",
            "sharded_optim_state_dict",
            "shard_full_optim_state_dict",
            "scatter_full_optim_state_dict",
            "rekey_optim_state_dict",
        ),
        _OPTIMIZER_STATE,
    ),
    "fsdp_modules": "write [each for each in model.modules() if isinstance(each, FSDPModule)]",
    "check_is_root": "the outermost sharded module that is called is the root",
    "sharding_strategy": "fully_shard's mesh and reshard_after_forward say that",
    # DeepSpeed's
    "backward": _ENGINE,
    "step": _ENGINE,
    "gradient_accumulation_steps": "enter model.no_sync() for all but the last batch of a step",
    "is_gradient_accumulation_boundary": "enter model.no_sync() for all but the last batch of a step",
    "save_checkpoint": "call checkpoint.save, or use a Checkpointer",
    "load_checkpoint": "call checkpoint.load, or use a Checkpointer",
    "save_16bit_model": "call checkpoint.get_model_state_dict with StateDictOptions(full_state_dict=True), and cast it",
}


class WrapperNameError(AttributeError):
    """A sharded module was asked for what a wrapper of another library has."""


def instead_of(name: str, kind: str) -> WrapperNameError:
    """The answer for `name`, one of INSTEAD, of a module of class `kind`."""
    return WrapperNameError(f"{kind} has no {name!r}, since fully_shard wraps nothing: {INSTEAD[name]}.")
