"""What is learned, who learns what, and in which order."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.jobs import data, fashion
from thinwire.jobs.data import Loader, Share, load, own, partition


def test_digits_are_split_the_same_way_every_time() -> None:
    first, second = load("digits"), load("digits")
    assert (len(first.train), len(first.test), first.shape, first.classes) == (1438, 359, (1, 8, 8), 10)
    assert torch.equal(first.train.inputs, second.train.inputs) and torch.equal(first.test.labels, second.test.labels)
    x, y = first.train.batch(torch.arange(len(first.train)))
    assert abs(float(x.mean())) < 0.02 and abs(float(x.std()) - 1) < 0.02
    assert sorted(y.unique().tolist()) == list(range(10))


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    pixels, labels = data._scikit_learns()
    bunch = load_digits()
    assert np.array_equal(pixels, bunch.data) and np.array_equal(labels, bunch.target)


# --- fashion-mnist


def idx(array: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_fashion(folder: Path, train: int = 40, test: int = 20, packed: bool = True) -> Path:
    """A few images of noise, as if they were Fashion-MNIST."""
    random = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for part, number in (("train", train), ("t10k", test)):
        images = random.integers(0, 256, (number, 28, 28), dtype=np.uint8)
        labels = np.arange(number, dtype=np.uint8) % 10
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            raw = idx(array)
            path = folder / f"{part}-{name}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(raw, 1) if packed else raw)
    return folder


@pytest.mark.parametrize("packed", [True, False])
def test_fashion_mnist_is_read_from_a_folder(packed: bool, tmp_path: Path) -> None:
    loaded = load("fashion-mnist", folder=str(write_fashion(tmp_path, packed=packed)))
    assert (len(loaded.train), len(loaded.test), loaded.shape) == (40, 20, (1, 28, 28))
    assert loaded.train.labels[:12].tolist() == [*range(10), 0, 1]


def test_fashion_mnist_is_found_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fashion(tmp_path / "here")
    monkeypatch.setattr(fashion, "PLACES", (str(tmp_path / "nowhere"), str(tmp_path / "here")))
    assert len(load("fashion-mnist").train) == 40
    monkeypatch.setattr(fashion, "PLACES", (str(tmp_path / "nowhere"),))
    with pytest.raises(ValueError, match="Debian package dataset-fashion-mnist"):
        load("fashion-mnist")


def test_a_missing_file_is_named_with_the_package_that_has_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"not in {tmp_path}: install the Debian package dataset-fashion-mnist"):
        load("fashion-mnist", folder=str(tmp_path))
    write_fashion(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte.gz is missing.*dataset-fashion-mnist"):
        load("fashion-mnist", folder=str(tmp_path))


GOOD = idx(np.zeros((40, 28, 28), np.uint8))


@pytest.mark.parametrize(
    ("content", "packed"),
    [
        (GOOD[:-1], False),
        (GOOD + b"x", False),
        (b"", False),
        (GOOD[:9], False),
        (b"<html>" + GOOD, False),
        (bytes([0, 0, 13, 3]) + GOOD[4:], False),
        (gzip.compress(GOOD)[:-20], True),
        (b"no gzip at all", True),
        (idx(np.zeros((39, 28, 28), np.uint8)), False),
        (idx(np.zeros((40, 784), np.uint8)), False),
        (bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1), False),
    ],
)
def test_a_damaged_file_is_refused_by_name(content: bytes, packed: bool, tmp_path: Path) -> None:
    write_fashion(tmp_path, packed=packed)
    (tmp_path / f"train-images-idx3-ubyte{'.gz' if packed else ''}").write_bytes(content)
    with pytest.raises(ValueError, match=str(tmp_path)):
        load("fashion-mnist", folder=str(tmp_path))


# --- chars


def test_a_text_is_cut_into_windows_that_say_what_comes_next(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    loaded = load("chars", text=str(tmp_path / "text"))
    assert loaded.classes == 29 and loaded.shape == (64,)
    x, y = loaded.train.batch(torch.arange(8))
    assert x.shape == y.shape == (8, 64) and torch.equal(x[:, 1:], y[:, :-1])
    assert int(loaded.train.labels.max()) == 9


def test_rare_characters_become_one(tmp_path: Path) -> None:
    text = "".join(chr(1000 + i) * (300 - i) for i in range(200)) + "\U0001f600"
    (tmp_path / "text").write_text(text)
    loaded = load("chars", text=str(tmp_path / "text"))
    assert loaded.classes == data.VOCABULARY
    both = torch.cat([loaded.train.inputs, loaded.test.inputs])
    assert int(both.min()) == 0 and int(both.max()) == data.VOCABULARY - 1


def test_the_standard_library_is_there_to_be_learned() -> None:
    loaded = load("chars")
    assert 20_000 < len(loaded.train) + len(loaded.test) <= data.LIBRARY_BYTES // data.CONTEXT
    assert loaded.classes <= data.VOCABULARY


def test_a_text_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing.txt cannot be read: No such file"):
        load("chars", text=str(tmp_path / "missing.txt"))
    (tmp_path / "short").write_text("short")
    with pytest.raises(ValueError, match="has 5 characters, and at least 1281 are needed"):
        load("chars", text=str(tmp_path / "short"))


# --- who learns what


@given(
    labels=st.lists(st.integers(0, 4), min_size=8, max_size=200),
    parts=st.integers(1, 8),
    concentration=st.none() | st.sampled_from([1e-6, 0.01, 0.5, 1.0, 1e6]),
    seed=st.integers(0, 5),
)
def test_every_example_is_in_exactly_one_part_and_no_part_is_empty(
    labels: list[int], parts: int, concentration: float | None, seed: int
) -> None:
    given = partition(torch.tensor(labels), parts, concentration, seed)
    again = partition(torch.tensor(labels), parts, concentration, seed)
    assert sorted(torch.cat(given).tolist()) == list(range(len(labels)))
    assert all(len(part) for part in given) and len(given) == parts
    assert all(torch.equal(a, b) for a, b in zip(given, again, strict=True))


def test_a_small_concentration_leaves_workers_few_labels() -> None:
    labels = torch.arange(10).repeat(200)

    def largest_share(concentration: float | None) -> float:
        parts = partition(labels, 4, concentration, seed=0)
        return float(np.mean([labels[part].bincount().max() / len(part) for part in parts]))

    assert largest_share(None) < 0.15 < largest_share(1.0) < largest_share(0.1)


def test_more_workers_than_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="3 examples cannot be spread over 4 workers"):
        partition(torch.tensor([0, 1, 2]), 4, None, 0)


def _share(rank: int, parts: int = 3, size: int = 4, seed: int = 0, concentration: float | None = None) -> Share:
    examples = data.Images(torch.arange(50, dtype=torch.uint8).view(50, 1, 1, 1), torch.arange(50), 0.0, 1.0)
    return Share(examples, partition(examples.labels % 5, parts, concentration, seed), rank, size, seed)


def _seen(batches: Iterator[data.Batch]) -> list[list[int]]:
    return [y.tolist() for _, y in batches]


@pytest.mark.parametrize("concentration", [None, 0.1])
def test_all_workers_make_the_same_number_of_full_steps(concentration: float | None) -> None:
    for rank in range(3):
        share = _share(rank, concentration=concentration)
        assert share.per_epoch == 4
        assert [len(batch) for batch in _seen(share.epoch(0))] == [4, 4, 4, 4]


def test_an_epoch_sees_an_example_once_where_there_are_enough() -> None:
    seen = [number for rank in range(3) for batch in _seen(_share(rank).epoch(1)) for number in batch]
    assert len(seen) == len(set(seen)) == 48


def test_the_order_depends_on_seed_epoch_and_rank_alone() -> None:
    assert _seen(_share(1).epoch(2)) == _seen(_share(1).epoch(2))
    assert _seen(_share(1).epoch(2)) != _seen(_share(1).epoch(3))
    assert _seen(_share(1, seed=1).epoch(2)) != _seen(_share(1).epoch(2))


def test_an_epoch_goes_on_where_it_was_left() -> None:
    whole = _seen(_share(0).epoch(5))
    for skip in range(5):
        assert _seen(_share(0).epoch(5, skip)) == whole[skip:]


# --- the user's own


def _module(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))


OWN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def pieces():
    dataset = TensorDataset(torch.randn(20, 3), torch.randn(20, 1))
    loader = DataLoader(dataset, batch_size=4, shuffle=True)
    return nn.Linear(3, 1), nn.functional.mse_loss, loader, loader

def make():
    return pieces()

class Make:
    def __init__(self):
        self.model, self.loss, self.train_loader, self.test_loader = pieces()

def broken():
    return 1 / 0

def three():
    return pieces()[:3]

def nothing():
    return None

def no_model():
    return "model", *pieces()[1:]

def no_length():
    model, loss, loader, _ = pieces()
    return model, loss, (batch for batch in loader), loader

def no_batches():
    return *pieces()[:2], [], []
"""


def test_the_users_own_is_found_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _module(tmp_path, "own_good", OWN, monkeypatch)
    for name in ("make", "Make"):
        made = own(f"own_good:{name}")
        assert isinstance(made.model, torch.nn.Linear) and len(made.train_loader) == 5


@pytest.mark.parametrize(
    ("task", "hint"),
    [
        ("own_bad:broken", "ZeroDivisionError: division by zero"),
        ("own_bad:absent", "has no attribute 'absent'"),
        ("own_absent:make", "No module named 'own_absent'"),
        ("own_bad:three", "must return model, loss, train_loader, test_loader"),
        ("own_bad:nothing", "must return model, loss, train_loader, test_loader"),
        ("own_bad:no_model", "model must be a torch.nn.Module, got str"),
        ("own_bad:no_length", "train_loader must be iterable and have a length"),
        ("own_bad:no_batches", "train_loader has no batches"),
    ],
)
def test_what_is_wrong_with_the_users_own_is_told_with_its_cause(
    task: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _module(tmp_path, "own_bad", OWN, monkeypatch)
    with pytest.raises(ValueError) as told:
        own(task)
    assert hint in str(told.value) and task in str(told.value)


def test_an_error_of_the_users_is_told_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _module(tmp_path, "own_syntax", "def make():\n    return {}['key']\n", monkeypatch)
    with pytest.raises(ValueError, match=r"KeyError: 'key' \(.*own_syntax.py, line 2\)"):
        own("own_syntax:make")


def test_a_loader_that_shuffles_gives_the_same_epoch_again() -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(20), torch.arange(20))
    loader = Loader(torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True), 5, rank=0, seed=0)
    whole = _seen(loader.epoch(1))
    torch.rand(100)
    assert _seen(loader.epoch(1)) == whole != _seen(loader.epoch(2))
    assert _seen(loader.epoch(1, skip=3)) == whole[3:]


def test_a_sampler_is_told_the_epoch() -> None:
    told: list[int] = []
    batches = [(torch.zeros(1), torch.zeros(1))] * 2

    class Listed(list[Any]):
        sampler = SimpleNamespace(set_epoch=told.append)

    assert len(list(Loader(Listed(batches), 2, 0, 0).epoch(7))) == 2
    assert told == [7]


def test_a_loader_that_ends_early_or_gives_no_pairs_is_told() -> None:
    pair = (torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="ended after 1 of 2 batches"):
        list(Loader([pair], 2, 0, 0).epoch(0))
    with pytest.raises(ValueError, match="pairs of inputs and targets, got dict"):
        list(Loader([{"x": 1}], 1, 0, 0).epoch(0))


def test_testing_stops_after_two_thousand_examples() -> None:
    batches = [(torch.zeros(300, 1), torch.zeros(300))] * 100
    assert sum(len(y) for _, y in data.tested(batches)) == 2100


def test_random_numbers_go_on_where_they_were() -> None:
    import random

    def draw() -> list[float]:
        return [float(torch.rand(1)), random.gauss(0, 1), float(np.random.normal())]

    data.seed_all([3])
    draw()
    state = data.random_state()
    after = draw()
    data.seed_all([4])
    data.set_random_state(state)
    assert draw() == after
