"""A lab for an ordinary user, and what is said where there can be none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import thinwire
from tests.lab.leftovers import left_behind
from thinwire.lab import light, namespaces, registry
from thinwire.lab.errors import LabUnavailable
from thinwire.lab.lab import Lab

pytestmark = pytest.mark.lab

PACKAGE = Path(thinwire.__file__).parent

ORDINARY = '''
import sys, types
thinwire = types.ModuleType("thinwire")
thinwire.__path__ = [sys.argv[1]]
sys.modules["thinwire"] = thinwire
from thinwire.lab import check, errors
from thinwire.lab.lab import Lab
from thinwire.lab.settings import Change, read_values
from thinwire.lab.schedule import Schedule
import subprocess
MTU = """
import fcntl, socket, struct
device = fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8921, struct.pack("16s24x", b"wire0"))
print(struct.unpack_from("i", device, 16)[0])
"""
try:
    values = read_values({"latency": "5ms", "rate": "10mbit"})
    with Lab(2, Schedule(name="test", changes=(Change(values=values),))) as lab:
        script = 'id -u; getent hosts 10.77.0.2; exec $0 -c "$1"'
        seen = lab.start(0, ["sh", "-c", script, sys.executable, MTU], stdout=subprocess.PIPE)
        print(seen.communicate()[0].decode().strip(), min(check.round_trips(lab, number=25)))
except errors.LabUnavailable as error:
    print("unavailable:", error)
'''

NOBODY = 65534


@pytest.fixture
def shared() -> Iterator[Path]:
    """A place that any user may see, with our code, an open TUN device, and an interpreter to be found."""
    place = Path(tempfile.mkdtemp())
    try:
        place.chmod(0o755)
        shutil.copytree(PACKAGE / "lab", place / "thinwire" / "lab", ignore=shutil.ignore_patterns("__pyc*"))
        shutil.copy(PACKAGE / "errors.py", place / "thinwire")
        subprocess.run(["chmod", "-R", "a+rX", str(place)], check=True)
        yield place
    finally:
        shutil.rmtree(place)


def as_nobody(place: Path, **env: str) -> str:
    if os.geteuid() != 0:
        pytest.skip("only root can become an ordinary user")
    for python in (sys.executable, "/usr/bin/python3.11", "/usr/bin/python3.12", "/usr/bin/python3"):
        try:
            subprocess.run(
                [python, "-I", "-c", "import sys; assert sys.version_info >= (3, 11)"], user=NOBODY, check=True
            )
            break
        except (OSError, subprocess.CalledProcessError):
            continue
    else:
        pytest.skip("no interpreter here that an ordinary user may start")
    (place / "labs").mkdir()
    os.chown(place / "labs", NOBODY, NOBODY)
    (place / "labs").chmod(0o700)
    command = [python, "-I", "-S", "-B", "-c", ORDINARY, str(place / "thinwire")]
    settings = {registry.FOLDER_VARIABLE: str(place / "labs"), "PATH": os.environ["PATH"], **env}
    result = subprocess.run(
        command, user=NOBODY, group=NOBODY, extra_groups=[], env=settings, capture_output=True, text=True, cwd="/"
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_an_ordinary_user_has_a_lab_too(shared: Path) -> None:
    if not Path("/proc/sys/user/max_user_namespaces").exists():
        pytest.skip("this kernel has no user namespaces")
    try:
        os.mknod(shared / "tun", 0o020666, os.makedev(10, 200))
    except PermissionError:
        pytest.skip("no device can be made here")
    (shared / "tun").chmod(0o666)
    answer = as_nobody(shared, **{namespaces.TUN_VARIABLE: str(shared / "tun")})
    if "user namespaces" in answer:
        pytest.skip(answer)
    user, address, name, mtu, fastest = answer.split()
    assert int(user) == NOBODY
    assert (address, name, mtu) == ("10.77.0.2", "host-1", "1500")
    assert float(fastest) == pytest.approx(0.01, abs=0.001)  # others may wait for a busy machine
    assert list((shared / "labs").iterdir()) == []


def test_without_the_device_the_message_says_what_is_missing_and_what_else_there_is(shared: Path) -> None:
    answer = as_nobody(shared, **{namespaces.TUN_VARIABLE: str(shared / "none")})
    assert "unavailable" in answer
    assert "none cannot be opened" in answer or "user namespaces" in answer
    assert "thinwire.link.shaped" in answer


def test_root_is_told_too(folder: Path) -> None:
    with pytest.raises(LabUnavailable, match="cannot be opened"), Lab(1, tun="/nowhere"):
        pass
    assert left_behind(folder) == ([], [])


def test_a_bare_interpreter_imports_no_torch() -> None:
    code = "import sys; print('torch' in sys.modules)"
    boot = light.command("thinwire.lab.relay")
    boot[boot.index("-c") + 1] = boot[boot.index("-c") + 1].replace(").main(sys.argv[3:])", f"); {code}")
    assert subprocess.run(boot, capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("arguments", ["--help", "ps", "run --hosts 1 -- true"])
def test_lab_commands_import_no_torch(arguments: str, folder: Path) -> None:
    code = "import sys; from thinwire.cli import app; app(standalone_mode=False); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "lab", *arguments.split()]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert result.stdout.splitlines()[-1] == "False"
