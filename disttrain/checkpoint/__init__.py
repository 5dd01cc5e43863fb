"""Checkpoints: a state saved by any number of ranks, whole or not at all, and loaded by any other number.

A state is a dict, to any depth, of tensors, DTensors, modules, plain values and objects with a state of their own
(`Stateful`). `docs/checkpoints.md` says how to use it, `docs/checkpoint_format.md` what lies on the disk.

    checkpointer = Checkpointer("runs/lm")
    state = {**training_state(model, optimizer), "rng": RngState(), "step": step}
    checkpointer.save(step, state)
    ...
    state = {**training_state(model, optimizer), "rng": RngState(), "step": 0}
    checkpointer.load(state)
    set_training_state(model, optimizer, state)

The command `python -m disttrain.checkpoint` does without torch where it can: each name below is fetched from its module
when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from disttrain.lazy_names import lazily

if TYPE_CHECKING:
    from disttrain.checkpoint.async_saving.pending import PendingSave as PendingSave
    from disttrain.checkpoint.calls.async_saves import async_save as async_save
    from disttrain.checkpoint.calls.format_utils import dcp_to_torch_save as dcp_to_torch_save
    from disttrain.checkpoint.calls.format_utils import torch_save_to_dcp as torch_save_to_dcp
    from disttrain.checkpoint.calls.loads import load as load
    from disttrain.checkpoint.calls.older import CheckpointException as CheckpointException
    from disttrain.checkpoint.calls.older import load_state_dict as load_state_dict
    from disttrain.checkpoint.calls.older import save_state_dict as save_state_dict
    from disttrain.checkpoint.calls.planners import DefaultLoadPlanner as DefaultLoadPlanner
    from disttrain.checkpoint.calls.planners import DefaultSavePlanner as DefaultSavePlanner
    from disttrain.checkpoint.calls.planners import DynamicMetaLoadPlanner as DynamicMetaLoadPlanner
    from disttrain.checkpoint.calls.saves import save as save
    from disttrain.checkpoint.calls.stagers import AsyncCheckpointerType as AsyncCheckpointerType
    from disttrain.checkpoint.calls.stagers import AsyncSaveResponse as AsyncSaveResponse
    from disttrain.checkpoint.calls.stagers import DefaultStager as DefaultStager
    from disttrain.checkpoint.calls.stagers import StagingOptions as StagingOptions
    from disttrain.checkpoint.calls.writers import BroadcastingTorchSaveReader as BroadcastingTorchSaveReader
    from disttrain.checkpoint.calls.writers import FileSystemReader as FileSystemReader
    from disttrain.checkpoint.calls.writers import FileSystemWriter as FileSystemWriter
    from disttrain.checkpoint.calls.writers import FsspecReader as FsspecReader
    from disttrain.checkpoint.calls.writers import FsspecWriter as FsspecWriter
    from disttrain.checkpoint.calls.writers import HuggingFaceStorageReader as HuggingFaceStorageReader
    from disttrain.checkpoint.calls.writers import HuggingFaceStorageWriter as HuggingFaceStorageWriter
    from disttrain.checkpoint.checkpointer import Checkpointer as Checkpointer
    from disttrain.checkpoint.loading.fits import LoadReport as LoadReport
    from disttrain.checkpoint.loading.whole import load_full as load_full
    from disttrain.checkpoint.memory.peer_memory import PeerMemory as PeerMemory
    from disttrain.checkpoint.state.rng import RngState as RngState
    from disttrain.checkpoint.state.rng import rng_state as rng_state
    from disttrain.checkpoint.state.rng import set_rng_state as set_rng_state
    from disttrain.checkpoint.state.training import set_training_state as set_training_state
    from disttrain.checkpoint.state.training import training_state as training_state
    from disttrain.checkpoint.state_dict import StateDictOptions as StateDictOptions
    from disttrain.checkpoint.state_dict import get_model_state_dict as get_model_state_dict
    from disttrain.checkpoint.state_dict import get_optimizer_state_dict as get_optimizer_state_dict
    from disttrain.checkpoint.state_dict import get_state_dict as get_state_dict
    from disttrain.checkpoint.state_dict import set_model_state_dict as set_model_state_dict
    from disttrain.checkpoint.state_dict import set_optimizer_state_dict as set_optimizer_state_dict
    from disttrain.checkpoint.state_dict import set_state_dict as set_state_dict
    from disttrain.checkpoint.stateful import PerRank as PerRank
    from disttrain.checkpoint.stateful import Stateful as Stateful
    from disttrain.checkpoint.stateful import Unfilled as Unfilled
    from disttrain.checkpoint.stateful import Value as Value
    from disttrain.checkpoint.storage.base import LocalStorage as LocalStorage
    from disttrain.checkpoint.storage.base import Storage as Storage

__getattr__, __dir__, __all__ = lazily(__name__)
