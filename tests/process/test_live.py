"""The live view in real terminals, and without one."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.process.terminals import COLOUR, Terminal, Tmux
from thinwire.jobs import live, outcome
from thinwire.jobs.job import Job
from thinwire.jobs.live import picture, view_of
from thinwire.jobs.progress import MANY, RECENT, Progress, Tail, line_of, progress_of

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
PLAN = {"exchange": "topk-allgather", "collective": "direct", "ratio": 0.014, "broadcast": "tree", "values": "float32"}
OTHER = PLAN | {"exchange": "star-topk", "collective": "tree", "ratio": 0.1}
JOB = Job(task="digits", network="unpredictable", steps=200, target=0.9)


def play(folder: Path) -> None:
    """What runs in the terminal: a view of this folder until there is a file `stop` in it."""
    view = view_of(JOB, folder, Console(file=sys.stderr), "a run")
    while not (folder / "stop").exists():
        view.look()
        time.sleep(0.05)
    view.close()


def player(folder: Path) -> list[str]:
    program = f"from pathlib import Path; from tests.process.test_live import play; play(Path({str(folder)!r}))"
    return ["env", "-C", str(ROOT), sys.executable, "-c", program]


def write(folder: Path, records: Sequence[dict[str, Any]], file: str = "records.jsonl") -> None:
    with (folder / file).open("a") as out:
        out.write("".join(json.dumps(record) + "\n" for record in records))


def some_steps(first: int, last: int, plan: dict[str, Any] = PLAN) -> Iterator[dict[str, Any]]:
    for step in range(first, last):
        moment = {"time": 1 + step / 20, "step": step}
        numbers = {"step_seconds": 0.052, "predicted_seconds": 0.0575, "sent_bytes": 9000, "dense_bytes": 300_000}
        yield {"kind": "step", **moment, "plan": plan, **numbers, "alpha": 0.0201, "beta": 2e-7}
        yield {"kind": "loss", **moment, "loss": 2.3 / (1 + step / 20)}


def a_decision(step: int, trigger: str, plan: dict[str, Any] = PLAN) -> dict[str, Any]:
    return {
        "kind": "decision",
        "time": 1 + step / 20,
        "step": step,
        "trigger": trigger,
        "plan": plan,
        "alpha": 0.0201,
        "beta": 2e-7,
    }


BEGAN = {"kind": "began", "time": 1.0, "hosts": 4, "parameters": 50_000, "batches_per_epoch": 11}
EVALUATED = {"kind": "evaluated", "time": 8.0, "step": 140, "loss": 0.2, "accuracy": 0.912, "trained_seconds": 6.5}
TRUTH = {"time": 0.0, "wall": 0.0, "now": {"latency": 0.02, "rate": 5e6, "loss": 0.0, "blocked": 0.0}}


def drawn(progress: Progress, width: int, title: str, place: str) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(picture(progress, title, place))
    return console.export_text().splitlines()


def a_run(folder: Path, steps: int = 141) -> None:
    write(folder, [TRUTH], "truth.jsonl")
    write(folder, [BEGAN, a_decision(0, "the network was measured"), *some_steps(0, steps), EVALUATED])


# --- in a terminal


def test_a_terminal_shows_everything_that_a_person_asks(tmp_path: Path) -> None:
    a_run(tmp_path)
    with Terminal(player(tmp_path), 100, 30, {"NO_COLOR": ""}) as terminal:
        terminal.expect("step 141 of 200")
        for words in (
            "accuracy 91.2% at step 140, 90% reached after 6.5 s",
            "20.1 ms, 40 Mbit/s measured",
            "20 ms, 40 Mbit/s in truth",
            "topk-allgather over direct at 0.014 (71.4x), since step 0",
            "1.27 MB, 3.0% of dense (42.3 MB)",
            "52 ms measured, 57.5 ms predicted",
            "step 0: the network was measured",
        ):
            terminal.shows(words)
        write(tmp_path, [a_decision(150, "rate went from 40 Mbit/s to 4 Mbit/s", OTHER), *some_steps(141, 160, OTHER)])
        terminal.expect("star-topk over tree at 0.1 (10x), since step 141")
        terminal.shows("step 150: rate went from 40 Mbit/s to 4 Mbit/s")
        (tmp_path / "stop").touch()
        assert terminal.wait() == 0


@pytest.mark.parametrize(("env", "coloured"), [({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True)])
def test_colours_are_left_out_where_nobody_wants_them(tmp_path: Path, env: dict[str, str], coloured: bool) -> None:
    a_run(tmp_path)
    with Terminal(player(tmp_path), 100, 30, env) as terminal:
        terminal.expect("step 141 of 200")
        assert bool(COLOUR.search(terminal.written)) is coloured


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(tmp_path: Path) -> None:
    a_run(tmp_path)
    (tmp_path / "stop").touch()
    with Terminal(player(tmp_path), 80, 24, {"TERM": "dumb"}) as terminal:
        assert terminal.wait() == 0
        assert b"\x1b" not in terminal.written
        assert "step 141 of 200" in terminal.text


@pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux here to see with")
def test_a_window_that_is_resized_shows_one_whole_picture(tmp_path: Path) -> None:
    a_run(tmp_path)

    def whole(screen: str, columns: int) -> bool:
        frames = [line for line in screen.splitlines() if line.startswith(("╭", "╰"))]
        return [len(frame) for frame in frames] == [columns, columns] and "step 141 of 200" in screen

    with Tmux(player(tmp_path), 100, 30, tmp_path) as tmux:
        tmux.expect(lambda screen: whole(screen, 100))
        for columns, rows in ((60, 30), (120, 40), (80, 24)):
            tmux.resize(columns, rows)
            screen = tmux.expect(lambda screen, columns=columns: whole(screen, columns))
            assert screen.count("accuracy 91.2%") == 1
        tmux.resize(60, 8)  # too low for all of it: the first lines are there
        tmux.expect(lambda screen: "step 141 of 200" in screen and "╭" in screen)


def test_sixty_columns_hold_every_word() -> None:
    progress = Progress(JOB)
    progress.take_truth(TRUTH)
    for record in (BEGAN, a_decision(0, "the network was measured"), *some_steps(0, 141), EVALUATED):
        progress.take(record)
    lines = drawn(progress, 60, "digits, adaptive, 4 hosts on unpredictable", "runs/digits-adaptive-1")
    assert {len(line) for line in lines} == {60}
    assert "…" not in "".join(lines)


def test_a_resume_that_came_to_nothing_takes_no_time_back() -> None:
    progress = Progress(JOB)
    for record in (BEGAN, *some_steps(0, 20)):
        progress.take(record)
    known = progress.seconds
    progress.take({"kind": "run", "time": 0.0})  # the clock of another start
    assert progress.seconds == known > 0


def test_a_perplexity_is_a_target_that_is_reached_from_above() -> None:
    progress = Progress(Job(task="chars", target=8))
    for seconds, perplexity in ((1.0, 9.0), (2.0, 8.0), (3.0, 7.5)):
        found = {"accuracy": None, "perplexity": perplexity, "trained_seconds": seconds}
        progress.take({"kind": "evaluated", "time": seconds, "step": 0, **found})
    assert progress.reached == 2.0 and "perplexity 7.5, 8 reached after 2.0 s" in line_of(progress)


def test_words_that_look_like_markup_are_shown_as_they_are() -> None:
    progress = Progress(JOB)
    progress.take(a_decision(0, "[red]so it was[/red] [link=x]"))
    text = "\n".join(drawn(progress, 100, "[bold]title", "[/]"))
    assert "[red]so it was[/red] [link=x]" in text and "[bold]title" in text and "[/]" in text


# --- without a terminal


def test_without_a_terminal_there_are_plain_lines(tmp_path: Path) -> None:
    write(tmp_path, [BEGAN, a_decision(0, "the network was measured"), *some_steps(0, 50)])
    write(
        tmp_path,
        [a_decision(50, "rate went from 40 Mbit/s to 4 Mbit/s", OTHER), *some_steps(50, 141, OTHER), EVALUATED],
    )
    (tmp_path / "stop").touch()
    done = subprocess.run(player(tmp_path), capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stderr
    lines = done.stderr.splitlines()
    assert lines[1] == "from step 0 on: topk-allgather over direct at 0.014 (71.4x), because the network was measured"
    assert lines[2] == "from step 50 on: star-topk over tree at 0.1 (10x), because rate went from 40 Mbit/s to 4 Mbit/s"
    assert (
        lines[3].startswith("step 141 of 200, epoch 12.8, 0:07, about 0:02 left; loss 0.287")
        and "accuracy 91.2%" in lines[3]
    )


def test_without_a_terminal_a_long_start_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "TELL_EVERY", 0.0)
    monkeypatch.setattr(live, "DRAW_EVERY", 0.0)
    screen = io.StringIO()
    view = view_of(JOB, tmp_path, Console(file=screen, width=200), "a run")
    view.look()
    view.look()
    write(tmp_path, [BEGAN, *some_steps(0, 5)])
    view.look()
    _, waiting, plan, line = screen.getvalue().splitlines()
    assert waiting == "the workers are starting, no step is done yet"
    assert plan.startswith("from step 0 on: ") and line.startswith("step 5 of 200, ")


def test_of_a_run_that_goes_on_only_what_is_new_is_told(tmp_path: Path) -> None:
    ended = {"kind": "ended", "time": 9.0, "how": "interrupted", "steps": 141}
    write(tmp_path, [BEGAN, a_decision(0, "the network was measured"), *some_steps(0, 141), EVALUATED, ended])
    screen = io.StringIO()
    view = view_of(JOB, tmp_path, Console(file=screen, width=200), "a run", goes_on=True)
    view.look()
    assert screen.getvalue() == f"a run: {tmp_path}\n"
    assert "the workers are starting" in "\n".join(drawn(view.progress, 100, "a run", "here"))
    run = {"kind": "run", "time": 0.0}
    write(tmp_path, [run, BEGAN | {"step": 120, "trained_seconds": 6.0}, *some_steps(120, 150, OTHER)])
    view.close()
    _, plan, line = screen.getvalue().splitlines()
    assert plan == "from step 120 on: star-topk over tree at 0.1 (10x)"
    assert line.startswith("step 150 of 200, epoch 13.6, ") and "accuracy" not in line  # its steps were lost


# --- what is read


def test_a_line_that_is_not_whole_yet_is_read_when_it_is(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    tail = Tail(path)
    assert tail.new() == []
    path.write_text('{"kind": "loss"}\n{"kind": "lo')
    assert tail.new() == [{"kind": "loss"}]
    with path.open("a") as file:
        file.write('ss", "step": 2}\n')
    assert tail.new() == [{"kind": "loss", "step": 2}]
    with path.open("a") as file:
        file.write("3\n")  # a line of JSON, and no record
    assert tail.new() == []
    path.write_text('{"kind": "run"}\n')
    assert tail.new() == [{"kind": "run"}]


def test_a_run_that_was_resumed_counts_on_from_its_step(tmp_path: Path) -> None:
    write(tmp_path, [BEGAN, *some_steps(100, 141)])
    progress = progress_of(JOB, tmp_path)
    assert (progress.step, round(progress.share, 3)) == (141, 0.705)


def test_plain_ddp_has_neither_network_nor_prediction_and_is_shown(tmp_path: Path) -> None:
    step = {
        "kind": "step",
        "time": 2.0,
        "step": 0,
        "step_seconds": 0.4,
        "sent_bytes": None,
        "plan": {"exchange": "ddp"},
    }
    write(tmp_path, [BEGAN, step])
    progress = progress_of(JOB, tmp_path)
    text = "\n".join(drawn(progress, 80, "ddp", "runs/ddp"))
    assert "ddp, since step 0" in text and "400 ms measured" in text


def test_an_accuracy_is_told_with_its_step_unless_it_is_of_the_last(tmp_path: Path) -> None:
    write(tmp_path, [BEGAN, *some_steps(0, 141), EVALUATED])
    assert "; accuracy 91.2% at step 140, 90% reached after 6.5 s; " in line_of(progress_of(JOB, tmp_path))
    write(tmp_path, [EVALUATED | {"step": 141, "accuracy": 0.92}])
    assert "; accuracy 92.0%, 90% reached" in line_of(progress_of(JOB, tmp_path))


def test_what_is_predicted_is_told_when_there_are_steps_to_compare_it_with() -> None:
    progress = Progress(JOB)
    for record in (BEGAN, *some_steps(0, RECENT - 1)):
        progress.take(record)
    assert "a step 52 ms measured;" in line_of(progress)
    for record in some_steps(RECENT - 1, RECENT):
        progress.take(record)
    assert "a step 52 ms measured, 57.5 ms predicted;" in line_of(progress)


def test_the_share_of_control_is_of_all_starts_and_told_of_many_steps_only() -> None:
    progress = Progress(JOB)
    first = EVALUATED | {"step": MANY - 1, "trained_seconds": 10.0, "control_seconds": 1.0}
    for record in (BEGAN, *some_steps(0, MANY - 1), first):
        progress.take(record)
    assert progress.control is None and "control" not in line_of(progress)
    again = [{"kind": "run", "time": 0.0}, BEGAN | {"step": MANY - 1, "trained_seconds": 10.0}]
    second = EVALUATED | {"step": MANY + 20, "trained_seconds": 20.0, "control_seconds": 3.0}
    for record in (*again, *some_steps(MANY - 1, MANY + 20), second):
        progress.take(record)
    assert progress.control == pytest.approx((1.0 + 3.0) / 20.0) and "; control 20.0%" in line_of(progress)


def test_where_the_records_break_off_the_outcome_tells_the_end(tmp_path: Path) -> None:
    write(tmp_path, [BEGAN, *some_steps(0, 104)])
    sent = {"sent_bytes": 2_000_000, "dense_bytes": 60_000_000}
    outcome.note(tmp_path, how="done", steps=200, seconds=12.0, accuracy=0.95, evaluated=200, **sent)
    line = line_of(progress_of(JOB, tmp_path))
    assert line.endswith("; sent 2 MB, 3.3% of dense (60 MB)")
    assert line.startswith("step 200 of 200 (recorded up to step 104), epoch 18.2, 0:12; accuracy 95.0%; ")
