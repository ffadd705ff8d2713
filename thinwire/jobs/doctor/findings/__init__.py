"""From what was read and measured to what is well, worth knowing or wrong. Pure: numbers in, words out.

A problem always comes with advice. What cannot be known is not claimed: see `later_one_way`.
"""

from __future__ import annotations

from thinwire.jobs.doctor.findings.base import NOTE, OK, PROBLEM, Finding
from thinwire.jobs.doctor.findings.machines import interface, machine, tcp
from thinwire.jobs.doctor.findings.network import later_one_way, losses, packets, rates, reachability
from thinwire.jobs.doctor.findings.paths import Matrix, Pair, Paths

__all__ = [
    "NOTE",
    "OK",
    "PROBLEM",
    "Finding",
    "Matrix",
    "Pair",
    "Paths",
    "interface",
    "later_one_way",
    "losses",
    "machine",
    "packets",
    "rates",
    "reachability",
    "tcp",
]
