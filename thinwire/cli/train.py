"""thinwire train, compare and demo: the main job."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.help import examples
from thinwire.cli.mistakes import blamed, named, told
from thinwire.cli.options import Json, print_figures

if TYPE_CHECKING:
    from rich.console import Console

    from thinwire.jobs.compare import Comparison
    from thinwire.jobs.job import Job
    from thinwire.jobs.outcome import Outcome

WHAT, WHERE, HOW, LENGTH, LEARNING, RUN = (
    "What is trained",
    "Hosts and network",
    "How gradients travel",
    "How long",
    "How it learns",
    "The run",
)

TRAIN_EXAMPLES = examples(
    ("four workers on this machine, no network between them", "thinwire train digits"),
    (
        "the same behind an emulated network that changes all the time",
        "thinwire train digits --network unpredictable --scale 10",
    ),
    (
        "a fixed plan on a fixed network",
        "thinwire train --latency 20ms --rate 50mbit --method star-topk@0.01",
    ),
    ("your own model and data: make() in my_module.py, here", "thinwire train my_module:make --epochs 3"),
    ("all settings from a file, one of them overridden", "thinwire train --config job.toml --seed 1"),
    ("go on with a run that was ended", "thinwire train --resume runs/digits-adaptive-1"),
    ("on several machines, one worker each", "torchrun --nnodes 4 ... --no-python thinwire train digits"),
)
COMPARE_EXAMPLES = examples(
    (
        "is it worth it on this network?",
        "thinwire compare digits --network unpredictable --scale 10 --seconds 60",
    ),
    (
        "with gossip, three seeds, the time to 90 % accuracy",
        "thinwire compare --methods ddp,adaptive,dcd@int8 --seeds 3 --target 0.9",
    ),
)
DEMO_EXAMPLES = examples(
    ("two to three minutes, a table and a report at the end", "thinwire demo"),
    ("shorter, and the figures for a script", "thinwire demo --seconds 30 --json"),
)

Task = Annotated[
    str | None,
    typer.Argument(help="digits (nothing to fetch), fashion-mnist, chars, or your own as my_module:make."),
]
Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Settings in TOML, named like the long options with _ for -. Options win."),
]


def _option(of: str, metavar: str, words: str, *names: str) -> Any:
    """The defaults are the job's: see JobCommand."""
    return typer.Option(*names, help=words, metavar=metavar, rich_help_panel=of, show_default=False)


Model = Annotated[
    str | None,
    _option(WHAT, "NAME", "mlp, cnn, resnet20 or vit for images, gpt for text; if none is given, what suits the task."),
]
DataFolder = Annotated[
    str | None, _option(WHAT, "FOLDER", "Where the files of fashion-mnist are; else it looks where they usually are.")
]
TextFile = Annotated[str | None, _option(WHAT, "FILE", "What chars learns; else it is Python's own source text.")]
Partition = Annotated[
    str | None, _option(WHAT, "HOW", "How examples are spread over workers: iid, or dirichlet:0.5 by label.")
]
Hosts = Annotated[int | None, _option(WHERE, "N", "How many workers.")]
NetworkName = Annotated[
    str | None,
    _option(WHERE, "NETWORK", "A name that `thinwire lab profiles` lists, a .toml profile or a .csv trace; else none."),
]
Latency = Annotated[str | None, _option(WHERE, "TIME", "Hold the latency of every route at this, like 20ms.")]
Rate = Annotated[str | None, _option(WHERE, "RATE", "Hold the rate of every host at this, like 50mbit.")]
Scale = Annotated[float | None, _option(WHERE, "X", "Divide all rates of the network by this.")]
Speed = Annotated[float | None, _option(WHERE, "X", "Let the network's schedule run so many times as fast.")]
LinkName = Annotated[
    str | None,
    _option(WHERE, "LINK", "lab, loopback, shaped, or auto: the lab if there is a network, else loopback."),
]
Port = Annotated[int | None, _option(WHERE, "N", "Where workers meet; else one that is free.")]
MethodName = Annotated[
    str | None,
    _option(
        HOW,
        "METHOD",
        "adaptive; ddp, ddp-fp16, ddp-powersgd; EXCHANGE@RATIO:COLLECTIVE like star-topk@0.01:tree; or "
        "GOSSIP@COMPRESSOR:TOPOLOGY like dcd@int8:ring.",
    ),
]
Objective = Annotated[str | None, _option(HOW, "NAME", "What adaptive aims at: goodput, seconds or knee.")]
Ratios = Annotated[
    tuple[float, float] | None,
    _option(HOW, "LOW HIGH", "The least and the largest share of entries that adaptive sends."),
]
Epochs = Annotated[
    int | None, _option(LENGTH, "N", "How often all examples are seen. The first limit that is reached ends it.")
]
Steps = Annotated[int | None, _option(LENGTH, "N", "How many steps. Without any limit it is 5 epochs.")]
Seconds = Annotated[float | None, _option(LENGTH, "S", "How many seconds of training.")]
Target = Annotated[
    float | None,
    _option(LENGTH, "X", "An accuracy, like 0.9, or for chars a perplexity, like 8: the time to it is told."),
]
Batch = Annotated[int | None, _option(LEARNING, "N", "Examples per worker and step.")]
LearningRate = Annotated[float | None, _option(LEARNING, "X", "The learning rate; else what suits the model.")]
Momentum = Annotated[float | None, _option(LEARNING, "X", "The momentum of sgd.")]
Optimizer = Annotated[str | None, _option(LEARNING, "NAME", "sgd or adam; else what suits the model.")]
Seed = Annotated[int | None, _option(LEARNING, "N", "The seed of everything random.")]
EvaluateEvery = Annotated[
    float | None,
    _option(
        RUN, "S", "Seconds of training between two looks at the test set; more, where a look would take a fifth of it."
    ),
]
CheckpointEvery = Annotated[int | None, _option(RUN, "N", "Steps between two checkpoints; 0 for one at the end only.")]
Keep = Annotated[int | None, _option(RUN, "N", "How many checkpoints stay.")]
Timeout = Annotated[float | None, _option(RUN, "S", "Seconds of silence after which a worker gives up.")]
Name = Annotated[str | None, _option(RUN, "NAME", "The name of the run's folder; else one is made up.")]
Out = Annotated[str | None, _option(RUN, "FOLDER", "Where runs have their folders.")]
TensorBoard = Annotated[
    bool | None, _option(RUN, "", "Write what TensorBoard shows while it runs, in RUN/tensorboard.", "--tensorboard")
]
Resume = Annotated[
    Path | None, _option(RUN, "RUN", "Go on with the run in this folder; only limits may be given anew.")
]
Methods = Annotated[
    str | None,
    typer.Option(
        metavar="METHODS",
        help="With commas between; the first is what the others are measured against. Without any: ddp,adaptive.",
    ),
]
Seeds = Annotated[
    int | None,
    typer.Option(metavar="N", help="How many seeds, from --seed on; the table has their medians. Without: one."),
]


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
    with told("train", json), blamed(config, context):
        given = _given(context)
        if resume is not None and config is not None:
            raise ValueError("--config cannot be given with --resume: a run goes on as it was begun.")
        if resume is not None:
            from thinwire.jobs.resuming import resumed

            job, folder = resumed(resume, given), resume
        else:
            job, folder = _job(config, given), None
        if _is_worker():
            if json:
                raise ValueError("--json has no effect under torchrun: leave it out, and read RUN/outcome.json.")
            if given.get("hosts", size := int(os.environ["WORLD_SIZE"])) != size:
                raise ValueError(f"--hosts {given['hosts']} has no effect: torchrun has started {size} workers.")
            _join(job, folder)
            return
        raise typer.Exit(_train(job, folder, json))


def compare(
    context: typer.Context,
    task: Task = None,
    config: Config = None,
    methods: Methods = None,
    seeds: Seeds = None,
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

    Network, data and seeds are the same for all. Without --target it is the best that all of them came to.
    """
    with told("compare", json), blamed(config, context):
        from thinwire.jobs.compare import asked

        _refuse_as_worker()
        raise typer.Exit(_compare(*asked(config, _given(context), methods, seeds), json))


def demo(
    seconds: Annotated[float, typer.Option(metavar="S", help="Seconds of training, for each method.")] = 50.0,
    out: Annotated[str, typer.Option(metavar="FOLDER", help="Where runs have their folders.")] = "runs",
    json: Json = False,
) -> None:
    """Plain DDP against adaptive: four hosts on a network that nobody can foresee. Takes two to three minutes."""
    with told("demo"):
        from thinwire.jobs import compare

        _refuse_as_worker()
        job, methods, note = compare.demo(out=out, seconds=seconds)
        if note:
            typer.echo(note, err=True)
        raise typer.Exit(_compare(job, methods, 1, json, stem="demo"))


def _is_worker() -> bool:
    """Whether somebody else, as torchrun, has started this as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _refuse_as_worker() -> None:
    if _is_worker():
        raise ValueError("a comparison starts its own workers: call it without torchrun.")


# --- from options to a job


def _given(context: typer.Context) -> dict[str, Any]:
    """The settings of a job that were on the command line."""
    from thinwire.jobs.job import KEYS

    return {key: value for key, value in named(context).items() if key in KEYS}


def _job(config: Path | None, given: dict[str, Any]) -> Job:
    from thinwire.jobs.job import Job
    from thinwire.jobs.settings import Settings

    return Job(**given) if config is None else Settings.read(config).job(**given)


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
    from thinwire.jobs.progress import line_of, progress_of, summary_of

    outcome, folder = start.train(job, folder, sys.argv, _stage())
    progress = progress_of(job, folder)
    report = None if outcome.at_once else _report(folder)
    _complain("train", outcome)
    typer.echo(f"{outcome.how}: {line_of(progress)}" if progress.step else outcome.how, err=json)
    if report is not None:
        typer.echo(f"report: {report}", err=json)
    if outcome.how == "interrupted":
        typer.echo(_how_to_go_on(folder, job.hosts), err=json)
    if json:
        ended = {"how": outcome.how, "message": outcome.message}
        print_figures(summary_of(progress) | ended | {"folder": str(folder), "report": report and str(report)})
    return outcome.code


def _how_to_go_on(folder: Path, hosts: int) -> str:
    from thinwire.jobs.resuming import newest_step

    if not (step := newest_step(folder, hosts)):
        return "no checkpoint is saved: no step came to its end in time. The same command begins anew."
    return f"saved: step {step}\nto go on: thinwire train --resume {shlex.quote(str(folder))}"


def _compare(job: Job, methods: list[str], seeds: int, json: bool, stem: str = "compare") -> int:
    from rich.console import Console

    from thinwire.jobs import compare, start
    from thinwire.jobs.team import Interrupts

    jobs = compare.jobs_of(job, methods, seeds)
    for each in jobs:
        start.refuse_early(each)
    folder = start.new_folder(job, stem)
    with Interrupts() as interrupts:
        comparison = compare.compare(job, jobs, folder, sys.argv, _stage(), interrupts)
    _print_comparison(comparison, Console(stderr=json))
    _complain("compare", comparison.outcome)
    report = None if comparison.outcome.at_once else _report(folder)  # last, for it takes a while
    if report is not None:
        typer.echo(f"report: {report}", err=json)
    if json:
        print_figures(comparison.to_json() | {"report": report and str(report)})
    return comparison.outcome.code


def _print_comparison(comparison: Comparison, console: Console) -> None:
    from rich.text import Text

    from thinwire.jobs.compare import speed_up_in_words, table_of

    console.print()
    console.print(table_of(comparison))
    console.print(Text(f"\n{speed_up_in_words(comparison)}"), soft_wrap=True)


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
