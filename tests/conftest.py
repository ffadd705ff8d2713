"""One thread per process, and no deadline for hypothesis: the first call of a kernel compiles it.

A shell starts what runs in its background with interrupts ignored, and nohup what it runs with hang-ups: so would be
all that tests start and then interrupt.
"""

from __future__ import annotations

import signal

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
settings.register_profile("thinwire", deadline=None, derandomize=True)
settings.load_profile("thinwire")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="Write down what is found as what is expected.")
