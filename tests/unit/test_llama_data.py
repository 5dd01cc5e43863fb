"""The flagship example's data: files to tokens, tokens to rows; what a row has depends on its number alone."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from llama.tokenizer import ByteTokenizer, FileTokenizer, tokenizer_named
from llama.tokens import Tokens, read_tokens

from disttrain.data import TokenArray
from disttrain.errors import DataError, SettingError

EXAMPLES = Path(__file__).parents[2] / "examples"


def files(folder: Path, num_files: int) -> str:
    for number in range(num_files):
        path = folder / f"part-{number % 3}" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(f"file {number} " * 8)
    return str(folder)


def read(folder: Path | str, seq_size: int = 16) -> Tokens:
    return read_tokens(str(folder), "bytes", seq_size)


def everything(side: TokenArray) -> bytes:
    return side.read(0, side.size).tobytes()


def test_held_out_rows_reach_from_end_to_end(tmp_path: Path) -> None:
    tokens = read(files(tmp_path, 60))
    parts = [tokens.held_out_rows(16, first, 3, 6) for first in (0, 3)]
    assert [tuple(rows.shape) for rows in parts] == [(3, 17), (3, 17)]
    side = everything(tokens.held_out)
    assert bytes(parts[0][0].tolist()) == side[:17]
    assert bytes(parts[1][-1].tolist()) == side[-17:]


def test_held_out_files_are_never_trained_on(tmp_path: Path) -> None:
    tokens = read(files(tmp_path, 60))
    sides = [set(everything(side).split(b"\0")) for side in (tokens.training, tokens.held_out)]
    assert sides[0] | sides[1] == {f"file {number} ".encode() * 8 for number in range(60)}
    assert not sides[0] & sides[1]
    assert tokens.num_files == 60


def test_a_file_stays_on_its_side_when_others_come(tmp_path: Path) -> None:
    before = read(files(tmp_path, 60)).held_out
    after = read(files(tmp_path, 90)).held_out
    assert set(everything(before).split(b"\0")) <= set(everything(after).split(b"\0"))


def test_a_single_file_has_its_end_held_out(tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_bytes(bytes(range(1, 251)) * 2)
    tokens = read(tmp_path)
    assert (tokens.training.size, tokens.held_out.size, tokens.num_files) == (475, 25, 1)


def test_what_is_no_text_is_left_out(tmp_path: Path) -> None:
    files(tmp_path, 60)
    expected = everything(read(tmp_path).training)
    (tmp_path / "picture").write_bytes(b"\x89PNG\0" * 100)
    (tmp_path / ".hidden").write_text("secret" * 100)
    assert everything(read(tmp_path).training) == expected


@pytest.mark.parametrize(
    ("num_files", "problem"), [(5, "284 bytes of text in 5 files; 14 of"), (0, "0 bytes of text in 0")]
)
def test_too_little_text_is_refused(tmp_path: Path, num_files: int, problem: str) -> None:
    with pytest.raises(SettingError) as caught:
        read(files(tmp_path, num_files), 128)
    assert problem in caught.value.problem
    assert "either side needs --seq 128 + 1" in caught.value.problem


def make_shards(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    monkeypatch.setattr(sys, "argv", ["tokenize_text.py", *argv])
    runpy.run_path(str(EXAMPLES / "tokenize_text.py"), run_name="__main__")


def test_shards_have_what_the_text_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, shards = files(tmp_path / "text", 60), tmp_path / "shards"
    make_shards(monkeypatch, text, str(shards), "--shard-size", "1000")
    expected, found = read(text), read(shards)
    # The end of a file stands between two that are read together, so that it is the same bytes.
    assert everything(found.training) == everything(expected.training)
    assert everything(found.held_out) == everything(expected.held_out)
    assert len(list(shards.glob("training-*.npy"))) == found.training.size // 1000 + 1
    assert TokenArray.open(shards).read(990, 20).dtype == "uint8"
    assert (found.prompt, found.num_files) == (expected.prompt, 60)
    with pytest.raises(SystemExit, match="is there already"):
        make_shards(monkeypatch, text, str(shards))


def test_many_files_have_their_ends_in_shards_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, shards = files(tmp_path / "text", 300), tmp_path / "shards"
    make_shards(monkeypatch, text, str(shards))
    assert everything(read(shards).training) == everything(read(text).training)


def test_shards_that_are_not_whole_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = tmp_path / "shards"
    make_shards(monkeypatch, files(tmp_path / "text", 60), str(shards), "--shard-size", "1000")
    max(shards.glob("training-*.npy")).unlink()
    with pytest.raises(DataError, match=r"has \d+000 training tokens in \d files; shards\.json says"):
        read(shards)
    (shards / "shards.json").write_text('{"num_tokens": {}}')
    with pytest.raises(SettingError, match=r"does not say of which tokenizer"):
        read(shards)


def test_a_text_that_is_continued_has_no_end(tokenizer_file: Path) -> None:
    own = FileTokenizer(tokenizer_file)
    assert (own.encode([b"file 5"]).tolist(), own.begin(b"file 5")) == ([0, 8, 1], [0, 8])
    assert ByteTokenizer().begin(b"file") == list(b"file")
    assert read_tokens(None, str(tokenizer_file), 16).prompt[-1] != 1


def test_a_vocabulary_reaches_to_its_last_number(tokenizer_file: Path) -> None:
    with_a_gap = tokenizer_file.read_text().replace('"59": 62', '"59": 99').replace('"59":62', '"59":99')
    tokenizer_file.write_text(with_a_gap)
    assert FileTokenizer(tokenizer_file).vocabulary_size == 100


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    """A small tokenizer of words, such as the library makes."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the library tokenizers")
    words = {"file": 0, "</s>": 1, "?": 2} | {str(number): number + 3 for number in range(60)}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    setattr(own, "pre_tokenizer", tokenizers.pre_tokenizers.Whitespace())  # noqa: B010  a plain one looks unused
    path = tmp_path / "words" / "tokenizer.json"
    path.parent.mkdir()
    own.save(str(path))
    return path


def test_a_tokenizer_of_others_goes_with_its_shards(
    tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, shards = files(tmp_path / "text", 60), tmp_path / "shards"
    expected = read_tokens(text, str(tokenizer_file), 16)
    assert expected.tokenizer.vocabulary_size == 63
    first = expected.held_out.read(0, 17)
    assert first.tolist() == [*[0, first[1]] * 8, 1]
    assert expected.tokenizer.decode([0, 8, 2]) == "file 5 ?"
    make_shards(monkeypatch, text, str(shards), "--tokenizer", str(tokenizer_file.parent))
    found = read(shards)
    sides = [tokens.training.read(0, tokens.training.size).tolist() for tokens in (found, expected)]
    assert sides[0] == sides[1]
    assert (found.tokenizer.vocabulary_size, found.tokenizer.unit) == (63, "token")
    assert json.loads((shards / "shards.json").read_text())["tokenizer"] == "tokenizer.json"
    assert read_tokens(str(shards), str(tokenizer_file), 16).training.size == found.training.size
    tokenizer_file.write_text(tokenizer_file.read_text() + "\n")
    with pytest.raises(SettingError, match=r"tokens of its own tokenizer\.json, not of"):
        read_tokens(str(shards), str(tokenizer_file), 16)


def test_tokenizers_that_are_not_there_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="there is no file"):
        tokenizer_named(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(SettingError, match=r"bad\.json"):
        FileTokenizer(tmp_path / "bad.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SettingError, match="pip install tokenizers"):
        tokenizer_named(str(tmp_path))
