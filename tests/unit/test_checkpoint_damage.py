"""Files of a checkpoint that were damaged, mixed up or made by a stranger: an error with a file's name in it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import assert_same, files_of, paths, small_state
from thinwire.errors import CheckpointError
from thinwire.train import checkpoint as module
from thinwire.train.checkpoint import Checkpoint
from thinwire.train.packing import MAX_DEPTH


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoint:
    checkpoint = Checkpoint(tmp_path, rank=0, world_size=2)
    checkpoint.save(small_state(10), 10)
    checkpoint.save(small_state(20), 20)
    return checkpoint


def assert_refused(checkpoint: Checkpoint, file: Path) -> None:
    """The newest is refused by the name of its damaged file, and the way back is said and works."""
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load()
    assert str(file) in str(caught.value)
    assert "load(step=10)" in str(caught.value)


def rewrite(manifest: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest as somebody would who knows the format: with a right hash."""
    content = json.loads(manifest.read_text())
    del content["sha256"]
    change(content)
    manifest.write_bytes(module._seal(content))


# --- damage is noticed and named


@pytest.mark.parametrize("which", [0, 1], ids=["tensors", "manifest"])
def test_every_truncation_is_refused_by_name(saved: Checkpoint, which: int) -> None:
    file = paths(saved.directory, 20)[which]
    for length in reversed(range(file.stat().st_size)):
        os.truncate(file, length)
        assert_refused(saved, file)
        assert saved.steps() == [10]
    assert_same(saved.load(step=10), (small_state(10), 10))


@pytest.mark.parametrize("which", [0, 1], ids=["tensors", "manifest"])
def test_every_flipped_bit_is_refused_by_name(saved: Checkpoint, which: int) -> None:
    file = paths(saved.directory, 20)[which]
    whole = file.read_bytes()
    positions = random.Random(0).sample(range(8 * len(whole)), 400)
    letters = [8 * i + 5 for i, byte in enumerate(whole) if chr(byte).isalpha()]  # upper case for lower: 1e-05 or 1E-05
    for position in positions + letters:
        broken = bytearray(whole)
        broken[position // 8] ^= 1 << position % 8
        file.write_bytes(broken)
        assert_refused(saved, file)
    file.write_bytes(whole)
    assert_same(saved.load(), (small_state(20), 20))


@pytest.mark.parametrize("which", [0, 1], ids=["tensors", "manifest"])
def test_bytes_added_at_the_end_are_refused(saved: Checkpoint, which: int) -> None:
    file = paths(saved.directory, 20)[which]
    file.write_bytes(file.read_bytes() + b"\n")
    assert_refused(saved, file)


def test_missing_tensors_are_refused_by_name(saved: Checkpoint) -> None:
    data, _ = paths(saved.directory, 20)
    data.unlink()
    with pytest.raises(CheckpointError, match=r"step-000000020/rank-00000\.safetensors is missing.*load\(step=10\)"):
        saved.load()


def test_tensors_of_another_generation_are_refused(saved: Checkpoint) -> None:
    shutil.copy(paths(saved.directory, 10)[0], paths(saved.directory, 20)[0])
    assert_refused(saved, paths(saved.directory, 20)[0])


def test_a_manifest_of_another_step_is_refused(saved: Checkpoint) -> None:
    for old, new in zip(paths(saved.directory, 10), paths(saved.directory, 20), strict=True):
        shutil.copy(old, new)
    with pytest.raises(CheckpointError, match="was written at step 10"):
        saved.load(step=20)


def test_damage_without_an_older_step_says_so(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, rank=0, world_size=1)
    checkpoint.save(small_state(1), 10)
    os.truncate(paths(tmp_path, 10)[0], 20)
    with pytest.raises(CheckpointError, match="No older step can be loaded instead"):
        checkpoint.load()


def test_a_file_of_another_rank_is_refused_with_both_numbers(saved: Checkpoint) -> None:
    for kind in (0, 1):
        shutil.copy(paths(saved.directory, 20)[kind], paths(saved.directory, 20, rank=1)[kind])
    with pytest.raises(CheckpointError, match="written by rank 0, this is rank 1"):
        Checkpoint(saved.directory, rank=1, world_size=2).load()


def test_another_world_size_is_refused_with_both_numbers_and_a_way_out(saved: Checkpoint) -> None:
    other = Checkpoint(saved.directory, rank=0, world_size=3)
    with pytest.raises(
        CheckpointError, match="in a run of 2 ranks, this run has 3. Resume with as many ranks, or start"
    ):
        other.load()
    assert other.steps() == []


@pytest.mark.parametrize(
    ("member", "value", "message"),
    [
        ("format", "somebody-else", "foreign format 'somebody-else'"),
        ("format", None, "foreign format None"),
        ("version", 2, "format version 2, this thinwire reads version 1"),
        ("version", [[]], "format version"),
        ("rank", "0", "written by rank '0'"),
        ("world_size", {}, "in a run of {} ranks"),
        ("bytes", 2**63, "is truncated or grown"),
        ("bytes", -1, "is truncated or grown"),
        ("bytes", "many", "is truncated or grown"),
        ("tensors_sha256", 0, "is damaged"),
        ("tensors_sha256", None, "is damaged"),
    ],
)
def test_a_manifest_with_a_right_hash_and_wrong_members_is_refused(
    saved: Checkpoint, member: str, value: object, message: str
) -> None:
    rewrite(paths(saved.directory, 20)[1], lambda content: content.update({member: value}))
    with pytest.raises(CheckpointError) as caught:
        saved.load(step=20)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"{}", b"{}\n", b"[]\n", b'{"format":"other"}\n', b"\x80\x04K\x01.", b"null\n"])
def test_a_foreign_manifest_is_refused(saved: Checkpoint, text: bytes) -> None:
    file = paths(saved.directory, 20)[1]
    file.write_bytes(text)
    assert_refused(saved, file)


# --- a stranger's files


def nested(depth: int) -> object:
    value: object = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "structure",
    [
        {"object": "os.system"},
        {"tensor": "../../../etc/passwd"},
        {"tensor": "/etc/passwd"},
        {"tensor": 3},
        {"float": "zz"},
        {"float": ""},
        {"float": "7ff80000 00000000"},
        {"tuple": 1},
        {"dict": {}},
        {"dict": [1]},
        {"dict": [["a"]]},
        {"dict": [[None, 1]]},
        {"dict": [[True, 1]]},
        {"dict": [[[], 1]]},
        {"dict": [["a", 1], ["a", 2]]},
        [{"tensor": "state['model']['w']"}, {"tensor": "state['model']['w']"}],
        {},
        None,
        nested(MAX_DEPTH + 2),
        nested(500),
    ],
)
def test_a_hostile_structure_with_a_right_hash_is_refused_in_few_words(saved: Checkpoint, structure: object) -> None:
    rewrite(paths(saved.directory, 20)[1], lambda content: content.update(structure=structure))
    with pytest.raises(CheckpointError) as caught:
        saved.load(step=20)
    assert str(saved.directory) in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(saved.directory))


def sealed(body: bytes) -> bytes:
    """A manifest of any bytes, with a right hash."""
    return module._SEAL % hashlib.sha256(body).hexdigest().encode() + body[1:]


@pytest.mark.parametrize(
    "body",
    [
        b'{"structure":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
        b'{"bytes":' + b"9" * 10_000 + b"}\n",
        b'{"bytes":NaN}\n',
        b'{"bytes":\xff}\n',
        b"{]}\n",
    ],
    ids=["deep", "long-int", "nan", "not-utf8", "not-json"],
)
def test_hostile_json_with_a_right_hash_is_refused(saved: Checkpoint, body: bytes) -> None:
    file = paths(saved.directory, 20)[1]
    file.write_bytes(sealed(body))
    assert_refused(saved, file)


def test_a_huge_manifest_is_refused_before_it_is_read(saved: Checkpoint) -> None:
    file = paths(saved.directory, 20)[1]
    os.truncate(file, 2**40)  # a sparse file: a terabyte that takes no room
    assert_refused(saved, file)


def test_a_huge_tensor_file_is_refused_before_it_is_read(saved: Checkpoint) -> None:
    file = paths(saved.directory, 20)[0]
    os.truncate(file, 2**40)
    assert_refused(saved, file)


HEADERS: list[dict[str, Any]] = [
    {"x": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 4]}},
    {"x": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}},
    {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**63]}},
    {"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
    {"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
    {"x": {"dtype": "OBJECT", "shape": [1], "data_offsets": [0, 4]}},
    {"x": 1},
    {"surplus": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
]


@pytest.mark.parametrize("header", [*HEADERS, 2**63], ids=str)
def test_a_hostile_tensor_file_with_a_right_hash_is_refused(saved: Checkpoint, header: object) -> None:
    data, manifest = paths(saved.directory, 20)
    text = json.dumps(header).encode()
    raw = struct.pack("<Q", header if isinstance(header, int) else len(text)) + text + bytes(4)
    data.write_bytes(raw)
    digest = hashlib.sha256(raw).hexdigest()
    rewrite(manifest, lambda content: content.update(bytes=len(raw), tensors_sha256=digest, structure=[]))
    assert_refused(saved, data)


@pytest.mark.parametrize("which", [0, 1], ids=["tensors", "manifest"])
def test_links_and_pipes_in_place_of_files_are_refused_and_do_not_block(saved: Checkpoint, which: int) -> None:
    file = paths(saved.directory, 20)[which]
    file.rename(saved.directory / "elsewhere")
    file.symlink_to(saved.directory / "elsewhere")
    assert_refused(saved, file)
    file.unlink()
    os.mkfifo(file)
    assert_refused(saved, file)


def test_nothing_is_written_or_removed_through_links(tmp_path: Path) -> None:
    outside, directory = tmp_path / "outside", tmp_path / "inside"
    Checkpoint(outside, rank=0, world_size=1).save(small_state(1), 10)
    before = files_of(outside)
    directory.mkdir()
    for step in (1, 2):
        (directory / f"step-{step:09d}").symlink_to(outside / "step-000000010")
    checkpoint = Checkpoint(directory, rank=0, world_size=1, keep=1)
    with pytest.raises(CheckpointError, match="is a link"):
        checkpoint.save(small_state(2), 2)
    for step in (3, 4):
        checkpoint.save(small_state(step), step)
    assert files_of(outside) == before

    (outside / "victim").write_text("whole")
    (directory / "step-000000005").mkdir()
    (directory / "step-000000005" / "rank-00000.json.tmp").symlink_to(outside / "victim")
    checkpoint.save(small_state(5), 5)
    assert (outside / "victim").read_text() == "whole"
