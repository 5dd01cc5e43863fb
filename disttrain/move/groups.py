"""Groups of ours that a file gives to torch's DistributedDataParallel, whose C++ takes torch's own class alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from disttrain.move.edits import Edit, Text

WRAPPER = "disttrain.to_torch"
_DDP = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")
_POSITION = 5


def edits_of(call: ast.Call, callee: str, text: Text) -> Iterator[Edit]:
    """So that the group goes through `to_torch`; of a mesh it is its only group. None where no group is given."""
    if callee not in _DDP:
        return
    for keyword in call.keywords:
        if keyword.arg in ("process_group", "device_mesh") and _may_be_ours(keyword.value):
            start, end = text.place(keyword.lineno, keyword.col_offset), text.span(keyword.value)[1]
            of_mesh = ".get_group()" if keyword.arg == "device_mesh" else ""
            before = text.text[start : text.span(keyword.value)[0]].replace("device_mesh", "process_group")
            yield Edit(start, text.span(keyword.value)[0], f"{before}{WRAPPER}(")
            yield Edit(end, end, f"{of_mesh})")
    if len(call.args) > _POSITION and _may_be_ours(call.args[_POSITION]):
        start, end = text.span(call.args[_POSITION])
        yield Edit(start, start, f"{WRAPPER}(")
        yield Edit(end, end, ")")


def _may_be_ours(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant | ast.Starred):
        return False
    return not (isinstance(value, ast.Call) and ast.unparse(value.func).endswith("to_torch"))
