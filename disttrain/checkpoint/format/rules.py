"""Checks that a manifest describes each element of its tensors exactly once. Torch-free.

A checksum says that a manifest is as it was written, not that it is consistent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.manifest import Chunk, Manifest, SavedFile, SavedTensor, TensorEntry

_OF_ONE_BYTE = (
    "bits1x8 bits2x4 bits4x2 bits8 bool float4_e2m1fn_x2 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu int1 int2 int3 int4 int5 int6 int7 int8 qint8 quint2x4 quint4x2 quint8 uint1 uint2 uint3 uint4 "
    "uint5 uint6 uint7 uint8"
)
ITEM_BYTES = {
    **dict.fromkeys(_OF_ONE_BYTE.split(), 1),
    **dict.fromkeys(["bfloat16", "bits16", "float16", "int16", "uint16"], 2),
    **dict.fromkeys(["complex32", "float32", "int32", "qint32", "uint32"], 4),
    **dict.fromkeys(["complex64", "float64", "int64", "uint64"], 8),
    "complex128": 16,
}
"""The sizes of torch's dtypes. Newer dtypes are checked at the load, by a torch that has them."""

_MOST_BYTES = 1 << 63
"""A tensor of so many is none of torch's."""

_MOST_DIMS = 64
_MOST_BLOCK_BYTES = 1 << 30


def contradictions(manifest: Manifest) -> Iterator[str]:
    """A sentence for each rule that is broken, without its full stop."""
    yield from _of_whole(manifest)
    yield from _of_names(manifest)
    yield from _of_files(manifest)
    for name, tensor in manifest.tensors.items():
        yield from _of_tensor(name, tensor, manifest.block_bytes)


def _of_whole(manifest: Manifest) -> Iterator[str]:
    if not 0 < manifest.block_bytes <= _MOST_BLOCK_BYTES:
        yield f"its blocks have {manifest.block_bytes} bytes"


def _of_names(manifest: Manifest) -> Iterator[str]:
    kinds = (manifest.tensors, manifest.same_as, manifest.values, manifest.per_rank)
    seen: set[str] = set()
    for name in (name for kind in kinds for name in kind):
        if name in seen:
            yield f"{name!r} is there twice"
        seen.add(name)
    for name in (*seen, *manifest.files):
        if not is_text(name):
            yield f"{name!r} is no text"
    for name, first in manifest.same_as.items():
        if first not in manifest.tensors:
            yield f"{name!r} is the same as {first!r}, which is no tensor"
    for name, by_rank in manifest.per_rank.items():
        if not by_rank:
            yield f"{name!r} is a value per rank of no rank"


def is_text(name: str) -> bool:
    """True if the name can be encoded in UTF-8: half of a surrogate pair cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _of_files(manifest: Manifest) -> Iterator[str]:
    block_bytes = max(manifest.block_bytes, 1)
    for name, file in manifest.files.items():
        if file.header_bytes > file.num_bytes:
            yield f"the header of {name} has {file.header_bytes} of its {file.num_bytes} bytes"
        if len(file.header_checksums) != 8 * -(-file.header_bytes // block_bytes):
            yield f"the header of {name} has {len(file.header_checksums)} bytes of checksums"
    rows = sorted(
        (chunk.file, chunk.offset, chunk.num_bytes, len(chunk.checksums)) for _, chunk in listed_chunks(manifest)
    )
    for name, of_file in itertools.groupby(rows, key=itemgetter(0)):
        if name not in manifest.files:
            yield f"there is a chunk in {name!r}, which is no file of it"
        else:
            yield from of_file_rows(name, manifest.files[name], of_file, block_bytes)


def of_file_rows(
    name: str, file: SavedFile, rows: Iterable[tuple[str, int, int, int]], block_bytes: int
) -> Iterator[str]:
    """Tells the fault of chunks of a file, in its order: (file, offset, bytes, bytes of checksums)."""
    end = file.header_bytes
    for _, offset, num_bytes, num_checksum_bytes in rows:
        if offset < end:
            yield f"the chunk at {offset} of {name} begins within what is before it"
        end = offset + num_bytes
        if end > file.num_bytes:
            yield f"the chunk at {offset} of {name} goes beyond the end"
        if num_checksum_bytes != 8 * -(-num_bytes // block_bytes):
            yield f"the chunk at {offset} of {name} has {num_checksum_bytes} bytes of checksums"


def listed_chunks(manifest: Manifest) -> Iterator[tuple[str, Chunk]]:
    """The chunks that the manifest lists, with the names of what they are part of."""
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks if isinstance(tensor, SavedTensor) else ():
            yield name, chunk
    yield from manifest.values.items()
    for name, by_rank in manifest.per_rank.items():
        for chunk in by_rank.values() if isinstance(by_rank, dict) else ():
            yield name, chunk


def _of_tensor(name: str, tensor: TensorEntry, block_bytes: int) -> Iterator[str]:
    item_bytes = ITEM_BYTES.get(tensor.dtype)
    shape = tensor.shape
    if not can_be_a_shape(shape, item_bytes or 1):
        yield f"no tensor has the shape {_short(shape)} of {name!r}"
        return
    if item_bytes is not None and block_bytes % item_bytes:
        yield f"blocks of {block_bytes} bytes cut elements of {name!r}"
    if isinstance(tensor, SavedTensor):  # what is in tables is checked as it is read
        yield from of_all_chunks(name, tensor)


def of_all_chunks(name: str, tensor: TensorEntry) -> Iterator[str]:
    """Tells the fault where these are all chunks of a tensor."""
    shape, chunks, boxes = tensor.shape, tensor.chunks, tensor.boxes
    are_parts = _are_cut_along_a_dim(shape, boxes)
    problem = next(of_chunks(name, shape, tensor.dtype, chunks, are_within=are_parts), None)
    if problem is not None:
        yield problem
        return
    if are_parts:
        return
    num_elements = sum(box.num_elements for box in boxes)
    if num_elements != math.prod(shape):
        yield f"{name!r} has chunks for {num_elements} of its {math.prod(shape)} elements"
    elif len(boxes) > 1 and have_overlap([box for box in boxes if box.num_elements]):
        yield f"{name!r} has chunks that lie over each other"


def of_chunks(
    name: str, shape: tuple[int, ...], dtype: str, chunks: Iterable[Chunk], *, are_within: bool = False
) -> Iterator[str]:
    """Tells the fault of some of a tensor's chunks, each for itself."""
    item_bytes = ITEM_BYTES.get(dtype)
    for chunk in chunks:
        if not are_within and not _is_within(shape, chunk.box):
            yield f"{name!r} has a chunk of {_short(chunk.box.shape)} at {_short(chunk.box.origin)}, not in it"
        if item_bytes is not None and chunk.num_bytes != chunk.box.num_elements * item_bytes:
            yield f"{name!r} has a chunk of {chunk.box.num_elements} elements in {chunk.num_bytes} bytes"


def can_be_a_shape(shape: Sequence[int], item_bytes: int) -> bool:
    """True if a tensor of torch can have these sizes, which are not negative."""
    return len(shape) <= _MOST_DIMS and math.prod(max(size, 1) for size in shape) * item_bytes < _MOST_BYTES


def _are_cut_along_a_dim(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """True if the boxes, in this order, are the whole, one after the other along one dim: most tensors' are."""
    if not boxes or len(boxes[0].shape) != len(shape):
        return False
    dim = next((dim for dim, size in enumerate(shape) if boxes[0].shape[dim] != size), 0)
    before, after = shape[:dim], shape[dim + 1 :]
    nothing_before, nothing_after = (0,) * len(before), (0,) * len(after)
    end = 0
    for box in boxes:
        size = box.shape[dim : dim + 1]
        if box.shape != before + size + after or box.origin != (*nothing_before, *(end,) * len(size), *nothing_after):
            return False
        end += sum(size)
    return end == shape[dim] if shape else len(boxes) == 1


def _is_within(shape: tuple[int, ...], box: Box) -> bool:
    if not len(shape) == len(box.origin) == len(box.shape):
        return False
    return all(start + size <= whole for start, size, whole in zip(box.origin, box.shape, shape, strict=True))


def have_overlap(boxes: Sequence[Box]) -> bool:
    """True if any two boxes have an element in common. None of them is empty.

    Goes along the dim with the most cuts, and compares a box with those that have not ended there.
    """
    num_dims = len(boxes[0].shape) if boxes else 0
    if not num_dims:
        return len(boxes) > 1
    along = max(range(num_dims), key=lambda dim: len({box.origin[dim] for box in boxes}))
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.origin[along]):
        start = box.origin[along]
        open_boxes = [other for other in open_boxes if other.origin[along] + other.shape[along] > start]
        if any(box.intersection(other) is not None for other in open_boxes):
            return True
        open_boxes.append(box)
    return False


def _short(sizes: Iterable[int]) -> str:
    text = str(list(sizes))
    return text if len(text) < 80 else f"{text[:80]}..."
