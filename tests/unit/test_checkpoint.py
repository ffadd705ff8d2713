"""What a checkpoint promises: the same bits back, or an error with a file's name in it; and never half of a state."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import random
import shutil
import struct
import subprocess
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.disks import small_disk
from thinwire.errors import CheckpointError
from thinwire.train import checkpoint as module
from thinwire.train.checkpoint import Checkpoint
from thinwire.train.packing import MAX_DEPTH

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def assert_same(a: object, b: object) -> None:
    """Same types, same structure in the same order, same bits."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.contiguous().reshape(-1).view(torch.uint8).equal(b.contiguous().reshape(-1).view(torch.uint8))
    elif isinstance(a, dict) and isinstance(b, dict):
        assert [(type(key), key) for key in a] == [(type(key), key) for key in b]
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, float) and isinstance(b, float):
        assert struct.pack("<d", a) == struct.pack("<d", b)
    else:
        assert a == b


def small_state(number: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((3,), float(number))}, "lr": 1e-05, "best": math.inf, "step": number, "é": "é"}


def files_of(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def paths(directory: Path, step: int, rank: int = 0) -> tuple[Path, Path]:
    stem = directory / f"step-{step:09d}" / f"rank-{rank:05d}"
    return stem.with_suffix(".safetensors"), stem.with_suffix(".json")


def rewrite(manifest: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest as somebody would who knows the format: with a right hash."""
    content = json.loads(manifest.read_text())
    del content["sha256"]
    change(content)
    manifest.write_bytes(module._seal(content))


# The same bits come back


def tensors() -> st.SearchStrategy[torch.Tensor]:
    """Tensors of every dtype and few shapes, of random bits: NaNs with payloads and negative zeros among them."""

    def build(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
        size = torch.empty(0, dtype=dtype).element_size()
        bits = torch.randint(0, 256, (math.prod(shape) * size,), dtype=torch.uint8, generator=generator(seed))
        return (bits % 2 if dtype is torch.bool else bits).view(dtype).reshape(shape)

    shapes = st.lists(st.integers(0, 3), max_size=3)
    return st.builds(build, st.sampled_from(DTYPES), shapes, st.integers(0, 2**31))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


nan_bits = st.integers(1, 2**52 - 1).map(
    lambda payload: struct.unpack("<d", struct.pack("<Q", 0x7FF << 52 | payload))[0]
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**2047), 2**2047),
    st.floats(),
    nan_bits,
    st.text(),
    tensors(),
)
keys = st.one_of(
    st.text(max_size=5), st.integers(), st.sampled_from(["0", 0, "a/b", "['x']", "__metadata__", "", "\n"])
)
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=states)
def test_any_nested_state_comes_back_bit_for_bit(tmp_path: Path, state: object) -> None:
    checkpoint = Checkpoint(tmp_path, rank=0, world_size=1)
    checkpoint.save(state, step=1)
    loaded, step = checkpoint.load()
    assert step == 1
    assert_same(loaded, state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_with_its_shape_even_empty_or_scalar(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {
        "scalar": torch.ones((), dtype=dtype),
        "empty": torch.ones((2, 0, 3), dtype=dtype),
        "two": [torch.ones(2, 1)],
    }
    checkpoint = Checkpoint(tmp_path, rank=0, world_size=1)
    checkpoint.save(state, step=0)
    assert_same(checkpoint.load()[0], state)


def test_views_come_back_as_values_with_memory_of_their_own(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    views = {
        "base": base,
        "transposed": base.t(),
        "row": base[1],
        "strided": base[:, ::2],
        "spread": base[:1].expand(5, 4),
        "one": base.reshape(-1)[::12],
    }
    views["negated"] = torch.view_as_complex(torch.ones(1, 2)).conj().imag  # its sign is not in memory
    checkpoint = Checkpoint(tmp_path, rank=0, world_size=1)
    checkpoint.save(views, step=0)
    loaded, _ = checkpoint.load()
    for name, view in views.items():
        assert_same(loaded[name], torch.tensor(view.tolist()))
    loaded["base"].zero_()
    assert loaded["row"].equal(base[1])


def test_a_loaded_tensor_does_not_change_when_the_file_does(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, rank=0, world_size=1)
    checkpoint.save({"x": torch.arange(100_000)}, step=0)
    loaded, _ = checkpoint.load()
    data, _ = paths(tmp_path, 0)
    with open(data, "r+b") as file:
        file.write(bytes(data.stat().st_size))
    assert loaded["x"].equal(torch.arange(100_000))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tensor_on_a_gpu_comes_back_on_the_cpu(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, rank=0, world_size=1)
    checkpoint.save(torch.ones(3, device="cuda"), step=0)
    assert_same(checkpoint.load()[0], torch.ones(3))


def test_a_model_and_its_optimizer_resume_with_the_same_bits(tmp_path: Path) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(torch.randn(16, 4, generator=generator(step))).square().sum().backward()
            optimizer.step()

    model, optimizer = build()
    train(model, optimizer, range(5))
    checkpoint = Checkpoint(tmp_path, rank=0, world_size=1)
    checkpoint.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step=5)
    train(model, optimizer, range(5, 10))

    other, other_optimizer = build()
    loaded, step = checkpoint.load()
    other.load_state_dict(loaded["model"])
    other_optimizer.load_state_dict(loaded["optimizer"])
    train(other, other_optimizer, range(step, 10))
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(other_optimizer.state_dict(), optimizer.state_dict())


def test_a_subclass_comes_back_as_its_plain_base(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, rank=0, world_size=1)
    checkpoint.save(OrderedDict(shape=torch.Size([2, 3]), weight=torch.nn.Parameter(torch.ones(2))), step=0)
    assert_same(checkpoint.load()[0], {"shape": (2, 3), "weight": torch.ones(2)})


def test_the_tensor_file_is_one_that_the_safetensors_library_reads_and_is_aligned(tmp_path: Path) -> None:
    state = {
        "a": torch.ones(3, dtype=torch.int8),
        7: [torch.ones(2, dtype=torch.float64)],
        "b": torch.ones((), dtype=torch.bool),
    }
    Checkpoint(tmp_path, rank=0, world_size=1).save(state, step=0)
    data, _ = paths(tmp_path, 0)
    assert set(load_file(data)) == {"state['a']", "state[7][0]", "state['b']"}
    raw = data.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    starts = {name: 8 + length + entry["data_offsets"][0] for name, entry in json.loads(raw[8 : 8 + length]).items()}
    assert length % 8 == 0 and starts["state[7][0]"] % 8 == 0


# What cannot be saved is named before anything is written


class Opaque:
    pass


@pytest.mark.parametrize(
    ("state", "kind", "where"),
    [
        ({"a": [1, {"b": {1, 2}}]}, TypeError, "state['a'][1]['b'] is a set"),
        ({"a": (Opaque(),)}, TypeError, "state['a'][0] is a Opaque"),
        ({0: {"hook": print}}, TypeError, "state[0]['hook'] is a builtin_function_or_method"),
        ({"a": b"bytes"}, TypeError, "state['a'] is a bytes"),
        ({"a": 1j}, TypeError, "state['a'] is a complex"),
        ({"a": {(1, 2): 3}}, TypeError, "state['a'] has the key (1, 2)"),
        ({"a": {True: 3}}, TypeError, "state['a'] has the key True"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, TypeError, "state['a'] is a tensor of torch.complex64"),
        ({"a": torch.ones(2, device="meta")}, TypeError, "state['a'] is a tensor without dense memory"),
        ({"a": torch.eye(2).to_sparse()}, TypeError, "state['a'] is a tensor without dense memory"),
        ({"a": "\ud83d"}, ValueError, "state['a'] has a surrogate"),
        ({"a": 1 << 5000}, ValueError, "state['a'] has an int of 5001 bits"),
    ],
)
def test_what_cannot_be_saved_is_named_by_its_path_and_nothing_is_written(
    tmp_path: Path, state: object, kind: type[Exception], where: str
) -> None:
    with pytest.raises(kind) as caught:
        Checkpoint(tmp_path / "new", rank=0, world_size=1).save(state, step=0)
    assert where in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_a_state_that_contains_itself_is_refused(tmp_path: Path) -> None:
    state: dict[str, object] = {}
    state["self"] = state
    with pytest.raises(ValueError, match="contains itself"):
        Checkpoint(tmp_path, rank=0, world_size=1).save(state, step=0)


def test_a_state_too_large_for_a_manifest_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", 1000)
    with pytest.raises(ValueError, match="into tensors"):
        Checkpoint(tmp_path, rank=0, world_size=1).save(list(range(1000)), step=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("rank", "world_size", "keep"), [(-1, 2, 2), (2, 2, 2), (0, 1, 0)])
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, rank: int, world_size: int, keep: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        Checkpoint(tmp_path, rank, world_size, keep)


def test_a_negative_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step must be"):
        Checkpoint(tmp_path, rank=0, world_size=1).save({}, step=-1)


# Generations


def test_the_newest_generations_stay_and_older_ones_go(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, rank=0, world_size=1, keep=2)
    for step in (10, 20, 30):
        checkpoint.save(small_state(step), step)
    assert checkpoint.steps() == [20, 30]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000020", "step-000000030"]
    assert_same(checkpoint.load(20), (small_state(20), 20))
    assert_same(checkpoint.load(), (small_state(30), 30))


def test_only_files_of_this_rank_are_removed(tmp_path: Path) -> None:
    mine, other = (Checkpoint(tmp_path, rank, world_size=2, keep=1) for rank in (0, 1))
    other.save(small_state(1), 10)
    (tmp_path / "notes.txt").write_text("mine")
    for step in (10, 20):
        mine.save(small_state(step), step)
    assert mine.steps() == [20] and other.steps() == [10]
    assert (tmp_path / "notes.txt").exists()


def test_damaged_generations_do_not_count_as_kept(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, rank=0, world_size=1, keep=2)
    checkpoint.save(small_state(10), 10)
    checkpoint.save(small_state(20), 20)
    os.truncate(paths(tmp_path, 20)[0], 5)
    checkpoint.save(small_state(30), 30)
    assert checkpoint.steps() == [10, 30]
    checkpoint.save(small_state(40), 40)
    assert files_of(tmp_path) == [
        f"step-0000000{step}/rank-00000.{kind}" for step in (30, 40) for kind in ("json", "safetensors")
    ]


def test_saving_after_a_step_back_removes_neither_itself_nor_later_steps(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, rank=0, world_size=1, keep=2)
    for step in (100, 120, 140):
        checkpoint.save(small_state(step), step)
    checkpoint.save(small_state(0), 110)
    assert checkpoint.steps() == [110, 120, 140]


def test_the_same_step_can_be_saved_again(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, rank=0, world_size=1)
    checkpoint.save(small_state(1), 10)
    checkpoint.save(small_state(2), 10)
    assert_same(checkpoint.load(), (small_state(2), 10))


def test_folders_that_are_not_ours_are_passed_over(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, rank=0, world_size=1)
    checkpoint.save(small_state(1), 10)
    for name in ("step-0000000099", "step-99", "step-\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661", "other"):
        (tmp_path / name).mkdir()
    assert checkpoint.steps() == [10] and checkpoint.load()[1] == 10


def test_an_empty_or_missing_directory_holds_no_checkpoint(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        checkpoint = Checkpoint(directory, rank=3, world_size=4)
        assert checkpoint.steps() == []
        with pytest.raises(CheckpointError, match="holds no checkpoint of rank 3"):
            checkpoint.load()
        with pytest.raises(CheckpointError, match=r"rank-00003\.json is missing"):
            checkpoint.load(step=7)


# Damage is noticed and named


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


# A stranger's files


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


# Saving that fails or is killed


class Killed(BaseException):
    pass


DISK_CALLS = ("mkdir", "open", "fsync", "unlink", "replace", "rmdir")


class Disk:
    """Counts the calls that touch the disk and lets the one numbered `fatal` fail, or that one and all after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fatal: int, error: BaseException, forever: bool) -> None:
        self.calls = 0
        self.fatal, self.error, self.forever = fatal, error, forever
        for name in DISK_CALLS:
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.fatal or (self.forever and self.calls > self.fatal):
                raise self.error
            return original(*args, **kwargs)

        return call


def interrupted_saves(
    monkeypatch: pytest.MonkeyPatch, base: Path, error: BaseException, forever: bool
) -> Iterator[Path]:
    """For every disk call of a third save: a directory in which that call was the one that failed."""
    for fatal in range(1, 1000):
        directory = base / str(fatal)
        checkpoint = Checkpoint(directory, rank=0, world_size=1, keep=2)
        checkpoint.save(small_state(10), 10)
        checkpoint.save(small_state(20), 20)
        with monkeypatch.context() as patch:
            disk = Disk(patch, fatal, error, forever)
            try:
                checkpoint.save(small_state(30), 30)
            except type(error):
                pass
        if disk.calls < fatal:
            assert fatal > 15, "the save was meant to be interrupted at every one of its steps"
            return
        yield directory


def assert_one_whole_state(directory: Path) -> int:
    checkpoint = Checkpoint(directory, rank=0, world_size=1)
    state, step = checkpoint.load()
    assert step in (20, 30)
    assert_same(state, small_state(step))
    return step


def test_killed_at_any_moment_of_a_save_the_old_or_the_new_state_is_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []
    for directory in interrupted_saves(monkeypatch, tmp_path, Killed(), forever=True):
        seen.append(assert_one_whole_state(directory))
        again = Checkpoint(directory, rank=0, world_size=1, keep=1)
        again.save(small_state(30), 30)
        assert files_of(directory) == ["step-000000030/rank-00000.json", "step-000000030/rank-00000.safetensors"]
    assert seen == sorted(seen) and set(seen) == {20, 30}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_an_error_at_any_moment_of_a_save_leaves_the_generations_and_no_temporary_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    for directory in interrupted_saves(monkeypatch, tmp_path, OSError(number, os.strerror(number)), forever=False):
        newest = assert_one_whole_state(directory)
        assert not [name for name in files_of(directory) if name.endswith(".tmp")]
        if newest == 20:
            assert Checkpoint(directory, rank=0, world_size=1).steps() == [10, 20]
            assert not (directory / "step-000000030").exists()


def test_killed_while_saving_a_step_again_no_mixture_is_taken_for_a_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for fatal in range(1, 30):
        checkpoint = Checkpoint(tmp_path / str(fatal), rank=0, world_size=1)
        checkpoint.save(small_state(10), 10)
        checkpoint.save(small_state(20), 20)
        with monkeypatch.context() as patch:
            Disk(patch, fatal, Killed(), forever=True)
            try:
                checkpoint.save(small_state(21), 20)
            except Killed:
                pass
        state, step = checkpoint.load()
        assert (step, state["step"]) in [(10, 10), (20, 20), (20, 21)]
        assert_same(state, small_state(state["step"]))


@pytest.fixture
def full_soon(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "1m") as folder:
        yield folder


def test_a_full_disk_leaves_the_generation_before_and_no_temporary_file(full_soon: Path) -> None:
    checkpoint = Checkpoint(full_soon, rank=0, world_size=1)
    checkpoint.save(small_state(10), 10)
    before = files_of(full_soon)
    with pytest.raises(OSError) as caught:
        checkpoint.save({"x": torch.ones(2**20)}, 20)
    assert caught.value.errno == errno.ENOSPC
    assert files_of(full_soon) == before and not (full_soon / "step-000000020").exists()
    assert_same(checkpoint.load(), (small_state(10), 10))
    checkpoint.save(small_state(20), 20)
    assert checkpoint.steps() == [10, 20]


def test_a_read_only_disk_leaves_the_generation_before(full_soon: Path) -> None:
    checkpoint = Checkpoint(full_soon, rank=0, world_size=1)
    checkpoint.save(small_state(10), 10)
    subprocess.run(["mount", "-o", "remount,ro", full_soon], check=True)
    with pytest.raises(OSError) as caught:
        checkpoint.save(small_state(20), 20)
    assert caught.value.errno == errno.EROFS
    assert_same(checkpoint.load(), (small_state(10), 10))


def test_a_folder_that_another_rank_removes_while_it_is_empty_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(tmp_path, rank=0, world_size=2)
    folder = tmp_path / "step-000000005"
    removed = []
    make = Path.mkdir

    def make_and_lose(path: Path, *args: Any, **kwargs: Any) -> None:
        make(path, *args, **kwargs)
        if path == folder and not removed:
            removed.append(path.rmdir())

    monkeypatch.setattr(Path, "mkdir", make_and_lose)
    checkpoint.save({"x": torch.ones(3)}, 5)
    assert removed
    assert torch.equal(checkpoint.load(5)[0]["x"], torch.ones(3))
