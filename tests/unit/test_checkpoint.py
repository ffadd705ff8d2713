"""What a checkpoint promises: the same bits back, of the newest generation or of one before."""

from __future__ import annotations

import json
import math
import os
import struct
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.checkpoints import assert_same, files_of, paths, small_state
from thinwire.errors import CheckpointError
from thinwire.train import checkpoint as module
from thinwire.train.checkpoint import Checkpoint

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


# --- the same bits come back


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


# --- what cannot be saved is named before anything is written


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


# --- generations


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
