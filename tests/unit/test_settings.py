"""Settings from a file: what cannot be is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.jobs.job import Job
from thinwire.jobs.settings import Settings


def _file(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


def test_a_file_is_read_and_options_win(tmp_path: Path) -> None:
    path = _file(tmp_path, 'task = "chars"\nhosts = 8\nratios = [0.01, 0.1]\nlr = 1\nseed = 3\n')
    assert Settings.read(path).job() == Job(task="chars", hosts=8, ratios=(0.01, 0.1), lr=1.0, seed=3)
    assert Settings.read(path).job(hosts=2).hosts == 2


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ('task = "digits"\nhost = 4\n', 2, "'host' is no setting of a job. Did you mean 'hosts'?"),
        ('task = "digits"\n\n# hots\n"hots" = 4\n', 4, "Did you mean 'hosts'?"),
        ("[training]\nlr = 1.0\n", 1, "'training' is no setting"),
        ("seed = 1\n[hosts]\nnumber = 4\n", 2, "must be no table"),
        ('seed = 1\nhosts = "four"\n', 2, "hosts must be a whole number"),
        ("seed = 1\n\nhosts = 0\n", 3, "hosts must be from 1 to 200, got 0."),
        ('seed = 1\nmethod = "ddp"\nlink = "lap"\n', 3, "Did you mean 'lab'?"),
        ('seed = 1\nnetwork = "hom"\n', 2, "Did you mean 'home'?"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_line(text: str, line: int, hint: str, tmp_path: Path) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(ValueError) as told:
        Settings.read(path).job()
    assert str(told.value).startswith(f"{path}:{line}: ")
    assert hint in str(told.value)


def test_a_file_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        Settings.read(tmp_path / "missing.toml").job()
    with pytest.raises(ValueError, match="line 1"):
        Settings.read(_file(tmp_path, "task digits")).job()
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="no text"):
        Settings.read(tmp_path / "bytes.toml").job()
