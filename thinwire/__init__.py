"""Train PyTorch models over thin, unpredictable wires."""

from thinwire.errors import (
    CheckpointError,
    LinkError,
    LinkTimeout,
    PeerLost,
    PlanMismatch,
    RemoteError,
    ThinwireError,
)
from thinwire.train.checkpoint import Checkpoint
from thinwire.train.ddp import attach
from thinwire.train.sync import Synchronizer
from thinwire.types import Network, Plan, StepRecord

__version__ = "0.1.0.dev0"

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "LinkError",
    "LinkTimeout",
    "Network",
    "PeerLost",
    "Plan",
    "PlanMismatch",
    "RemoteError",
    "StepRecord",
    "Synchronizer",
    "ThinwireError",
    "__version__",
    "attach",
]
