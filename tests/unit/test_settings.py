"""Settings from a file: what cannot be is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.jobs.job import Job, Mistake
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
        ('seed = 1\nmethod = "adaptve"\n', 2, "Did you mean 'adaptive'?"),
        ('seed = 1\nmethod = "star-topk@2"\n', 2, "the ratio of 'star-topk@2' must be"),
        ('seed = 1\npartition = "dirichlet"\n', 2, "dirichlet:0.5"),
        ('seed = 1\ntask = "digit"\n', 2, "Did you mean 'digits'?"),
        ('text = "a.txt"\ntask = "digits"\n', 1, "chars only"),
        ("seed = 1\nratios = [0.1, 0.01]\n", 2, "0 < low <= high <= 1"),
        ('seed = 1\nnetwork = "hom"\n', 2, "Did you mean 'home'?"),
        ('seed = 1\nnetwork = "nowhere.toml"\n', 2, "nowhere.toml cannot be read"),
        ('network = "lte"\nseed = 1\nspeed = 1e300\n', 3, "let its schedule run more slowly."),
        ('seed = 1\nrate = "50 foo"\n', 2, "rate: '50 foo' is not a rate"),
        ('seed = 1\nnetwork = "home"\n\nlatency = "5"\n', 4, "latency: '5' is not a time"),
        ('latency = "5ms"\nlink = "loopback"\nrate = "0mbit"\n', 3, "rate: '0mbit' is not a rate"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_line(text: str, line: int, hint: str, tmp_path: Path) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(ValueError) as told:
        Settings.read(path).job()
    assert str(told.value).startswith(f"{path}:{line}: ")
    assert hint in str(told.value)


def test_what_stands_in_a_text_of_many_lines_is_no_setting(tmp_path: Path) -> None:
    texts = ['"""\nhosts = 1\n\\""" a\n"""', "'''\nhosts = 1\n\"\"\"\n'''", "\"'''\" # '''"]
    for text in texts:
        path = _file(tmp_path, f'out = {text}\n# """\nhosts = 0\n')
        with pytest.raises(ValueError) as told:
            Settings.read(path).job()
        assert str(told.value).startswith(f"{path}:{path.read_text().count(chr(10))}: hosts must be")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"seed = 1\nseconds = {10**400}\n", ":2: seconds must have fewer digits."),
        (f"steps = {10**400}\n", ":1: steps must have fewer digits."),
        (f"ratios = [0.1, {10**400}]\n", ":1: ratios must have fewer digits."),
        (f"steps = 1{'0' * 5000}\n", " cannot be read: it has a number of more than 4300 digits."),
        (f"ratios = {'[' * 5000}{']' * 5000}\n", " cannot be read: its arrays or tables are nested too deeply."),
    ],
)
def test_a_file_without_measure_is_one_sentence(text: str, says: str, tmp_path: Path) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(ValueError) as told:
        Settings.read(path).job()
    assert str(told.value) == f"{path}{says}"


def test_every_setting_that_a_job_refuses_is_named() -> None:
    values = {"task": "digit", "ratios": 1, "name": "a/b", "method": "dpp", "partition": "evenly", "hosts": 0}
    values |= {"target": 2, "momentum": 1, "seed": -1, "port": 0, "checkpoint_every": -1, "scale": 2, "timeout": 0}
    values |= {"model": "gpt", "text": "a", "folder_of_data": "a", "optimizer": "lion", "link": "wifi", "steps": 1.5}
    for key, value in values.items():
        with pytest.raises(Mistake) as told:
            Job(**{key: value})
        assert told.value.key == key


def test_a_mistake_in_an_option_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    path = _file(tmp_path, 'seed = 1\nlatency = "5ms"\nmethod = "ddp"\n')
    for given, told in (({"network": "hom"}, "there is no network 'hom'"), ({"latency": "5"}, "latency: '5' is")):
        with pytest.raises(ValueError, match=f"^{told}"):
            Settings.read(path).job(**given)


def test_a_file_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        Settings.read(tmp_path / "missing.toml").job()
    with pytest.raises(ValueError, match="line 1"):
        Settings.read(_file(tmp_path, "task digits")).job()
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="no text"):
        Settings.read(tmp_path / "bytes.toml").job()
