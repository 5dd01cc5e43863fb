"""torch's `planner=`. The only option with an effect here is which names a load may leave alone.

Source: torch/distributed/checkpoint/default_planner.py.
"""

from __future__ import annotations

from disttrain.errors import CheckpointError


class DefaultSavePlanner:
    """Takes the arguments of torch's planner of saves. Here each save is planned alike: replicated tensors are written
    once, by ranks that share the bytes, and plans are kept; so its arguments change nothing."""

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
    ) -> None:
        if not flatten_state_dict:
            raise CheckpointError(
                "DefaultSavePlanner",
                "flatten_state_dict=False keeps dicts of tensors as pickles.",
                "Leave it out: dicts are taken apart, and put together by a load.",
            )


class DefaultLoadPlanner:
    """Takes the arguments of torch's planner of loads.

    Args: allow_partial_load  whether what the save lacks stays as it is, in place of an error.
    """

    def __init__(
        self, flatten_state_dict: bool = True, flatten_sharded_tensors: bool = True, allow_partial_load: bool = False
    ) -> None:
        self.allow_partial_load = allow_partial_load


DynamicMetaLoadPlanner = DefaultLoadPlanner
"""torch's planner for loading a file of torch.save; a `BroadcastingTorchSaveReader` needs none."""


def check_save_planner(operation: str, planner: object) -> None:
    """Raises CheckpointError for a planner that decides something."""
    if planner is not None and not _is(planner, DefaultSavePlanner):
        raise CheckpointError(operation, f"planner= is a {type(planner).__name__}, which is not asked.", _LEAVE_OUT)


def allows_partial_load(operation: str, planner: object) -> bool:
    """True if a planner lets names be missing from the save. Raises CheckpointError for one that decides more."""
    if planner is None:
        return False
    if not _is(planner, DefaultLoadPlanner):
        raise CheckpointError(
            operation,
            f"planner= is a {type(planner).__name__}, which is not asked.",
            "Leave it out, or give a DefaultLoadPlanner; allow=, rename= and convert= say what may differ.",
        )
    return bool(vars(planner).get("allow_partial_load", False))


_LEAVE_OUT = "Leave it out, or give a DefaultSavePlanner."


def _is(planner: object, kind: type) -> bool:
    """True for an object of that class, or of torch's class of that name; one derived from these is not."""
    planner_type = type(planner)
    is_torchs = (
        planner_type.__name__ == kind.__name__
        and planner_type.__module__ == "torch.distributed.checkpoint.default_planner"
    )
    return planner_type is kind or is_torchs
