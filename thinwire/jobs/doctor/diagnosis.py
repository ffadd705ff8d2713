"""The whole: what was found, section by section, and the plan that training would begin with."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from thinwire.control.adaptive import Adaptive
from thinwire.control.decision import Standing
from thinwire.control.prices import Prices
from thinwire.control.view import View
from thinwire.exchange import complete
from thinwire.jobs.doctor import findings
from thinwire.jobs.doctor.findings import NOTE, OK, PROBLEM, Finding, Matrix, Paths
from thinwire.jobs.doctor.host import Host, is_here, this_host
from thinwire.jobs.doctor.together import World
from thinwire.lab.errors import LabError
from thinwire.lab.lab import Lab
from thinwire.lab.units import format_rate, format_seconds
from thinwire.types import Network

MOST_RANKS = 64  # playing every message of more takes minutes


class Section(NamedTuple):
    """Findings about one thing."""

    title: str
    findings: list[Finding]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What a person, or a script, is told.

    Attributes:
        host: the one whose interface is shown.
        ranks: those that the matrices have rows for; none if nothing was measured.
        latency: in milliseconds, half a round trip.
        rate: in Mbit/s, from the row's rank to the column's.
        seconds: that measuring took.
        plan: the first plan of a training, None if latency or rate are not known.
    """

    sections: tuple[Section, ...]
    host: Host
    world_size: int
    ranks: tuple[int, ...] = ()
    latency: Matrix
    rate: Matrix
    seconds: float = 0.0
    plan: Mapping[str, Any] | None

    @property
    def problems(self) -> list[Finding]:
        return [finding for section in self.sections for finding in section.findings if finding.mark == PROBLEM]

    def to_json(self) -> dict[str, Any]:
        return {
            "interface": self.host.ours.interface,
            "address": self.host.ours.address,
            "loopback": self.host.ours.is_loopback or self.host.gloo.is_loopback,
            "mtu": self.host.mtu,
            "world_size": self.world_size,
            "ranks": list(self.ranks),
            "latency_ms": self.latency,
            "rate_mbit": self.rate,
            "seconds": round(self.seconds, 3),
            "problems": [
                {"kind": each.kind, "what": each.text, "where": each.where, "advice": each.advice}
                for each in self.problems
            ],
            "plan": self.plan,
        }


def examine_alone() -> Diagnosis:
    """Look at this machine only. Nothing is sent."""
    host = this_host()
    sections = (
        Section("Machine", [*findings.machine([host], 1, _local_ranks()), _lab()]),
        Section("Interface", findings.interface([host], several=_means_several())),
        Section("TCP", findings.tcp([host], None)),
    )
    return Diagnosis(sections=sections, host=host, world_size=1, latency=[], rate=[], plan=None)


def diagnose(world: World, params: int) -> Diagnosis:
    """From what all ranks have found."""
    hosts, paths = world.hosts, world.paths
    mtus, devices = {host.rank: host.mtu for host in hosts}, {host.ours.interface or "INTERFACE" for host in hosts}
    measured = [
        *findings.reachability(paths, world.untried),
        *findings.packets(paths, mtus, devices.pop() if len(devices) == 1 else "INTERFACE"),
        *findings.rates(paths),
        *findings.losses(paths),
        *findings.later_one_way(paths),
    ]
    network = typical(paths)
    plan = first_plan(network, params, world.world_size) if network is not None else None
    sections = (
        Section("Machine", findings.machine(hosts, world.world_size, _local_ranks())),
        Section("Interface", findings.interface(hosts, several=world.several)),
        Section("TCP", findings.tcp(hosts, paths)),
        Section("Ranks", [world.remark, *measured]),
        Section("Plan", [_planned(plan, network)]),
    )
    return Diagnosis(
        sections=sections,
        host=hosts[0],
        world_size=world.world_size,
        ranks=paths.ranks,
        latency=paths.matrix(paths.latency, 1e3),
        rate=paths.matrix(lambda i, j: paths.rate.get((i, j)), 8e-6),
        seconds=world.seconds,
        plan=plan,
    )


# --- alone


def _local_ranks() -> int:
    """How many ranks this machine has, as torchrun says."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdigit() and int(text) > 0 else 1


def _means_several() -> bool:
    """Whether the environment speaks of another machine, although no ranks were started."""
    master = os.environ.get("MASTER_ADDR")
    return bool(master) and not is_here(str(master))


def _lab() -> Finding:
    try:
        with Lab(1):
            return Finding(OK, "lab", "thinwire lab runs here: networks can be tried out before they are met")
    except LabError as error:
        text = "thinwire lab does not run here, so networks cannot be tried out"
        return Finding(NOTE, "lab", text, advice=str(error).splitlines()[0])


# --- the plan


def typical(paths: Paths) -> Network | None:
    """Latency and seconds per byte as ranks in training would agree on them: the mean of what each finds usual."""
    alphas = [_median(paths.latency(i, j) for j in paths.ranks if i != j) for i in paths.ranks]
    rates = [_median(paths.rate.get((j, i)) for j in paths.ranks if i != j) for i in paths.ranks]
    alpha, rate = _geometric_mean(alphas), _geometric_mean(rates)
    return None if alpha is None or rate is None else Network(alpha=alpha, beta=1 / rate)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _geometric_mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None and value > 0]
    return math.exp(statistics.fmean(map(math.log, known))) if known else None


def first_plan(network: Network, params: int, world_size: int) -> dict[str, Any] | None:
    """What adaptive would choose before it has seen a gradient; None for more ranks than can be played."""
    if not 1 < world_size <= MOST_RANKS:
        return None
    controller = Adaptive()
    prices = Prices(params, 4, world_size, controller.ways(world_size, has_group=True))
    view = View(alpha=network.alpha, beta=network.beta)
    decision = controller.decide(view, Standing(plan=complete("dense", 1.0)), 0, prices)
    if decision is None:
        return None
    dense = min(c.seconds for c in decision.candidates if c.plan.exchange == "dense")
    return {
        **asdict(decision.plan),
        "words": str(decision.plan),
        "params": params,
        "latency_ms": network.alpha * 1e3,
        "rate_mbit": 8e-6 / network.beta,
        "exchange_ms": (decision.seconds - decision.rest) * 1e3,
        "dense_ms": (dense - decision.rest) * 1e3,
    }


def _planned(plan: Mapping[str, Any] | None, network: Network | None) -> Finding:
    if network is None:
        return Finding(NOTE, "plan", "no plan, because latency or rate are not known")
    usual = f"{format_seconds(network.alpha)} and {format_rate(1 / network.beta)}"
    if plan is None:
        return Finding(NOTE, "plan", f"{usual}; plans are only made here for 2 to {MOST_RANKS} ranks")
    return Finding(
        OK,
        "plan",
        f"{plan['words']}: for {plan['params']:,} parameters over {usual} an exchange takes "
        f"{format_seconds(plan['exchange_ms'] / 1e3)}, dense {format_seconds(plan['dense_ms'] / 1e3)}; "
        "training adapts it to what it measures",
    )
