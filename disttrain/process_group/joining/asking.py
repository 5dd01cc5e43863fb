"""Asking the other members of a group to connect it; `joining/connecting.py` answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from disttrain.process_group.interfaces import GroupLike


def ask_to_connect(group: GroupLike, device_type: str) -> None:
    """Have the other members connect `group` for tensors on `device_type`. The first that asks speaks for all."""
    witness = group.world.witness
    if witness is not None:
        request = {
            "connect": group.group_name,
            "ranks": group.members.plain(),
            "backend": group.backend_name,
            "timeout_s": group.timeout_s,
            "device_type": device_type,
        }
        witness.tell(json.dumps(request).encode(), _name(group, device_type))


def ask_no_more(group: GroupLike, device_type: str) -> None:
    """`group` is connected, and so every member has come to that: where this one has asked, nobody need hear it now."""
    witness = group.world.witness
    if witness is not None:
        witness.settle(_name(group, device_type))


def _name(group: GroupLike, device_type: str) -> str:
    return f"connect/{group.group_name}/{device_type}"
