"""Options of state dicts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StateDictOptions:
    """Options of the functions for state dicts, as torch's class of that name.

    full_state_dict               whole tensors instead of DTensors, on every rank
    cpu_offload                   tensors on the CPU; with full_state_dict rank 0 alone gets them, the others `{}`
    ignore_frozen_params          leave out parameters that need no gradient
    keep_submodule_prefixes       with `submodules=`: names begin at the model, not at the submodule
    strict                        what is missing or unexpected at a load is an error
    broadcast_from_rank0          rank 0 has whole tensors and hands them to all others, whose dicts may be empty; needs
                                  full_state_dict
    flatten_optimizer_state_dict  an optimizer's state as one dict, `state.NAME.exp_avg` and `param_groups.NAME.lr`: it
                                  can be put together of pipeline stages
    dsd_fqn_modifiers             the method by which a module says which of its children its keys leave out
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    dsd_fqn_modifiers: str = "_fqn_modifiers"
