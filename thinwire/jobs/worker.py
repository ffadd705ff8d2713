"""What every worker runs: `python -m thinwire.jobs.worker RUN`, with torchrun's environment.

It meets the others, trains (thinwire.jobs.training), and says how that ended: by its exit code, and in a sentence if
there is something to say.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from thinwire.errors import ThinwireError
from thinwire.jobs import outcome, own, telling, torchrun
from thinwire.jobs.job import Job, read_job
from thinwire.jobs.leaving import INTERRUPTED, Leaving
from thinwire.jobs.meeting import meet
from thinwire.jobs.training import Ending, Training


def main(arguments: list[str]) -> NoReturn:
    """`RUN [--resume]`: the folder, whose job.json says what to do. To go on is what happens anyway."""
    folders = [argument for argument in arguments if argument != "--resume"]
    if len(folders) != 1:
        print("usage: python -m thinwire.jobs.worker RUN [--resume]", file=sys.stderr)
        leave(2)
    leave(work(Path(folders[0])))


def join(job: Job, folder: Path | None) -> NoReturn:
    """Be one of the workers that torchrun has started, and end with them. Without a folder, rank 0 makes one."""
    leave(work(folder, job=job, with_report=True))


def leave(code: int) -> NoReturn:
    """End this process at once. All is written and closed; torch's threads may wait for peers that have gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def work(folder: Path | None, job: Job | None = None, with_report: bool = False) -> int:
    """Train as this process's rank, and give the exit code: 0, 1 if it failed, 130 if it was interrupted.

    Args:
        folder: of the run; None for rank 0 to make one.
        job: what to do; None for what the folder says.
        with_report: rank 0 makes the report, since whoever started the workers does not.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with Leaving() as leaving:
        try:
            job = read_job(folder) if job is None and folder is not None else job
            assert job is not None, "whoever gives no folder gives a job"
            return _work(folder, job, leaving, with_report)
        except BaseException as error:
            if leaving.asked:
                leaving.last_words()
                return INTERRUPTED
            telling.say(_in_words(error, job))
            return 1


def _work(folder: Path | None, job: Job, leaving: Leaving, with_report: bool) -> int:
    store = meet(job)
    goes_on = folder is not None
    if with_report:
        torchrun.require_one_job(job, goes_on)
    if folder is None:
        job = replace(job, hosts=dist.get_world_size())
        folder = torchrun.shared_folder(job, store)
    elif job.hosts != dist.get_world_size():
        raise ValueError(f"{folder} is a run of {job.hosts} workers, and here are {dist.get_world_size()}.")
    is_host = with_report and dist.get_rank() == 0
    if with_report:
        torchrun.begin(job, folder, goes_on)
    training = _training(job, folder, leaving)
    leaving.last_words = training.say_interrupted
    try:
        with torchrun.told(job, folder, training.goes_on) if is_host else nullcontext():
            ending = training.run()
    except BaseException as error:
        if not leaving.asked:
            training.end(Ending("failed", _in_words(error, job, quiet=True)))
        raise
    training.close()
    if ending.how == "failed" and dist.get_rank() == 0:
        telling.say(ending.message)
    elif training.trouble:
        telling.say(training.trouble)
    if is_host:
        torchrun.report(folder, job.tensorboard)
    if ending.how == "done":
        leaving.last_words = lambda: None
        del training  # the model has to go before the process group: see examples/ddp.py
        dist.destroy_process_group()
    return {"done": 0, "interrupted": INTERRUPTED}.get(ending.how, 1)


def _training(job: Job, folder: Path, leaving: Leaving) -> Training:
    try:
        return Training(job, folder, leaving)
    except BaseException as error:
        if dist.get_rank() == 0 and not leaving.asked:
            outcome.note(folder, how="failed", message=_in_words(error, job, quiet=True))
        raise


def _in_words(error: BaseException, job: Job | None, quiet: bool = False) -> str:
    """An error that was foreseen is its own sentence; any other is shown whole, unless it will be later."""
    is_users = job is not None and job.own and own.place_of(error) != ""
    if isinstance(error, ThinwireError) or (isinstance(error, (ValueError, OSError)) and not is_users):
        return " ".join(str(error).split())
    if isinstance(error, RuntimeError) and "gloo" in str(error):
        return f"{telling.LOST}: {str(error).splitlines()[0]}"
    if not quiet:
        traceback.print_exception(error)
    return f"{job.task}: {own.in_words(error)}" if job is not None and is_users else own.in_words(error)


if __name__ == "__main__":
    main(sys.argv[1:])
