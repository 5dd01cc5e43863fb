"""Every public name of torch.distributed.tensor.parallel is here too, with its arguments, or the page of
differences says why not."""

from __future__ import annotations

import inspect

from disttrain import tp
from tests.pages.differences import missing_arguments, names_alone, names_explained, parameters, public_names

THEIRS = "torch.distributed.tensor.parallel"
MODULES = ("", ".api", ".ddp", ".fsdp", ".input_reshard", ".loss", ".style")


def test_each_name_and_argument_is_here_or_explained() -> None:
    # Here, since all collect this file; the module below of this name cannot be imported before it.
    from torch.distributed import fsdp  # noqa: F401

    names = public_names(THEIRS, MODULES)
    both = {name: theirs for name, theirs in names.items() if hasattr(tp, name)}
    missing = names.keys() - both.keys()
    for name, theirs in both.items():
        missing |= missing_arguments(name, theirs, getattr(tp, name), _alike)
    explained = names_explained("Names of torch.distributed.tensor.parallel")
    assert len(both) == 9
    assert sorted(missing - explained) == []
    # What has come since is taken off the list.
    assert sorted(explained - missing) == []


def test_what_is_here_alone_is_on_the_page() -> None:
    names = public_names(THEIRS, MODULES)
    alone = set(tp.__all__) - names.keys()
    both = [name for name in tp.__all__ if name not in alone and inspect.isclass(getattr(tp, name))]
    for name in both:
        alone |= parameters(getattr(tp, name)).keys() - parameters(names[name]).keys()
    assert sorted(alone - names_alone("Tensor parallel")) == []


def _alike(theirs: inspect.Parameter, ours: inspect.Parameter) -> bool:
    return (theirs.default, theirs.kind) == (ours.default, ours.kind)
