"""thinwire lab check: is the lab's network what it says? Measured from inside, with plain sockets."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from thinwire.lab import light, probe
from thinwire.lab.errors import LabError
from thinwire.lab.lab import Lab
from thinwire.lab.network import Conditions

HEADERS = 52  # IP 20, TCP 20, TCP's timestamps 12: of every packet of a stream
PING_HEADERS = 28
WINDOW = 5.0  # seconds that a rate is measured for
PATIENCE = 40.0  # seconds after which a stream that still grows is measured anyway


class Probe(NamedTuple):
    """A program of `thinwire.lab.probe` that runs on a host."""

    process: subprocess.Popen[bytes]

    def lines(self) -> Iterator[Any]:
        assert self.process.stdout is not None
        return (json.loads(line) for line in self.process.stdout)

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdout, self.process.stdin):
            if stream is not None:
                stream.close()


@contextmanager
def probing(lab: Lab, host: int, *arguments: str, serves: bool = False) -> Iterator[Probe]:
    """Run a probe on a host; one that serves is ready when this begins."""
    process = lab.start(
        host, light.command("thinwire.lab.probe", *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    running = Probe(process)
    try:
        if serves and next(running.lines(), None) != "ready":
            raise RuntimeError(f"the probe {arguments[0]} on host {host} did not start; its error is above.")
        yield running
    finally:
        running.end()


def round_trips(lab: Lab, src: int = 0, dst: int = 1, number: int = 100, interval: float = 0.01) -> list[float]:
    """Seconds of each of so many pings, one after the other; those without an answer are left out."""
    with probing(lab, src, "ping", lab.address(dst), str(number), str(interval)) as pings:
        return [answer["rtt"] for answer in pings.lines() if answer["rtt"] is not None]


class Datagram(NamedTuple):
    """One that arrived: its number, when it was sent on the machine's monotonic clock, and how long it took."""

    number: int
    sent: float
    seconds: float


def one_way(
    lab: Lab,
    src: int = 0,
    dst: int = 1,
    number: int = 1000,
    per_second: float = 1000,
    silence: float = 1.0,
    half_way: Callable[[], None] | None = None,
) -> list[Datagram]:
    """Send so many datagrams and see which arrive, in the order of their arrival.

    `silence` seconds without one after the last was sent are the end. `half_way` is called when half have been sent.
    """
    with (
        probing(lab, dst, "count", str(silence), serves=True) as counter,
        probing(lab, src, "flood", lab.address(dst), str(number), str(per_second)) as flood,
    ):
        for said in flood.lines():
            if said == "half" and half_way is not None:
                half_way()
        counter.say("all")
        return [Datagram(*each) for each in next(counter.lines())]


def throughput(lab: Lab, src: int = 0, dst: int = 1, window: float = WINDOW) -> tuple[float, float]:
    """What one TCP stream carries once it has stopped growing: IP bytes per second, and the relay's share of a core.

    The receiver counts the payload, and each full packet's headers are added: those use the wire too.
    """
    with probing(lab, dst, "sink", "0.1", serves=True) as sink, probing(lab, src, "source", lab.address(dst)):
        lines = sink.lines()
        first = _when_steady(lines)
        before = lab.stats()
        last = next(line for line in lines if line["time"] >= first["time"] + window)
        after = lab.stats()
    payload = (last["bytes"] - first["bytes"]) / (last["time"] - first["time"])
    return payload * _with_headers(after), _share(before, after)


def _when_steady(lines: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """The first moment at which the last second brought hardly more than the one before it."""
    seen: list[dict[str, Any]] = []
    for line in lines:
        seen.append(line)
        now = line["time"]
        if now > seen[0]["time"] + PATIENCE:
            return line
        older = [next((old for old in reversed(seen) if old["time"] <= now - ago), None) for ago in (1.0, 2.0)]
        if older[0] is None or older[1] is None:
            continue
        recent, before = line["bytes"] - older[0]["bytes"], older[0]["bytes"] - older[1]["bytes"]
        if abs(recent - before) <= 0.02 * recent:
            return line
    raise RuntimeError("the stream ended before it was measured.")


def all_to_all(lab: Lab, settle: float = 5.0, window: float = 10.0) -> tuple[list[list[float]], float]:
    """Everyone sends to everyone: IP bytes per second at each host from each other, and the relay's share of a core."""
    addresses = [lab.address(host) for host in range(lab.hosts)]
    with _meshes(lab, addresses) as meshes:
        for each in meshes:
            each.say("connect")
        reports = [each.lines() for each in meshes]
        for lines in reports:
            next(lines)  # connected
        for each in meshes:
            each.say("begin")
        starts = [(lines, _after(lines, settle)) for lines in reports]
        before = lab.stats()
        ends = [_after(lines, window, start) for lines, start in starts]
        after = lab.stats()
    rates = [
        [_rate(start, end, address) * _with_headers(after) for address in addresses]
        for (_, start), end in zip(starts, ends, strict=True)
    ]
    return rates, _share(before, after)


@contextmanager
def _meshes(lab: Lab, addresses: Sequence[str]) -> Iterator[list[Probe]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                probing(lab, host, "mesh", mine, "0.5", *(a for a in addresses if a != mine), serves=True)
            )
            for host, mine in enumerate(addresses)
        ]


def _after(lines: Iterator[dict[str, Any]], seconds: float, start: dict[str, Any] | None = None) -> dict[str, Any]:
    begin = start if start is not None else next(lines)
    return next(line for line in lines if line["time"] >= begin["time"] + seconds)


def _rate(start: dict[str, Any], end: dict[str, Any], address: str) -> float:
    came = end["bytes"].get(address, 0) - start["bytes"].get(address, 0)
    return float(came / (end["time"] - start["time"]))


def _with_headers(stats: dict[str, Any]) -> float:
    """How many bytes are on the wire for each of the payload, in full packets."""
    return float(stats["mtu"] / (stats["mtu"] - HEADERS))


def _share(before: dict[str, Any], after: dict[str, Any]) -> float:
    return float((after["cpu"] - before["cpu"]) / (after["time"] - before["time"]))


def measure(lab: Lab) -> dict[str, Any]:
    """All figures, of the conditions at the beginning of the lab's schedule."""
    conditions = Conditions(lab.hosts, lab.schedule.site or None)
    for change in lab.schedule.changes:
        if change.at == 0:
            conditions.apply(change)
    there, back = conditions.routes[0][1], conditions.routes[1][0]
    rate = conditions.rate(0, 1)
    ping_bytes = probe.PING_BYTES + PING_HEADERS
    ideal = there.latency + back.latency + ping_bytes / rate + ping_bytes / conditions.rate(1, 0)
    trips = round_trips(lab, number=100 if ideal < 0.02 else 40)
    if not trips:
        raise LabError("no ping from host 0 to host 1 was answered within 2 s, so there is nothing to measure.")
    carried, share = throughput(lab)
    figures: dict[str, Any] = {
        "hosts": lab.hosts,
        "rtt_ms": round(statistics.median(trips) * 1e3, 3),
        "rtt_ideal_ms": round(ideal * 1e3, 3),
        "throughput_mbit": round(carried * 8 / 1e6, 2),
        "rate_mbit": round(rate * 8 / 1e6, 2) if math.isfinite(rate) else None,
        "relay_cpu": round(share, 3),
        "mtu": lab.stats()["mtu"],
    }
    return figures | (_all_to_all_figures(lab) if lab.hosts > 2 else {})


def _all_to_all_figures(lab: Lab) -> dict[str, Any]:
    rates, share = all_to_all(lab)
    flows = [flow for host, row in enumerate(rates) for other, flow in enumerate(row) if other != host]
    return {
        "all_to_all_mbit": [round(sum(row) * 8 / 1e6, 2) for row in rates],
        "least_flow_mbit": round(min(flows) * 8 / 1e6, 2),
        "most_flow_mbit": round(max(flows) * 8 / 1e6, 2),
        "all_to_all_relay_cpu": round(share, 3),
    }


def describe(figures: dict[str, Any]) -> list[str]:
    """The figures in sentences."""
    rate = f"{figures['rate_mbit']:.1f} Mbit/s" if figures["rate_mbit"] is not None else "unlimited Mbit/s"
    lines = [
        f"round trip   {figures['rtt_ms']:.2f} ms, ideal {figures['rtt_ideal_ms']:.2f} ms",
        f"throughput   {figures['throughput_mbit']:.1f} of {rate} (one stream, IP bytes)",
        f"relay        {figures['relay_cpu']:.0%} of a core, packets of {figures['mtu']} bytes",
    ]
    if "all_to_all_mbit" in figures:
        each = figures["all_to_all_mbit"]
        lines.append(
            f"all to all   each host gets {min(each):.1f} to {max(each):.1f} Mbit/s, each stream "
            f"{figures['least_flow_mbit']:.1f} to {figures['most_flow_mbit']:.1f}; relay "
            f"{figures['all_to_all_relay_cpu']:.0%} of a core"
        )
    return lines
