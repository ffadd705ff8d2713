"""Job: all settings of one training, and the folder that a run of it leaves."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from thinwire.jobs.method import Method, nearest

if TYPE_CHECKING:
    from thinwire.lab.schedule import Schedule

FORMAT = 1
JOB, RECORDS, TRUTH, CHECKPOINTS, REPORT = "job.json", "records.jsonl", "truth.jsonl", "checkpoints", "report.html"

DEFAULT_MODELS = {"digits": "mlp", "fashion-mnist": "cnn", "chars": "gpt"}
MODELS = {
    "digits": ("mlp", "cnn", "resnet20", "vit"),
    "fashion-mnist": ("mlp", "cnn", "resnet20", "vit"),
    "chars": ("gpt",),
}
LEARNING = {  # the optimizer and the learning rate that suit a model
    "mlp": ("sgd", 0.05),
    "cnn": ("sgd", 0.05),
    "resnet20": ("sgd", 0.1),
    "vit": ("adam", 0.001),
    "gpt": ("adam", 0.002),
}
OPTIMIZERS = ("sgd", "adam")
LINKS = ("auto", "lab", "loopback", "shaped")
OBJECTIVES = ("goodput", "seconds", "knee")
DEFAULT_EPOCHS = 5
MOST_HOSTS = 200
SEEDS = 2**32  # how many there are
MOST_SECONDS = 1e7  # of silence: torch counts them in nanoseconds
LARGEST = 2**63  # what a whole number is below


class Mistake(ValueError):
    """A setting that cannot be: `key` is its name."""

    def __init__(self, key: str, why: object) -> None:
        super().__init__(str(why))
        self.key = key


@contextmanager
def blaming(key: str) -> Iterator[None]:
    """What is found wrong within is a mistake in this setting."""
    try:
        yield
    except ValueError as error:
        raise Mistake(key, error) from error


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training, whole.

    Args:
        task: digits, fashion-mnist, chars, or the user's own as module:make (thinwire.jobs.data.own).
        model: mlp, cnn, resnet20 or vit for images, gpt for text; None for the task's default.
        folder_of_data: where the files of fashion-mnist are; None to look where they usually are.
        text: the file that chars learns; None for the source text of this Python's standard library.
        hosts: how many workers.
        network: the name of a lab's profile, or the path of a .toml profile or a .csv trace; None for no limits.
        latency, rate: hold the network's at this, as `thinwire lab` takes them: "20ms", "50mbit".
        scale: divide all rates of the network by this.
        speed: let the network's schedule run so many times as fast.
        method: how gradients are exchanged (thinwire.jobs.method).
        link: lab, loopback, shaped, or auto: the lab if there is a network, else loopback.
        epochs, steps, seconds: whichever is reached first ends the training; 5 epochs if none is given.
        batch: examples per worker and step.
        lr, optimizer: None for what suits the model.
        momentum: of sgd.
        partition: how examples are spread over workers: iid, or dirichlet:CONCENTRATION by label.
        seed: of everything random.
        target: an accuracy in (0, 1], or for chars a perplexity above 1, the time to which is reported.
        evaluate_every: seconds of training between two looks at the test set.
        checkpoint_every: steps between two checkpoints; 0 for none but at the end.
        keep: how many checkpoints stay.
        objective, ratios: of the adaptive method.
        port: of the workers' meeting; None for one that is free.
        timeout: seconds of silence after which a worker gives up.
        name: of the run's folder; None to make one up.
        out: the folder of runs.
        tensorboard: whether what TensorBoard shows is written, in the run's folder, while it runs.
    """

    task: str = "digits"
    model: str | None = None
    folder_of_data: str | None = None
    text: str | None = None
    hosts: int = 4
    network: str | None = None
    latency: str | None = None
    rate: str | None = None
    scale: float = 1.0
    speed: float = 1.0
    method: str = "adaptive"
    link: str = "auto"
    epochs: int | None = None
    steps: int | None = None
    seconds: float | None = None
    batch: int = 32
    lr: float | None = None
    momentum: float = 0.9
    optimizer: str | None = None
    partition: str = "iid"
    seed: int = 0
    target: float | None = None
    evaluate_every: float = 2.0
    checkpoint_every: int = 100
    keep: int = 2
    objective: str = "goodput"
    ratios: tuple[float, float] = (0.001, 0.1)
    port: int | None = None
    timeout: float = 300.0
    name: str | None = None
    out: str = "runs"
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _typed(field.name, getattr(self, field.name)))
        self._check_task()
        self._check_numbers()
        for name, known in (("link", LINKS), ("objective", OBJECTIVES)):
            if (word := getattr(self, name)) not in known:
                raise Mistake(name, f"{name} {word!r} is unknown.{nearest(word, known)}")
        if self.optimizer is not None and self.optimizer not in OPTIMIZERS:
            raise Mistake("optimizer", f"optimizer {self.optimizer!r} is unknown.{nearest(self.optimizer, OPTIMIZERS)}")
        low, high = self.ratios
        if not 0 < low <= high <= 1:
            raise Mistake("ratios", f"ratios must be two numbers with 0 < low <= high <= 1, got {low:g} and {high:g}.")
        if self.name is not None and (self.name in ("", ".", "..") or re.search(r"[/\\\0]", self.name)):
            raise Mistake("name", f"name must be the name of one folder, got {self.name!r}.")
        with blaming("method"):
            Method.parse(self.method)
        self.concentration  # noqa: B018 (raises if it cannot be read)

    def _check_task(self) -> None:
        if self.own:
            module, _, function = self.task.partition(":")
            if not all(part.isidentifier() for part in (*module.split("."), function)):
                raise Mistake("task", f"task {self.task!r} is no module:function, as in my_module:make.")
            for name in ("model", "batch", "partition", "text", "folder_of_data"):
                if (value := getattr(self, name)) != getattr(Job, name):
                    raise Mistake(name, f"{name} {value!r} has no effect: {self.task} brings its own.")
            return
        if self.task not in DEFAULT_MODELS:
            own = "Your own is written my_module:make."
            raise Mistake("task", f"task {self.task!r} is unknown.{nearest(self.task, tuple(DEFAULT_MODELS))} {own}")
        if self.model is not None and self.model not in MODELS[self.task]:
            raise Mistake(
                "model", f"model {self.model!r} is not for {self.task}.{nearest(self.model, MODELS[self.task])}"
            )
        if self.text is not None and self.task != "chars":
            raise Mistake("text", f"text is read by the task chars only, and this is {self.task}.")
        if self.folder_of_data is not None and self.task != "fashion-mnist":
            raise Mistake(
                "folder_of_data", f"folder_of_data is read by the task fashion-mnist only, and this is {self.task}."
            )

    def _check_numbers(self) -> None:
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise Mistake("hosts", f"hosts must be from 1 to {MOST_HOSTS}, got {self.hosts}.")
        for name in ("batch", "keep", "epochs", "steps"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise Mistake(name, f"{name} must be 1 or more, got {number}.")
        for name in ("scale", "speed", "seconds", "lr", "evaluate_every", "timeout"):
            number = getattr(self, name)
            if number is not None and not 0 < number < float("inf"):
                raise Mistake(name, f"{name} must be a number above 0, got {number:g}.")
        if self.timeout > MOST_SECONDS:
            raise Mistake("timeout", f"timeout must be {MOST_SECONDS:g} s or less, got {self.timeout:g}.")
        for name in ("scale", "speed"):
            if getattr(self, name) != 1 and self.network is None:
                wrong = f"{name} {getattr(self, name):g} has no effect: it changes a network, and none is named."
                raise Mistake(name, wrong)
        if not 0 <= self.momentum < 1:
            raise Mistake("momentum", f"momentum must be in [0, 1), got {self.momentum:g}.")
        if self.target is not None and self.quality == "accuracy" and not 0 < self.target <= 1:
            raise Mistake("target", f"target is an accuracy in (0, 1], got {self.target:g}.")
        if self.target is not None and self.quality == "perplexity" and not 1 < self.target < float("inf"):
            raise Mistake("target", f"target is a perplexity above 1, as {self.task} has it, got {self.target:g}.")
        if self.checkpoint_every < 0:
            raise Mistake("checkpoint_every", f"checkpoint_every must be 0 or more, got {self.checkpoint_every}.")
        if not 0 <= self.seed < SEEDS:
            raise Mistake("seed", f"seed must be from 0 to 2^32 - 1, got {self.seed}.")
        if self.port is not None and not 1 <= self.port <= 65535:
            raise Mistake("port", f"port must be from 1 to 65535, got {self.port}.")

    # --- what follows from the settings

    @property
    def own(self) -> bool:
        """Whether model and data are the user's."""
        return ":" in self.task

    @property
    def quality(self) -> str:
        """What tells how well it has learned: accuracy, of which more is better, or perplexity, of which less is."""
        return "perplexity" if self.task == "chars" else "accuracy"

    @property
    def chosen_model(self) -> str | None:
        """The model's name; None for the user's own."""
        return None if self.own else self.model or DEFAULT_MODELS[self.task]

    @property
    def chosen_optimizer(self) -> str:
        return self.optimizer or LEARNING[self.chosen_model or "mlp"][0]

    @property
    def chosen_lr(self) -> float:
        """As given, or what suits the model; for another optimizer than the model's own, what usually suits that."""
        if self.lr is not None:
            return self.lr
        optimizer, lr = LEARNING[self.chosen_model or "mlp"]
        return lr if self.chosen_optimizer == optimizer else {"sgd": 0.05, "adam": 0.001}[self.chosen_optimizer]

    @property
    def last_epoch(self) -> int | None:
        """How many epochs there are at most; None if only steps or seconds end the training."""
        ends = self.epochs is not None or self.steps is not None or self.seconds is not None
        return self.epochs if ends else DEFAULT_EPOCHS

    @property
    def concentration(self) -> float | None:
        """Of the Dirichlet distribution of labels over workers; None for examples spread evenly."""
        if self.partition == "iid":
            return None
        name, _, number = self.partition.partition(":")
        try:
            concentration = float(number)
        except ValueError:
            concentration = 0.0
        if name != "dirichlet" or not 0 < concentration < float("inf"):
            wrong = f"partition must be iid, or like dirichlet:0.5 with a number above 0, got {self.partition!r}."
            raise Mistake("partition", wrong)
        return concentration

    @property
    def names_a_network(self) -> bool:
        return self.network is not None or self.latency is not None or self.rate is not None

    def schedule(self) -> Schedule:
        """The network over time, as the lab and the shaped link take it. Raises Mistake if there is none such."""
        from thinwire.lab import profiles
        from thinwire.lab.network import Value
        from thinwire.lab.settings import read_values

        known, values = profiles.names(), dict[str, Value]()
        for key in ("latency", "rate"):
            if (word := getattr(self, key)) is not None:
                with blaming(key):
                    values |= read_values({key: word})
        with blaming("network"):
            if self.network is not None and self.network not in known and not self.network.endswith((".toml", ".csv")):
                near = nearest(self.network, known)
                raise ValueError(f"there is no network {self.network!r}.{near} A file ends in .toml or .csv.")
            schedule = profiles.schedule(self.network, self.hosts, seed=None)
        schedule = schedule.scaled(self.scale)
        with blaming("speed"):
            schedule = schedule.faster(self.speed)
        return schedule.pinned(values)

    # --- in and out

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ratios": list(self.ratios)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Job:
        for key in data:
            if key not in KEYS:
                raise ValueError(f"{key!r} is no setting of a job.{nearest(key, KEYS)}")
        return Job(**data)


KEYS = tuple(field.name for field in fields(Job))
_KINDS = {NoneType: "nothing", str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _typed(name: str, value: Any) -> Any:
    """The value as its field's type, or an error that says what it should be."""
    hint = _HINTS[name]
    if name == "ratios":
        pair = list(value) if isinstance(value, (list, tuple)) else []
        if len(pair) != 2 or not all(_is_number(number) for number in pair):
            raise Mistake("ratios", f"ratios must be two numbers, like [0.001, 0.1], got {value!r}.")
        _require_size(name, *pair)
        return float(pair[0]), float(pair[1])
    allowed = get_args(hint) or (hint,)
    if _is_number(value):
        _require_size(name, value)
    if float in allowed and _is_number(value):
        return float(value)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        wanted = " or ".join(_KINDS[kind] for kind in allowed if kind is not NoneType)
        raise Mistake(name, f"{name} must be {wanted}, got {value!r}.")
    return value


_HINTS = get_type_hints(Job)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _require_size(name: str, *numbers: int | float) -> None:
    """Of whole numbers, which a file may have as long as it likes."""
    if any(isinstance(number, int) and abs(number) >= LARGEST for number in numbers):
        raise Mistake(name, f"{name} must have fewer digits.")


# --- a run's folder


def write_job(folder: Path, job: Job, command: Sequence[str]) -> None:
    """Write what is needed to run it again. It is there whole or not at all; of a run that goes on, every start is."""
    start = {"command": list(command), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    before = _starts(folder / JOB)
    facts = {
        "format": FORMAT,
        "job": job.to_json(),
        **(before[0] if before else start),
        "versions": _versions(),
        "machine": _machine(),
        "resumed": [*before[1:], start] if before else [],
    }
    temporary = folder / f"{JOB}.tmp"
    try:
        temporary.write_text(json.dumps(facts, indent=1) + "\n")
        os.replace(temporary, folder / JOB)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _starts(path: Path) -> list[dict[str, Any]]:
    """The commands by which a run was begun and went on, and when; none of a new one."""
    try:
        facts = json.loads(path.read_text())
        return [{key: facts[key] for key in ("command", "started")}, *facts["resumed"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def read_job(folder: Path | str) -> Job:
    """The job that a run's folder is of."""
    path = Path(folder) / JOB
    try:
        facts = json.loads(path.read_text())
        found = facts["format"]
        if found != FORMAT:
            raise ValueError(f"it has format {found!r}, and this thinwire reads {FORMAT}")
        return Job.from_json(facts["job"])
    except (FileNotFoundError, NotADirectoryError):
        why = f"it has no {JOB}" if Path(folder).is_dir() else "there is no such folder"
        raise ValueError(f"{folder} is no run: {why}.") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} describes no job: {error}.") from error


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: _version(name) for name in ("thinwire", "torch", "numpy")}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _machine() -> dict[str, str | int]:
    return {
        "cores": os.cpu_count() or 0,
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
