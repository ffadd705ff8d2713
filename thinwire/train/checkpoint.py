"""A rank's state on disk: no pickle, committed by one rename, and a bit flipped anywhere is noticed.

    DIRECTORY/step-000000120/rank-00003.safetensors     every tensor, named by where it is in the state
    DIRECTORY/step-000000120/rank-00003.json            the manifest: all the rest, and the hash of both files

The manifest is renamed into place last: a step whose manifest is there was committed, a step without one never was.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import reprlib
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from thinwire.errors import CheckpointError
from thinwire.train.packing import Json, pack, read_tensors, tensor_file, unpack

FORMAT = "thinwire-checkpoint"
VERSION = 1

MAX_MANIFEST_BYTES = 8 * 2**20  # bounds what a stranger's manifest can cost; ours keep to it too

_CHUNK_BYTES = 2**22
_SEAL = b'{"sha256":"%s",'


class Checkpoint:
    """Saves and loads the state of one rank, and keeps the newest `keep` generations.

    A state is made of dicts (with str or int keys), lists, tuples, tensors, ints, floats, bools, strings and None. It
    comes back bit for bit, with three simplifications: a subclass comes back as its plain base (an OrderedDict as a
    dict, a named tuple as a tuple), a tensor comes back on the CPU without its graph, and tensors that shared memory
    come back apart.

    Each rank commits alone. Ranks that were killed while saving may hold different newest steps: resume from the newest
    step that is in `steps()` of all of them.

    >>> import tempfile
    >>> checkpoint = Checkpoint(tempfile.mkdtemp(), rank=0, world_size=1)
    >>> checkpoint.save({"error": torch.tensor([0.5, -1.0]), "best": float("inf")}, step=120)
    >>> checkpoint.load()
    ({'error': tensor([ 0.5000, -1.0000]), 'best': inf}, 120)

    Args:
        directory: where the generations are; made when it is missing. All ranks may share one.
        rank: whose state this is.
        world_size: how many ranks the run has; a state saved among another number of ranks is refused.
        keep: how many complete generations stay, 2 or more where a rank may die while others save.
    """

    def __init__(self, directory: str | os.PathLike[str], rank: int, world_size: int, keep: int = 2) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, world_size), got {rank=} and {world_size=}.")
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep=}.")
        self.directory = Path(directory)
        self.rank = rank
        self.world_size = world_size
        self.keep = keep

    def save(self, state: object, step: int) -> None:
        """Write `state` as the generation of `step`, then remove the generations that are too old.

        Everything is on the disk when this returns. When it raises, no temporary file is left and the generations of
        other steps are as they were. Later steps, left by a run that went on further, are never touched.
        """
        if not 0 <= step < 10**18:
            raise ValueError(f"step must be in [0, 10^18), got {step=}.")
        tensors: dict[str, torch.Tensor] = {}
        structure = pack(state, "state", tensors)
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._folder(step).is_symlink():
            raise CheckpointError(f"{self._folder(step)} is a link: nothing is written outside of the directory.")
        try:
            self._write(step, structure, tensors)
        except BaseException:
            self._clear_uncommitted(step)
            raise
        _sync(self.directory)
        self._remove_old(step)

    def steps(self) -> list[int]:
        """The steps that `load` can go back to, ascending. Looks at manifests and sizes; only `load` hashes tensors."""
        return [step for step in self._committed() if self._is_complete(step)]

    def damaged(self) -> list[int]:
        """The steps that were saved whole and are not whole any more, ascending, as far as sizes tell."""
        return [step for step in self._committed() if not self._is_complete(step)]

    def load(self, step: int | None = None) -> tuple[Any, int]:
        """Return the state saved at `step`, or the newest one, and its step. Every hash is checked before that.

        A damaged newest generation is an error and never a silent step back: ranks that fall back alone would train
        from different steps.
        """
        if step is not None:
            return self._load(step), step
        newest = max(self._committed(), default=None)
        if newest is None:
            raise CheckpointError(f"{self.directory} holds no checkpoint of rank {self.rank}.")
        try:
            return self._load(newest), newest
        except CheckpointError as exc:
            raise CheckpointError(f"{exc} {self._way_back(newest)}") from exc

    def _load(self, step: int) -> object:
        data, path = self._files(step)
        manifest = self._manifest(step)
        _check_data(data, manifest)
        tensors = read_tensors(data)
        try:
            state = unpack(manifest.structure, tensors)
        except (ValueError, TypeError) as exc:
            raise CheckpointError(f"{path} describes no state: {exc}.") from exc
        if tensors:
            raise CheckpointError(f"{data} holds tensors that its manifest does not name: {reprlib.repr([*tensors])}.")
        return state

    def _manifest(self, step: int) -> _Manifest:
        """Read the manifest of `step` and make sure that it is whole, ours, and of this rank, world and step."""
        path = self._files(step)[1]
        content = _unseal(path)
        found = {name: reprlib.repr(content.get(name)) for name in ("format", "version", "rank", "world_size", "step")}
        if content.get("format") != FORMAT:
            raise CheckpointError(f"{path} has the foreign format {found['format']}, not {FORMAT!r}.")
        if content.get("version") != VERSION:
            wanted = f"this thinwire reads version {VERSION}. Load it with the thinwire that wrote it."
            raise CheckpointError(f"{path} has format version {found['version']}, {wanted}")
        if content.get("rank") != self.rank:
            wanted = f"this is rank {self.rank}. It was copied or renamed: put this rank's own file back."
            raise CheckpointError(f"{path} was written by rank {found['rank']}, {wanted}")
        if content.get("world_size") != self.world_size:
            wanted = f"this run has {self.world_size}. Resume with as many ranks, or start afresh in another directory."
            raise CheckpointError(f"{path} was written in a run of {found['world_size']} ranks, {wanted}")
        if content.get("step") != step:
            raise CheckpointError(f"{path} was written at step {found['step']}: its folder was renamed.")
        return _Manifest(content.get("bytes"), content.get("tensors_sha256"), content.get("structure"))

    def _write(self, step: int, structure: Json, tensors: dict[str, torch.Tensor]) -> None:
        """Write both files under temporary names, then rename: whatever can run out of space happens first."""
        data, manifest = self._files(step)
        nbytes, sha256 = _write_new(_temporary(data), tensor_file(tensors))
        content: dict[str, Json] = {
            "format": FORMAT,
            "version": VERSION,
            "rank": self.rank,
            "world_size": self.world_size,
            "step": step,
            "bytes": nbytes,
            "tensors_sha256": sha256,
            "structure": structure,
        }
        _write_new(_temporary(manifest), [_seal(content)])
        if manifest.exists():  # This step again: without this, its old manifest would be found beside new tensors.
            manifest.unlink()
            _sync(manifest.parent)
        for path in (data, manifest):
            os.replace(_temporary(path), path)
            _sync(path.parent)

    def _clear_uncommitted(self, step: int) -> None:
        """Remove what a failed save left of `step`, but not a generation that is committed."""
        data, manifest = self._files(step)
        committed = manifest.exists()
        for path in (_temporary(data), _temporary(manifest), *([] if committed else [data])):
            with suppress(OSError):
                path.unlink()
        with suppress(OSError):  # other ranks' files may be in it
            self._folder(step).rmdir()

    def _remove_old(self, step: int) -> None:
        """Remove this rank's files of every step before the `keep` newest complete ones up to `step`."""
        complete = [other for other in self.steps() if other <= step]
        if len(complete) <= self.keep:
            return
        for old in self._folders():
            if old < complete[-self.keep]:
                self._remove(old)

    def _remove(self, step: int) -> None:
        data, manifest = self._files(step)
        for path in (manifest, data, _temporary(manifest), _temporary(data)):  # first the manifest: not half a step
            path.unlink(missing_ok=True)
        with suppress(OSError):  # other ranks' files may be in it
            self._folder(step).rmdir()

    def _is_complete(self, step: int) -> bool:
        try:
            return _size(self._files(step)[0]) == self._manifest(step).nbytes
        except CheckpointError:
            return False

    def _way_back(self, damaged: int) -> str:
        older = [step for step in self.steps() if step < damaged]
        if not older:
            return "No older step can be loaded instead."
        return f"Step {older[-1]} is older and complete: load(step={older[-1]}) on every rank goes back to it."

    def _committed(self) -> list[int]:
        return [step for step in self._folders() if os.path.lexists(self._files(step)[1])]

    def _folders(self) -> list[int]:
        """Every step that has a folder, ascending."""
        names: list[str] = []
        with suppress(FileNotFoundError), os.scandir(self.directory) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        steps = [int(name[5:]) for name in names if re.fullmatch("step-([0-9]{9}|[1-9][0-9]{9,17})", name)]
        return sorted(steps)

    def _folder(self, step: int) -> Path:
        return self.directory / f"step-{step:09d}"

    def _files(self, step: int) -> tuple[Path, Path]:
        """The tensors and the manifest. Names are computed here and never read from a file."""
        stem = self._folder(step) / f"rank-{self.rank:05d}"
        return stem.with_suffix(".safetensors"), stem.with_suffix(".json")


class _Manifest(NamedTuple):
    """What a verified manifest says: how many bytes the tensors take, their hash, and how the state is built.

    None of it is trusted to be of the right type: the first two are only compared, the last is checked as it is used.
    """

    nbytes: Json
    sha256: Json
    structure: Json


def _check_data(path: Path, manifest: _Manifest) -> None:
    """Compare the tensor file with what the manifest says of it: first the size, then every byte."""
    size = _size(path)
    if size != manifest.nbytes:
        expected = reprlib.repr(manifest.nbytes)
        raise CheckpointError(f"{path} is truncated or grown: it has {size} bytes, its manifest says {expected}.")
    digest = hashlib.sha256()
    with _open(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != manifest.sha256:
        raise CheckpointError(f"{path} is damaged: its bytes do not have the SHA-256 that its manifest says.")


def _seal(content: dict[str, Json]) -> bytes:
    """Canonical JSON of `content`, with the SHA-256 of exactly those bytes put in front as its first member.

    The hash is of bytes and not of values, so it is checked before anything is parsed.
    """
    body = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    if len(body) > MAX_MANIFEST_BYTES - 100:
        limit = f"a manifest may have {MAX_MANIFEST_BYTES}. Put long lists of numbers into tensors."
        raise ValueError(f"The state without its tensors takes {len(body)} bytes of JSON, {limit}")
    return _SEAL % hashlib.sha256(body).hexdigest().encode() + body[1:]


def _unseal(path: Path) -> dict[str, Json]:
    """Read a manifest, check that not a bit of it has changed, and only then parse it."""
    size = _size(path)
    if size > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{path} has {size} bytes, a manifest has at most {MAX_MANIFEST_BYTES}.")
    with _open(path) as file:
        raw = file.read(MAX_MANIFEST_BYTES)
    head = len(_SEAL % (b"0" * 64))
    if raw[:1] != _SEAL[:1] or not raw.endswith(b"}\n"):
        raise CheckpointError(f"{path} is truncated or of a foreign format: it has {len(raw)} bytes and no proper end.")
    if raw[:head] != _SEAL % hashlib.sha256(b"{" + raw[head:]).hexdigest().encode():
        raise CheckpointError(f"{path} is damaged or of a foreign format: it does not have the SHA-256 that it says.")
    try:
        content = json.loads(raw, parse_constant=_refuse)
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{path} is no valid JSON: {exc}.") from exc
    assert isinstance(content, dict), "what starts with a brace is an object"
    return content


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _write_new(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a new file, push it to the disk, and return its size and its SHA-256."""
    path.unlink(missing_ok=True)  # Left by a save that was killed. Opening with "x" then follows no link either.
    digest = hashlib.sha256()
    nbytes = 0
    with _create(path) as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            nbytes += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return nbytes, digest.hexdigest()


def _create(path: Path) -> BinaryIO:
    """Open a new file, in a folder that another rank may remove for as long as it is empty."""
    while True:
        path.parent.mkdir(exist_ok=True)
        try:
            return open(path, "xb")
        except FileNotFoundError:
            if not path.parent.parent.is_dir():
                raise


def _sync(folder: Path) -> None:
    """Push the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(path: Path) -> int:
    with _open(path) as file:
        return os.fstat(file.fileno()).st_size


def _open(path: Path) -> BinaryIO:
    """Open a regular file to read. Links are not followed and pipes do not block: both may be a stranger's trap."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as exc:
        raise CheckpointError(f"{path} is missing.") from exc
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read: {exc.strerror}.") from exc
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file.")
    return os.fdopen(descriptor, "rb")
