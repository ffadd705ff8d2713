"""What is learned: images, text, or the user's own; and who learns which part of it.

Batches come in an order that depends on the seed, the epoch and the rank alone, so that an epoch and a number of
batches are all that is needed to go on.
"""

from __future__ import annotations

import gzip
import random
import sysconfig
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from thinwire.jobs import digits, fashion
from thinwire.jobs.own import in_words, maker_of

SPLIT_SEED = 0  # of what is learned and what is tested on: the same in every run, whatever its own seed
CONTEXT = 64  # characters that are seen at once
VOCABULARY = 128  # characters that are told apart; the rarer ones are all one
LIBRARY_BYTES = 2_000_000
TESTED = 2000  # examples

Batch = tuple[Any, Any]
Bytes = NDArray[np.uint8]


class Examples(ABC):
    """Inputs as bytes, which become numbers only in a batch: every worker holds them all.

    Attributes:
        labels: what a non-IID partition goes by.
    """

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.inputs)

    @abstractmethod
    def batch(self, rows: torch.Tensor) -> Batch:
        """The inputs and what the model should say to them."""

    def batches(self, size: int) -> Iterator[Batch]:
        """The first 2000 in order, to test with."""
        for rows in torch.split(torch.arange(min(len(self), TESTED)), size):
            yield self.batch(rows)


class Images(Examples):
    """Images of one channel, scaled to mean 0 and deviation 1 as `mean` and `deviation` say."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor, mean: float, deviation: float) -> None:
        super().__init__(inputs, labels)
        self._mean, self._deviation = mean, deviation

    def batch(self, rows: torch.Tensor) -> Batch:
        return (self.inputs[rows].float() - self._mean) / self._deviation, self.labels[rows]


class Text(Examples):
    """Windows of a text: each character is to be told from those before it. The label is the tenth it comes from."""

    def batch(self, rows: torch.Tensor) -> Batch:
        windows = self.inputs[rows].long()
        return windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True, kw_only=True)
class Data:
    """What to train and what to test with.

    Attributes:
        shape: of one input: channels, height and width of an image, the length of a text.
        classes: among how many the model has to choose.
    """

    train: Examples
    test: Examples
    shape: tuple[int, ...]
    classes: int


def load(name: str, *, folder: str | None = None, text: str | None = None) -> Data:
    """Digits, fashion-mnist or chars. What is missing or damaged is a ValueError that says what to do.

    Args:
        folder: of fashion-mnist's files; None to look where they usually are.
        text: the file for chars; None for the source text of this Python's standard library.
    """
    if name == "digits":
        return _digits()
    return _fashion(folder) if name == "fashion-mnist" else _chars(text)


# --- digits


def _digits() -> Data:
    """Scikit-learn's 1,797 images of 8 x 8."""
    pixels, labels = _scikit_learns()
    train, test = _split(len(labels), share=0.2)
    inputs = torch.from_numpy(pixels.astype(np.uint8)).view(-1, 1, 8, 8)
    targets = torch.from_numpy(labels.astype(np.int64))
    learned, tested = (Images(inputs[rows], targets[rows], mean=4.88, deviation=6.02) for rows in (train, test))
    return Data(train=learned, test=tested, shape=(1, 8, 8), classes=10)


def _scikit_learns() -> tuple[NDArray[Any], NDArray[Any]]:
    """Pixels and labels from its file, where that is as we know it: to import it takes a second on every worker."""
    path = digits.find()
    if path.is_file():
        table = np.loadtxt(path, delimiter=",")
        return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return bunch.data, bunch.target


def _split(number: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows to train and to test with."""
    order = torch.from_numpy(np.random.default_rng(SPLIT_SEED).permutation(number))
    tested = int(number * share)
    return order[tested:], order[:tested]


# --- fashion-mnist


def _fashion(folder: str | None) -> Data:
    """60,000 and 10,000 images of 28 x 28, in the IDX files of their authors."""
    files = fashion.find(folder)
    train, test = (_images(files, part) for part in ("train", "t10k"))
    return Data(train=train, test=test, shape=tuple(train.inputs.shape[1:]), classes=10)


def _images(files: Mapping[str, Path], part: str) -> Images:
    images, labels = (_idx(files[f"{part}-{name}-ubyte"]) for name in ("images-idx3", "labels-idx1"))
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or (labels.size and labels.max() > 9):
        place = files[f"{part}-images-idx3-ubyte"].parent
        raise ValueError(f"{place} has {part} images of shape {images.shape} that do not fit labels of {labels.shape}.")
    inputs = torch.from_numpy(images).unsqueeze(1)
    return Images(inputs, torch.from_numpy(labels.astype(np.int64)), mean=72.94, deviation=90.02)


def _idx(path: Path) -> Bytes:
    """An array of bytes as IDX has it: 0, 0, the type, the number of sides, the sides, the bytes."""
    try:
        raw = path.read_bytes()
        content = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    head = content[:4]
    sides = 4 + 4 * head[3] if len(head) == 4 else 0
    if len(head) < 4 or head[:3] != b"\0\0\x08" or len(content) < sides:
        raise ValueError(f"{path} is no IDX file of bytes: it begins with {head.hex() or 'nothing'}.")
    shape = tuple(int(side) for side in np.frombuffer(content[4:sides], ">u4"))
    if len(content) - sides != np.prod(shape, dtype=object):
        raise ValueError(f"{path} is cut off or damaged: {len(content) - sides} bytes do not fill the shape {shape}.")
    return np.frombuffer(content, np.uint8, offset=sides).reshape(shape).copy()


# --- chars


def _chars(text: str | None) -> Data:
    """Windows of a text, one after the other, without overlap."""
    codes, classes = _encoded(_standard_library() if text is None else _text(Path(text)))
    number = (len(codes) - 1) // CONTEXT
    if number < 20:
        raise ValueError(f"{text} has {len(codes)} characters, and at least {20 * CONTEXT + 1} are needed.")
    starts = np.arange(number) * CONTEXT
    inputs = torch.from_numpy(codes[starts[:, None] + np.arange(CONTEXT + 1)])
    labels = torch.from_numpy(starts * 10 // len(codes))
    train, test = _split(number, share=0.05)
    train_text, test_text = (Text(inputs[rows], labels[rows]) for rows in (train, test))
    return Data(train=train_text, test=test_text, shape=(CONTEXT,), classes=classes)


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error


def _standard_library() -> str:
    """The first 2 MB of this Python's own modules, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    pieces, left = [], LIBRARY_BYTES
    for path in sorted(folder.glob("*.py")):
        pieces.append(_text(path)[:left])
        left -= len(pieces[-1])
        if left <= 0:
            break
    if left == LIBRARY_BYTES:
        raise ValueError(f"{folder} holds no source text: name a file to learn.")
    return "".join(pieces)


def _encoded(text: str) -> tuple[Bytes, int]:
    """A number for every character: 1 for the most frequent, 0 for all that are too rare; and how many there are."""
    points = np.frombuffer(text.encode("utf-32-le", errors="replace"), np.uint32)
    known, where, counts = np.unique(points, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")[: VOCABULARY - 1]
    number_of = np.zeros(len(known), np.uint8)
    number_of[order] = np.arange(1, len(order) + 1)
    return number_of[where.reshape(-1)], len(order) + 1


# --- who learns what


def partition(labels: torch.Tensor, parts: int, concentration: float | None, seed: int) -> list[torch.Tensor]:
    """The rows of each worker: every row in exactly one part, and no part empty.

    Args:
        concentration: None to spread the rows evenly. Otherwise each label's rows are spread by shares from a symmetric
            Dirichlet distribution: 100 is almost even, 0.1 leaves most workers few labels.
    """
    if len(labels) < parts:
        raise ValueError(f"{len(labels)} examples cannot be spread over {parts} workers.")
    generator = np.random.default_rng([seed, 0x9A27])
    if concentration is None:
        return [torch.from_numpy(rows) for rows in np.array_split(generator.permutation(len(labels)), parts)]
    whose = np.empty(len(labels), np.int64)
    for label in np.unique(labels.numpy()):
        rows = generator.permutation(np.flatnonzero(labels.numpy() == label))
        shares = generator.dirichlet(np.full(parts, concentration))
        ends = np.floor(np.cumsum(np.nan_to_num(shares)) * len(rows)).astype(np.int64)
        ends[-1] = len(rows)
        whose[rows] = np.searchsorted(ends, np.arange(len(rows)), side="right")
    _fill_empty(whose, parts)
    return [torch.from_numpy(generator.permutation(np.flatnonzero(whose == part))) for part in range(parts)]


def _fill_empty(whose: NDArray[np.int64], parts: int) -> None:
    """Whoever has nothing gets an example of whoever has most."""
    counts = np.bincount(whose, minlength=parts)
    for part in np.flatnonzero(counts == 0):
        richest = int(np.argmax(counts))
        whose[np.flatnonzero(whose == richest)[0]] = part
        counts[richest] -= 1
        counts[part] += 1


class Batches(ABC):
    """What a worker trains with.

    Attributes:
        per_epoch: batches in an epoch, as many as the other workers'.
    """

    per_epoch: int

    @abstractmethod
    def epoch(self, number: int, skip: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from the one after `skip` on, in an order that is the same every time."""


class Share(Batches):
    """A worker's part of the examples.

    Parts may differ in size while all workers make as many steps: one with fewer examples than there is room for in an
    epoch sees them again, one with more sees others in the next epoch.
    """

    def __init__(self, examples: Examples, parts: Sequence[torch.Tensor], rank: int, size: int, seed: int) -> None:
        self._examples, self._rows, self._rank, self._size, self._seed = examples, parts[rank], rank, size, seed
        self.per_epoch = max(1, len(examples) // (len(parts) * size))

    def epoch(self, number: int, skip: int = 0) -> Iterator[Batch]:
        generator = np.random.default_rng([self._seed, number, self._rank])
        wanted, orders = self.per_epoch * self._size, [np.empty(0, np.int64)]
        while sum(map(len, orders)) < wanted:
            orders.append(generator.permutation(len(self._rows)))
        order = torch.from_numpy(np.concatenate(orders))
        starts = range(skip * self._size, wanted, self._size)
        return (self._examples.batch(self._rows[order[start : start + self._size]]) for start in starts)


# --- random numbers of the user's


def seed_all(words: Sequence[int]) -> None:
    """Let everything begin again that is random without a generator of its own."""
    number = int(np.random.default_rng(words).integers(2**32))
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def random_state() -> dict[str, Any]:
    """What `set_random_state` goes back to."""
    version, numbers, gauss = random.getstate()
    kind, words, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(numbers), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(words, np.int64)), *rest],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))


# --- the user's own


class Own(NamedTuple):
    """What the user's function returned."""

    model: nn.Module
    loss: Any
    train_loader: Any
    test_loader: Any


def own(task: str) -> Own:
    """What `make` of `package.module:make` returns: (model, loss, train_loader, test_loader), or an object with these.

    The module is found from the current directory. `loss(model(x), y)` is a number to go down, loaders give pairs of x
    and y, and `len(train_loader)` is the number of batches in an epoch. Loaders are the user's: each worker calls
    `make` for itself, and unless the loader is sharded (a DistributedSampler, or torch.distributed.get_rank() in
    `make`), all workers learn the same. A run that goes on skips the batches that it has had; random numbers are seeded
    before each epoch, so that a loader that shuffles gives them in the same order.
    """
    make = maker_of(task)
    try:
        made = make()
    except Exception as error:
        raise ValueError(f"{task} failed: {in_words(error)}") from error
    if not isinstance(made, (tuple, list)):
        missing = [field for field in Own._fields if not hasattr(made, field)]
        made = () if missing else [getattr(made, field) for field in Own._fields]
    if len(made) != len(Own._fields):
        raise ValueError(f"{task} must return {', '.join(Own._fields)}, or an object with these.")
    return _checked(task, Own(*made))


def _checked(task: str, made: Own) -> Own:
    wrong = {
        "model must be a torch.nn.Module": not isinstance(made.model, nn.Module),
        "loss must be callable": not callable(made.loss),
        "train_loader must be iterable and have a length": not (
            isinstance(made.train_loader, Iterable) and hasattr(made.train_loader, "__len__")
        ),
        "test_loader must be iterable": not isinstance(made.test_loader, Iterable),
    }
    for sentence, is_so in wrong.items():
        if is_so:
            got = type(getattr(made, sentence.split()[0])).__name__
            raise ValueError(f"{task} returned what cannot be trained: {sentence}, got {got}.")
    if len(made.train_loader) == 0:
        raise ValueError(f"{task} returned what cannot be trained: train_loader has no batches.")
    return made


class Loader(Batches):
    """A loader of the user's, cut to the number of batches that all workers have."""

    def __init__(self, loader: Any, per_epoch: int, rank: int, seed: int) -> None:
        self._loader, self._rank, self._seed = loader, rank, seed
        self.per_epoch = per_epoch

    def epoch(self, number: int, skip: int = 0) -> Iterator[Batch]:
        seed_all([self._seed, number, self._rank])
        sampler: Any = getattr(self._loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(number)
        batches = iter(self._loader)
        for position in range(skip):
            self._next(batches, position)
        return (self._next(batches, position) for position in range(skip, self.per_epoch))

    def _next(self, batches: Iterator[Any], position: int) -> Batch:
        batch = next(batches, None)
        if batch is None:
            raise ValueError(f"train_loader ended after {position} of {self.per_epoch} batches.")
        return _pair(batch)


def tested(loader: Any) -> Iterator[Batch]:
    """The first batches of the user's test_loader, as many as make 2000 examples."""
    seen = 0
    for batch in loader:
        x, y = _pair(batch)
        yield x, y
        seen += len(y)
        if seen >= TESTED:
            return


def _pair(batch: Any) -> Batch:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(f"a loader must give pairs of inputs and targets, got {type(batch).__name__}.")
    return batch[0], batch[1]
