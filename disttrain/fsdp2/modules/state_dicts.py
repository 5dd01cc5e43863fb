"""Saves the shards of a module, whatever it computes with at the moment."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from disttrain.fsdp2.modules.parameter_swap import Substitutes
from disttrain.fsdp2.params.param_group import ParamGroup


class _Shards:
    """Lets a module have the shards of `groups` while its state dict is made."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._groups = groups
        self._is_shown_later: list[tuple[ParamGroup, Substitutes]] = []
        """The parameters that the module has meanwhile, and those of them that it has for one call only."""

    def __getstate__(self) -> dict[str, object]:
        """The state of a deep copy."""
        return {"_groups": self._groups, "_is_shown_later": []}

    def before(self, *_: object) -> None:
        self._is_shown_later = [(group, group.shown.substitutes) for group in self._groups if group.shown.is_whole]
        for group, _lent in self._is_shown_later:
            group.hide()
        # Before the first gather, parameters may have other memory; the dict must share the memory that is trained.
        for group in self._groups:
            group.lay_out()

    def after(self, *_: object) -> None:
        for group, values in self._is_shown_later:
            group.show()
            group.shown.substitute_again(values)
        self._is_shown_later = []


def show_shards_in_state_dicts(module: nn.Module, groups: Sequence[ParamGroup]) -> None:
    """Have `module` save shards. To be called once."""
    shards = _Shards(groups)
    module.register_state_dict_pre_hook(shards.before)
    # torch sets an attribute of the hook, which a method cannot have.
    module.register_state_dict_post_hook(partial(shards.after))
