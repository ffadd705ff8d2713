"""Where Fashion-MNIST lies on this machine: four IDX files, as their authors made them."""

from __future__ import annotations

from pathlib import Path

PLACES = (
    "/usr/share/datasets/fashion-mnist",
    "/usr/share/dataset-fashion-mnist",
    "/usr/share/fashion-mnist",
    "~/.cache/fashion-mnist",
)
FILES = tuple(f"{part}-{name}-ubyte" for part in ("train", "t10k") for name in ("images-idx3", "labels-idx1"))


def find(folder: str | None) -> dict[str, Path]:
    """The four files by name, packed or not, in the folder, or else where they usually are."""
    places = [Path(place).expanduser() for place in (PLACES if folder is None else (folder,))]
    for place in places:
        if _file(place, FILES[0]) is not None:
            return {name: _required(place, name) for name in FILES}
    where = f"none of {', '.join(map(str, places))}" if folder is None else f"not in {folder}"
    raise ValueError(
        f"Fashion-MNIST's {FILES[0]}.gz is {'in ' if folder is None else ''}{where}: install the Debian package "
        "dataset-fashion-mnist, or name the folder of the four IDX files."
    )


def _required(place: Path, name: str) -> Path:
    path = _file(place, name)
    if path is None:
        raise ValueError(f"{place / name}.gz is missing: install the Debian package dataset-fashion-mnist again.")
    return path


def _file(place: Path, name: str) -> Path | None:
    return next((path for path in (place / f"{name}.gz", place / name) if path.is_file()), None)
