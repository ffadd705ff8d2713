"""What runs in a lab: commands, how they end, and labs that are changed while they run."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import thinwire
from tests.disks import fill, small_disk
from tests.lab.leftovers import left_behind
from tests.lab.networks import lab
from tests.timing import timing
from thinwire.cli import app
from thinwire.lab import check, registry
from thinwire.lab.errors import LabError
from thinwire.lab.lab import Lab, visit
from thinwire.lab.network import Change
from thinwire.lab.run import run
from thinwire.lab.schedule import Schedule

pytestmark = pytest.mark.lab

ROOT = Path(thinwire.__file__).parents[1]


# --- run


def test_every_host_has_torchruns_environment_and_a_prefix(capfd: pytest.CaptureFixture[str]) -> None:
    script = 'echo "$RANK of $WORLD_SIZE, $LOCAL_RANK, $MASTER_ADDR, $GLOO_SOCKET_IFNAME, $OMP_NUM_THREADS"'
    with lab(3) as three:
        assert run(three, ["sh", "-c", script], env={"PATH": os.environ["PATH"]}) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [f"[{host}] {host} of 3, 0, 10.77.0.1, wire0, 1" for host in range(3)]


def test_hosts_know_each_other_by_name_and_nobody_else_does(capfd: pytest.CaptureFixture[str]) -> None:
    outside = [Path(name).read_text() for name in ("/etc/hosts", "/proc/self/mountinfo")]
    with lab(3) as three:
        # In both forms that sockets know an address by: torch complains about a peer without a name.
        script = "getent hosts 10.77.0.3; getent hosts ::ffff:10.77.0.3; getent ahostsv4 host-1 | head -n 1"
        assert run(three, ["sh", "-c", script]) == 0
        lines = capfd.readouterr().out.splitlines()
        assert [Path(name).read_text() for name in ("/etc/hosts", "/proc/self/mountinfo")] == outside
    words = [line.split()[1:] for line in lines if line.startswith("[0]")]
    assert words == [["10.77.0.3", "host-2"], ["::ffff:10.77.0.3", "host-2"], ["10.77.0.2", "STREAM", "host-1"]]


def test_a_users_own_number_of_threads_wins(capfd: pytest.CaptureFixture[str]) -> None:
    with lab(1) as one:
        run(one, ["sh", "-c", "echo $OMP_NUM_THREADS"], env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "3"})
    assert capfd.readouterr().out == "[0] 3\n"


def test_standard_error_and_a_last_line_without_an_end_come_through(capfd: pytest.CaptureFixture[str]) -> None:
    with lab(1) as one:
        run(one, ["sh", "-c", "echo to out; printf 'no end' >&2"])
    out, err = capfd.readouterr()
    assert (out, err) == ("[0] to out\n", "[0] no end\n")


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [("exit 7", 7, "host 1 ended with exit code 7"), ("kill -9 $$", 137, "host 1 was ended by SIGKILL")],
)
@timing
def test_one_that_fails_ends_all_and_is_named(
    ending: str, code: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with lab(3) as three:
        begin = time.monotonic()
        assert run(three, ["sh", "-c", f"[ $RANK = 1 ] && {ending}; exec sleep 600"]) == code
        assert time.monotonic() - begin < 3
        assert three.inhabitants() == []
    assert f"thinwire lab: {words}; ending 2 others." in capfd.readouterr().err


def test_one_that_does_not_want_to_end_is_killed_after_3_s(capfd: pytest.CaptureFixture[str]) -> None:
    with lab(2) as two:
        begin = time.monotonic()
        stubborn = "trap '' TERM; while :; do sleep 1; done"
        assert run(two, ["sh", "-c", f"[ $RANK = 0 ] && {{ sleep 0.5; exit 4; }}; {stubborn}"]) == 4
        assert 3 < time.monotonic() - begin < 6


def test_a_command_that_does_not_exist_is_said_so(capfd: pytest.CaptureFixture[str]) -> None:
    with lab(1) as one:
        assert run(one, ["no-such-program"]) == 127
    assert "cannot run 'no-such-program': No such file or directory" in capfd.readouterr().err


def test_a_relay_that_dies_ends_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    with lab(2) as two:
        killer = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {two.relay.pid}"])
        assert run(two, ["sleep", "600"]) == 1
        killer.wait()
    assert "the lab's relay was ended by SIGKILL" in capfd.readouterr().err


def cli(*arguments: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "thinwire", "lab", *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@timing
def test_an_interrupt_ends_all_within_2_s(number: signal.Signals, folder: Path) -> None:
    main = cli("run", "--hosts", "2", "--", "sh", "-c", "trap '' INT TERM; echo up; while :; do sleep 1; done")
    assert main.stdout is not None
    assert {main.stdout.readline(), main.stdout.readline()} == {"[0] up\n", "[1] up\n"}
    begin = time.monotonic()
    main.send_signal(number)
    main.communicate()
    assert main.returncode == 128 + number
    assert time.monotonic() - begin < 2
    assert left_behind(folder) == ([], [])


def test_the_command_line_passes_on_the_exit_code_and_says_what_was_scaled(folder: Path) -> None:
    main = cli("run", "--hosts", "2", "--network", "c2", "--scale", "50", "--", "sh", "-c", "echo $RANK; exit 5")
    out, err = main.communicate()
    assert main.returncode == 5
    assert "rates divided by 50: 1 Gbit/s to 25 Gbit/s became 20 Mbit/s to 500 Mbit/s" in err
    assert "ended with exit code 5" in err


def test_an_unmodified_ddp_script_runs(folder: Path) -> None:
    command = [sys.executable, "examples/ddp.py", "--steps", "8", "--width", "64"]
    main = cli("run", "--hosts", "2", "--latency", "2ms", "--rate", "100mbit", "--", *command)
    out, err = main.communicate()
    assert main.returncode == 0, err
    assert "hostname" not in err
    assert out.startswith("[0] 2 hosts") and "ms per step" in out


# --- control


@timing
def test_a_running_lab_can_be_listed_changed_and_entered(folder: Path) -> None:
    runner = CliRunner()
    with lab(2, latency="5ms") as two:
        listed = runner.invoke(app, ["lab", "ps"])
        assert two.id in listed.output
        changed = runner.invoke(app, ["lab", "set", "latency=25ms", "--pair", "0:1"])
        assert changed.exit_code == 0, changed.output
        assert statistics.median(check.round_trips(two, number=15)) == pytest.approx(0.05, abs=0.001)
        assert runner.invoke(app, ["lab", "partition", "0|1"]).exit_code == 0
        assert check.one_way(two, number=10, silence=0.3) == []
        assert runner.invoke(app, ["lab", "heal"]).exit_code == 0
        assert len(check.one_way(two, number=10)) == 10
        causes = [line.split('"cause": "')[1].split('"')[0] for line in two.truth.read_text().splitlines()]
        assert causes == ["schedule", "set", "partition", "heal"]
        inside = cli("shell", "1", "cat", "/proc/net/fib_trie")
        assert "10.77.0.2" in inside.communicate()[0]
    assert "no lab is running" in runner.invoke(app, ["lab", "ps"]).output


def test_a_lab_is_listed_with_its_truth_whatever_that_is_called(tmp_path: Path, folder: Path) -> None:
    place = tmp_path / "[bold]:ring:[" / "b].jsonl"
    place.parent.mkdir()
    with Lab(1, truth=place):
        assert str(place) in CliRunner().invoke(app, ["lab", "ps"], env={"COLUMNS": "300"}).output


def test_a_wrong_setting_and_a_missing_lab_are_one_line(folder: Path) -> None:
    runner = CliRunner()
    missing = runner.invoke(app, ["lab", "heal"])
    assert (missing.exit_code, missing.output.count("\n")) == (2, 1)
    with lab(2):
        wrong = runner.invoke(app, ["lab", "set", "latncy=5ms"])
        assert wrong.exit_code == 2 and "Did you mean 'latency'?" in wrong.output
        nobody = runner.invoke(app, ["lab", "set", "latency=5ms", "--lab", "nobody"])
        assert nobody.exit_code == 2 and "no lab 'nobody' is running" in nobody.output


def test_a_lab_ends_although_visitors_leave_with_its_process(folder: Path) -> None:
    two = lab(2).__enter__()
    visitors = [visit(folder / two.id) for _ in range(5)]
    for visitor in visitors:
        visitor.close()
    begin = time.monotonic()
    two.close()
    assert time.monotonic() - begin < 5


def test_a_truth_that_ends_is_said_once_and_the_lab_goes_on(
    tmp_path: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk, Lab(1, truth=disk / "truth.jsonl") as one:
        fill(disk)
        one.set(latency="1ms")
        while one.truth.stat().st_size % 4096:  # what it has of the disk already it may use
            one.set(latency="2ms")
        one.set(latency="3ms")
        assert run(one, ["true"]) == 0
        assert one.notes() == []
    assert capfd.readouterr().err.count(f"thinwire lab: the truth in {disk / 'truth.jsonl'} ends here: No space") == 1


def test_a_truth_that_cannot_be_written_is_said_so(folder: Path) -> None:
    with pytest.raises(LabError, match="cannot be written to /nowhere/truth"), Lab(1, truth="/nowhere/truth"):
        pass


def test_two_running_labs_must_be_told_apart(folder: Path) -> None:
    with lab(2) as one, lab(2) as other:
        runner = CliRunner()
        assert "choose one of" in runner.invoke(app, ["lab", "heal"]).output
        assert runner.invoke(app, ["lab", "heal", "--lab", other.id]).exit_code == 0
        assert len(one.truth.read_text().splitlines()) == 1


def test_a_lab_that_is_open_is_not_opened_again(folder: Path) -> None:
    with Lab(2) as opened:
        with pytest.raises(RuntimeError, match="open already"), opened:
            pass
        assert len(registry.running()) == 1
    assert registry.running() == []


def test_a_lab_that_waits_stays_as_it_begins_until_it_is_told_to(tmp_path: Path) -> None:
    soon = (Change(values={"latency": 0.001}), Change(at=0.05, values={"latency": 0.002}))
    truth = tmp_path / "truth.jsonl"
    with Lab(2, Schedule(name="soon", changes=soon), truth=truth, waits=True) as two:
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:
            assert two.stats()["time"] == 0
        assert len(truth.read_text().splitlines()) == 1
        opened = two.start_time
        two.begin()
        begun = two.start_time
        assert begun >= opened + 0.2
        two.begin()
        assert two.start_time == begun
        while len(lines := truth.read_text().splitlines()) < 2:
            two.stats()
        assert json.loads(lines[1])["time"] == pytest.approx(0.05)
        assert two.now() >= 0.05
