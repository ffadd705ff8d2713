"""Train PyTorch models over thin, unpredictable wires."""

from typing import TYPE_CHECKING

from thinwire.errors import (
    CheckpointError,
    LinkError,
    LinkTimeout,
    PeerLost,
    PlanMismatch,
    RemoteError,
    ThinwireError,
    ThinwireWarning,
)

if TYPE_CHECKING:
    from thinwire.control.adaptive import Adaptive
    from thinwire.train.checkpoint import Checkpoint
    from thinwire.train.ddp import attach
    from thinwire.train.explore import Explorer
    from thinwire.train.gossip import Gossip
    from thinwire.train.sync import Synchronizer
    from thinwire.types import Network, Plan, StepRecord

__version__ = "0.1.0.dev0"

__all__ = [
    "Adaptive",
    "Checkpoint",
    "CheckpointError",
    "Explorer",
    "Gossip",
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
    "ThinwireWarning",
    "__version__",
    "attach",
]

# These bring torch with them, which takes seconds to import and which `thinwire lab` does without: they come when they
# are first asked for.
_HOMES = {
    "Adaptive": "thinwire.control.adaptive",
    "Checkpoint": "thinwire.train.checkpoint",
    "Explorer": "thinwire.train.explore",
    "Gossip": "thinwire.train.gossip",
    "Network": "thinwire.types",
    "Plan": "thinwire.types",
    "StepRecord": "thinwire.types",
    "Synchronizer": "thinwire.train.sync",
    "attach": "thinwire.train.ddp",
}

if not TYPE_CHECKING:  # a type checker would take any name for known

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        globals()[name] = getattr(import_module(_HOMES[name]), name)
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
