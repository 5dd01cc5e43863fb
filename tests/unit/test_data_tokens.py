"""Tokens on the disk: read as one array however they lie there, and refused where they are not as they say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain.data import TokenArray, TokenWriter, read_manifest
from disttrain.errors import DataError


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_arrays_are_read_as_one(sizes: list[int], data: st.DataObject) -> None:
    total = sum(sizes)
    whole = np.arange(total)
    tokens = TokenArray(np.split(whole, np.cumsum(sizes)[:-1]))
    start = data.draw(st.integers(0, total))
    length = data.draw(st.integers(0, total - start))
    assert len(tokens) == tokens.size == total
    assert tokens.read(start, length).tolist() == whole[start : start + length].tolist()


def test_nothing_is_read_beyond_the_end() -> None:
    with pytest.raises(DataError, match="tokens 2 to 5 are asked for, of 4"):
        TokenArray([np.arange(4)]).read(2, 3)


def written(folder: Path) -> Path:
    with TokenWriter(folder, "uint16", shard_size=10, about={"tokenizer": "mine"}) as writer:
        for first in range(0, 32, 4):
            writer.add(list(range(first, first + 4)))
        writer.add(np.array([7, 8, 9]), "held-out")
    return folder


def test_a_folder_has_what_was_written(tmp_path: Path) -> None:
    folder = written(tmp_path / "tokens")
    tokens = TokenArray.open(folder)
    assert tokens.read(0, 32).tolist() == list(range(32))
    assert tokens.read(8, 4).dtype == np.uint16
    assert TokenArray.open(str(folder), "held-out").read(0, 3).tolist() == [7, 8, 9]
    assert sorted(path.name for path in folder.iterdir()) == [
        "held-out-00000.npy",
        "shards.json",
        *(f"training-0000{number}.npy" for number in range(4)),
    ]
    assert read_manifest(folder) == {
        "format": 1,
        "dtype": "uint16",
        "num_tokens": {"training": 32, "held-out": 3},
        "tokenizer": "mine",
    }
    with pytest.raises(DataError, match=r"has tokens already\. Name a new folder"):
        TokenWriter(folder, "uint16")
    with pytest.raises(DataError, match="has no part 'test'; it has 'training', 'held-out'"):
        TokenArray.open(folder, "test")


def test_what_was_not_written_to_its_end_is_none(tmp_path: Path) -> None:
    def interrupted() -> None:
        with TokenWriter(tmp_path, "uint8", shard_size=2) as writer:
            writer.add([1, 2, 3])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(DataError, match=r"has no shards\.json: it is no folder of tokens, or its writing did not end"):
        TokenArray.open(tmp_path)


@pytest.mark.parametrize("tokens", [[256], [-1], [1.5], [[1, 2]]])
def test_tokens_that_do_not_fit_are_refused(tmp_path: Path, tokens: list[object]) -> None:
    with pytest.raises(DataError, match="are not integers that fit into uint8"):
        TokenWriter(tmp_path, "uint8").add(tokens)


def test_folders_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "tokens")
    last, first = folder / "training-00003.npy", folder / "training-00000.npy"
    whole = last.read_bytes()
    for cut in (whole[: len(whole) - 1], whole[:20], b""):
        last.write_bytes(cut)
        with pytest.raises(DataError, match=r"training-00003\.npy is damaged"):
            TokenArray.open(folder)
    last.unlink()
    with pytest.raises(DataError, match=r"has 30 training tokens in 3 files; shards\.json says 32"):
        TokenArray.open(folder)
    last.write_bytes(whole)
    np.save(first, np.arange(10, dtype=np.uint32))
    with pytest.raises(DataError, match=r"has tokens of uint16, uint32; shards\.json says uint16"):
        TokenArray.open(folder)
    np.save(first, np.ones((2, 5)))
    with pytest.raises(DataError, match=r"an array of float64 has shape \(2, 5\)"):
        TokenArray.open(folder)
    first.unlink()
    with pytest.raises(DataError, match=r"lacks training-00000\.npy"):
        TokenArray.open(folder)
    for text, problem in (("{", "is damaged"), ('{"num_tokens": 3}', "is damaged"), ("[]", "is damaged")):
        (folder / "shards.json").write_text(text)
        with pytest.raises(DataError, match=problem):
            TokenArray.open(folder)
    (folder / "shards.json").write_text(json.dumps({"format": 2, "num_tokens": {}}))
    with pytest.raises(DataError, match=r"says format 2; this is 1\. Read it with a newer disttrain"):
        TokenArray.open(folder)


def test_files_of_others_are_opened_by_what_they_say_or_are_said_to_be(tmp_path: Path) -> None:
    plain, numpys = tmp_path / "train.bin", tmp_path / "train.npy"
    values = np.arange(10, dtype=np.uint16)
    plain.write_bytes(values.tobytes())
    np.save(numpys, values)
    assert TokenArray.open(plain, dtype="uint16").read(3, 4).tolist() == [3, 4, 5, 6]
    assert TokenArray.open(numpys).read(3, 4).tolist() == [3, 4, 5, 6]
    with pytest.raises(DataError, match=r"train\.bin does not say what its bytes are. Give its dtype"):
        TokenArray.open(plain)
    plain.write_bytes(values.tobytes()[:-1])
    with pytest.raises(DataError, match="has 19 bytes, and a token of uint16 has 2"):
        TokenArray.open(plain, dtype=np.uint16)
    with pytest.raises(DataError, match="there is no"):
        TokenArray.open(tmp_path / "none.bin", dtype="uint16")


@given(st.lists(st.lists(st.integers(1, 5), max_size=6), max_size=8), st.booleans(), st.data())
def test_documents_end_with_their_token(texts: list[list[int]], has_end: bool, data: st.DataObject) -> None:
    documents = [[*text, 0] for text in texts]
    if documents and not has_end:
        documents[-1].pop()
        documents = documents if documents[-1] else documents[:-1]
    whole = np.array([token for document in documents for token in document], dtype=np.uint8)
    cut = data.draw(st.integers(0, len(whole)))
    found = TokenArray([whole[:cut], whole[cut:]]).documents(0)
    assert [document.tolist() for document in found] == documents
    assert found.lengths == [len(document) for document in documents]
    assert [document.tolist() for document in found[1:3]] == documents[1:3]
    with pytest.raises(IndexError, match=f"document {len(documents)} of {len(documents)}"):
        found[len(documents)]
