"""What a figure was measured on."""

from __future__ import annotations

import os
import platform

import torch

import thinwire


def describe_machine() -> dict[str, str | int]:
    """The size of the machine and the versions that matter, for the end of every benchmark result."""
    return {
        "cores": os.cpu_count() or 0,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "thinwire": thinwire.__version__,
    }
