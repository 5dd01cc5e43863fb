"""Requests from a training process to its writer: one save, whose data lie ready in shared memory. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disttrain.checkpoint.format.image import Image
from disttrain.checkpoint.saving.alike import Group
from disttrain.checkpoint.saving.commit import Contents, Target
from disttrain.checkpoint.saving.copies_compared import Replicas

SHARED_MEMORY, SAVE, FAIL, END = "shared_memory", "save", "fail", "end"
"""Kinds of requests: shared memory is attached; save what is in it; a save failed before it began; no more saves."""

BYTES, KEPT, DIFFER, COMMITTED, DROPPED, FAILED = "bytes", "kept", "differ", "committed", "dropped", "failed"
"""Kinds of replies: bytes written so far; result of the copies in memory; plain tensors that differ; how a save has
ended."""


@dataclass(frozen=True)
class Job:
    """One save.

    `digest` is equal on ranks that go by the same plan; `contents` is there on rank 0; `image` is None on a rank that
    has nothing to write; `keep`: how many of a Checkpointer's saves stay; `storage`: how to make it, see
    `Portable.recipe`; `shared`: the plain values that other ranks have as well; `copies`: likewise plain tensors, but
    for those of which the plan knows that they differ.
    """

    number: int
    target: Target
    keep: int | None
    digest: bytes
    shared_memory: int
    image: Image | None
    contents: Contents | None
    storage: tuple[str, dict[str, Any]]
    shared: Sequence[Group] = ()
    copies: Sequence[Replicas] = ()

    def to_plain(self) -> list[Any]:
        return [
            self.number, str(self.target.path), self.target.save_id, self.target.claim, self.target.overwrites,
            self.target.is_marked, self.keep, self.digest,
            self.shared_memory, None if self.image is None else self.image.to_plain(),
            None if self.contents is None else self.contents.to_plain(), list(self.storage),
            [list(group) for group in self.shared], [list(group) for group in self.copies],
        ]  # fmt: skip

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Job:
        number, path, save_id, claim, overwrites, is_marked, keep, digest, shared_memory, image, contents, *rest = plain
        (name, arguments), shared, copies = rest
        return cls(
            number,
            Target(Path(path), save_id, claim, overwrites, is_marked),
            keep,
            digest,
            shared_memory,
            None if image is None else Image.from_plain(image),
            None if contents is None else Contents.from_plain(contents),
            (name, arguments),
            [Group(*group) for group in shared],
            [Replicas(*group) for group in copies],
        )
