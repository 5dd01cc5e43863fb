"""Write disttrain/absent_names.txt anew, from the tables of docs/differences.md: `python tools/absent_names.py`.

A line is a package of ours, a name of torch's that is not there, and the reason, with tabs between. Methods are there
too, as `DTensor.method`, and arguments, as `function(argument)`: what moves programs over tells of them.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "differences.md"
WRITTEN = ROOT / "disttrain" / "absent_names.txt"
PARTS = {
    "torch.distributed": "disttrain",
    "torch.distributed.tensor": "disttrain.dtensor",
    "torch.distributed.tensor.experimental._attention": "disttrain.context_parallel",
    "torch.distributed.fsdp": "disttrain.fsdp2",
    "torch.distributed.tensor.parallel": "disttrain.tp",
    "torch.distributed.pipelining": "disttrain.pipelining",
    "torch.distributed.checkpoint": "disttrain.checkpoint",
}


def lines() -> list[str]:
    """What the file holds, in the page's order."""
    page = PAGE.read_text(encoding="utf-8")
    found = []
    for theirs, ours in PARTS.items():
        section = page.partition(f"## Names of {theirs} that are not here\n")[2].partition("\n## ")[0]
        for row in (line for line in section.splitlines() if line.startswith("| `")):
            _, names, reason, _ = re.split(r"(?<!\\)\|", row)
            plain = re.sub(r" ?\(\[[^]]*\]\([^)]*\)\)", "", reason).strip().rstrip(".").replace("`", "")
            found += [f"{ours}\t{name}\t{plain}" for name in re.findall(r"`([\w.]+(?:\(\w+\))?)`", names)]
    return found


if __name__ == "__main__":
    WRITTEN.write_text("".join(f"{line}\n" for line in lines()), encoding="utf-8")
