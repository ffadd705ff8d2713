"""thinwire train, compare and demo: the main job."""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.options import Json
from thinwire.errors import ThinwireError

if TYPE_CHECKING:
    from rich.console import Console

    from thinwire.jobs.compare import Comparison
    from thinwire.jobs.job import Job
    from thinwire.jobs.start import Outcome

WHAT, WHERE, HOW, LENGTH, LEARNING, RUN = (
    "What is trained",
    "Hosts and network",
    "How gradients travel",
    "How long",
    "How it learns",
    "The run",
)

TRAIN_EXAMPLES = """
Four workers on this machine, no network between them:  [bold]thinwire train digits[/bold]

The same behind an emulated network that changes all the time:
[bold]thinwire train digits --network unpredictable --scale 10[/bold]

A fixed plan instead of an adaptive one:
[bold]thinwire train fashion-mnist --hosts 8 --latency 20ms --rate 50mbit --method star-topk@0.01:tree[/bold]

Your own model and data, from my_module.py here:  [bold]thinwire train my_module:make --epochs 3[/bold]

All settings from a file, some overridden:  [bold]thinwire train --config job.toml --seed 1[/bold]

Go on with a run that was ended:  [bold]thinwire train --resume runs/digits-mlp-adaptive-1[/bold]

On several machines, one worker each:
[bold]torchrun --nnodes 4 ... --no-python thinwire train digits[/bold]
"""
COMPARE_EXAMPLES = """
Is it worth it on this network?
[bold]thinwire compare digits --network unpredictable --scale 10 --methods ddp,adaptive --seconds 60[/bold]

Fixed plans and gossip, three seeds, time to 90 % accuracy:
[bold]thinwire compare digits --latency 50ms --rate 10mbit --methods ddp,ddp-fp16,star-topk@0.01:tree,dcd@int8:ring
--seeds 3 --target 0.9[/bold]
"""

Task = Annotated[
    str | None,
    typer.Argument(help="digits (the default, nothing to fetch), fashion-mnist, chars, or your own as my_module:make."),
]
Config = Annotated[
    Path | None,
    typer.Option(
        help="A TOML file of settings: the long options' names with _ for -. Options win.", show_default=False
    ),
]


def _option(of: str, words: str, *names: str) -> Any:
    return typer.Option(*names, help=words, rich_help_panel=of, show_default=False)


Model = Annotated[str | None, _option(WHAT, "mlp, cnn, resnet20 or vit for images, gpt for text.")]
DataFolder = Annotated[str | None, _option(WHAT, "Where the files of fashion-mnist are.")]
TextFile = Annotated[str | None, _option(WHAT, "The file that chars learns; by default Python's own source text.")]
Partition = Annotated[str | None, _option(WHAT, "Examples over workers: iid (default), or dirichlet:0.5 by label.")]
Hosts = Annotated[int | None, _option(WHERE, "How many workers, 4 by default.")]
NetworkName = Annotated[str | None, _option(WHERE, "A profile (see `lab profiles`), a .toml profile, a .csv trace.")]
Latency = Annotated[str | None, _option(WHERE, "Hold the latency of every route at this, like 20ms.")]
Rate = Annotated[str | None, _option(WHERE, "Hold the rate of every host at this, like 50mbit.")]
Scale = Annotated[float | None, _option(WHERE, "Divide all rates of the network by this.")]
Speed = Annotated[float | None, _option(WHERE, "Let the network's schedule run so many times as fast.")]
LinkName = Annotated[str | None, _option(WHERE, "auto (lab if there is a network), lab, loopback or shaped.")]
Port = Annotated[int | None, _option(WHERE, "Where workers meet; by default one that is free.")]
MethodName = Annotated[
    str | None,
    _option(
        HOW,
        "adaptive (default); ddp, ddp-fp16, ddp-powersgd; EXCHANGE@RATIO:COLLECTIVE like star-topk@0.01:tree; or "
        "GOSSIP@COMPRESSOR:TOPOLOGY like dcd@int8:ring.",
    ),
]
Objective = Annotated[str | None, _option(HOW, "Of adaptive: goodput (default), seconds or knee.")]
Ratios = Annotated[tuple[float, float] | None, _option(HOW, "Of adaptive: the least and the largest ratio.")]
Epochs = Annotated[int | None, _option(LENGTH, "The first limit that is reached ends it; 5 epochs if none is given.")]
Steps = Annotated[int | None, _option(LENGTH, "End after so many steps.")]
Seconds = Annotated[float | None, _option(LENGTH, "End after so many seconds of training.")]
Target = Annotated[float | None, _option(LENGTH, "The accuracy, like 0.9, the time to which is told.")]
Batch = Annotated[int | None, _option(LEARNING, "Examples per worker and step, 32 by default.")]
LearningRate = Annotated[float | None, _option(LEARNING, "The learning rate; by default what suits the model.")]
Momentum = Annotated[float | None, _option(LEARNING, "Of sgd, 0.9 by default.")]
Optimizer = Annotated[str | None, _option(LEARNING, "sgd or adam; by default what suits the model.")]
Seed = Annotated[int | None, _option(LEARNING, "Of everything random, 0 by default.")]
EvaluateEvery = Annotated[float | None, _option(RUN, "Seconds of training between two looks at the test set.")]
CheckpointEvery = Annotated[int | None, _option(RUN, "Steps between two checkpoints, 100 by default.")]
Keep = Annotated[int | None, _option(RUN, "How many checkpoints stay, 2 by default.")]
Timeout = Annotated[float | None, _option(RUN, "Seconds of silence after which a worker gives up.")]
Name = Annotated[str | None, _option(RUN, "Of the run's folder; by default made up.")]
Out = Annotated[str | None, _option(RUN, "The folder of runs, ./runs by default.")]
TensorBoard = Annotated[
    bool | None, _option(RUN, "Write what TensorBoard shows while it runs, in RUN/tensorboard.", "--tensorboard")
]
Resume = Annotated[Path | None, _option(RUN, "Go on with the run in this folder; only limits may be given anew.")]
Methods = Annotated[str, typer.Option(help="With commas between; the first is what the others are measured against.")]
Seeds = Annotated[int, typer.Option(min=1, help="How many seeds, from --seed on; the table has their medians.")]


# --- the commands


def train(
    context: typer.Context,
    task: Task = None,
    config: Config = None,
    model: Model = None,
    folder_of_data: DataFolder = None,
    text: TextFile = None,
    partition: Partition = None,
    hosts: Hosts = None,
    network: NetworkName = None,
    latency: Latency = None,
    rate: Rate = None,
    scale: Scale = None,
    speed: Speed = None,
    link: LinkName = None,
    port: Port = None,
    method: MethodName = None,
    objective: Objective = None,
    ratios: Ratios = None,
    epochs: Epochs = None,
    steps: Steps = None,
    seconds: Seconds = None,
    target: Target = None,
    batch: Batch = None,
    lr: LearningRate = None,
    momentum: Momentum = None,
    optimizer: Optimizer = None,
    seed: Seed = None,
    evaluate_every: EvaluateEvery = None,
    checkpoint_every: CheckpointEvery = None,
    keep: Keep = None,
    timeout: Timeout = None,
    name: Name = None,
    out: Out = None,
    tensorboard: TensorBoard = None,
    resume: Resume = None,
    json: Json = False,
) -> None:
    """Train a model over a network, watch it adapt, and leave a checkpoint and a report.

    Starts the workers itself: in the lab if a network is named, else on loopback. Under torchrun it is one worker.
    Ctrl-C ends all within two seconds; --resume goes on from there.
    """
    with _told("train"):
        given = _given(context)
        if resume is not None and config is not None:
            raise ValueError("--config cannot be given with --resume: a run goes on as it was begun.")
        if resume is not None:
            job, folder = _resumed(resume, given), resume
        else:
            job, folder = _job(config, given), None
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            _join(job, folder)
            return
        raise typer.Exit(_train(job, folder, json))


def compare(
    context: typer.Context,
    task: Task = None,
    config: Config = None,
    methods: Methods = "ddp,adaptive",
    seeds: Seeds = 1,
    model: Model = None,
    folder_of_data: DataFolder = None,
    text: TextFile = None,
    partition: Partition = None,
    hosts: Hosts = None,
    network: NetworkName = None,
    latency: Latency = None,
    rate: Rate = None,
    scale: Scale = None,
    speed: Speed = None,
    link: LinkName = None,
    port: Port = None,
    objective: Objective = None,
    ratios: Ratios = None,
    epochs: Epochs = None,
    steps: Steps = None,
    seconds: Seconds = None,
    target: Target = None,
    batch: Batch = None,
    lr: LearningRate = None,
    momentum: Momentum = None,
    optimizer: Optimizer = None,
    seed: Seed = None,
    evaluate_every: EvaluateEvery = None,
    checkpoint_every: CheckpointEvery = None,
    keep: Keep = None,
    timeout: Timeout = None,
    name: Name = None,
    out: Out = None,
    tensorboard: TensorBoard = None,
    json: Json = False,
) -> None:
    """Train the same under several methods, one after the other, and tell the time to an accuracy.

    Network, data and seeds are the same for all. Without --target it is the best accuracy that all of them came to.
    """
    with _told("compare"):
        raise typer.Exit(_compare(_job(config, _given(context)), methods.split(","), seeds, json))


def demo(
    seconds: Annotated[float | None, typer.Option(help="Of training, for each method.", show_default=False)] = None,
    out: Annotated[str, typer.Option(help="The folder of runs.")] = "runs",
    json: Json = False,
) -> None:
    """Plain DDP against adaptive: four hosts on a network that nobody can foresee. Takes two to three minutes."""
    with _told("demo"):
        from thinwire.jobs import compare

        job, methods, note = compare.demo(out=out, **({} if seconds is None else {"seconds": seconds}))
        if note:
            typer.echo(note, err=True)
        raise typer.Exit(_compare(job, methods, 1, json, stem="demo"))


@contextmanager
def _told(command: str) -> Iterator[None]:
    """A user's mistake and a machine's refusal are one message and no traceback."""
    try:
        yield
    except (ValueError, ThinwireError) as error:
        typer.echo(f"thinwire {command}: {error}", err=True)
        raise typer.Exit(2) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        typer.echo(f"thinwire {command}: {where}{error.strerror or error}.", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(130) from interrupt


# --- from options to a job


def _given(context: typer.Context) -> dict[str, Any]:
    """The settings of a job that were on the command line."""
    from thinwire.jobs.job import KEYS

    return {key: value for key, value in context.params.items() if key in KEYS and value is not None}


def _job(config: Path | None, given: dict[str, Any]) -> Job:
    from thinwire.jobs.job import Job

    return Job(**given) if config is None else Job.from_toml(config, **given)


def _resumed(folder: Path, given: dict[str, Any]) -> Job:
    from dataclasses import replace

    from thinwire.jobs.job import read_job

    for key in given:
        if key not in ("epochs", "steps", "seconds", "target", "tensorboard"):
            raise ValueError(
                f"--{key.replace('_', '-')} cannot be given with --resume: a run goes on as it was begun. Only its "
                "limits may be others."
            )
    return replace(read_job(folder), **given)


def _join(job: Job, folder: Path | None) -> None:
    """Be the worker that torchrun started."""
    from thinwire.jobs import start, worker

    worker.join(start.joining(job), folder)


# --- running, and what is printed


def _stage() -> Console:
    """What happens is shown on stderr, what came of it on stdout."""
    from rich.console import Console

    return Console(file=sys.stderr)


def _train(job: Job, folder: Path | None, json: bool) -> int:
    from thinwire.jobs import start
    from thinwire.jobs.live import line_of, progress_of, summary_of

    outcome, folder = start.train(job, folder, sys.argv, _stage())
    progress = progress_of(job, folder)
    report = None if outcome.at_once else _report(folder)
    _complain("train", outcome)
    typer.echo(f"{outcome.how}: {line_of(progress)}" if progress.step else outcome.how)
    if report is not None:
        typer.echo(f"report: {report}")
    if outcome.how == "interrupted":
        typer.echo(f"to go on: thinwire train --resume {folder}")
    if json:
        figures = summary_of(progress) | {"how": outcome.how, "folder": str(folder), "report": report and str(report)}
        typer.echo(json_module.dumps(figures))
    return outcome.code


def _compare(job: Job, methods: list[str], seeds: int, json: bool, stem: str = "compare") -> int:
    from thinwire.jobs import compare, start

    jobs = compare.jobs_of(job, methods, seeds)
    for each in jobs:
        start.refuse_early(each)
    folder = start.new_folder(job, stem)
    with start.Interrupts() as interrupts:
        comparison = compare.compare(job, jobs, folder, sys.argv, _stage(), interrupts)
    report = None if comparison.outcome.at_once else _report(folder)
    _print_comparison(comparison)
    _complain("compare", comparison.outcome)
    if report is not None:
        typer.echo(f"report: {report}")
    if json:
        typer.echo(json_module.dumps(comparison.to_json() | {"report": report and str(report)}))
    return comparison.outcome.code


def _print_comparison(comparison: Comparison) -> None:
    from rich.console import Console

    from thinwire.jobs.compare import speed_up_in_words, table_of

    console = Console()
    console.print()
    console.print(table_of(comparison))
    console.print(f"\n{speed_up_in_words(comparison)}", highlight=False, soft_wrap=True)


def _complain(command: str, outcome: Outcome) -> None:
    if outcome.code == 1:
        typer.echo(f"thinwire {command}: {outcome.message}", err=True)
        for line in outcome.log:
            typer.echo(f"  {line}", err=True)


def _report(folder: Path) -> Path | None:
    """Make the page. That it cannot be made, whatever the reason, makes no training a failure."""
    from thinwire.report import page

    try:
        return page.write(folder)
    except Exception as error:
        typer.echo(f"thinwire: no report was made ({error}); `thinwire report {folder}` tries again.", err=True)
        return None
