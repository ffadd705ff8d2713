"""All ranks measure together: they meet in the process group's store, and then two and two, in turn.

Every wait has an end and names who was waited for. Rank 0 gathers; the others have nothing to say.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from thinwire.errors import ThinwireError
from thinwire.jobs.doctor.findings import NOTE, OK, PROBLEM, Finding, Pair, Paths
from thinwire.jobs.doctor.host import Host, this_host
from thinwire.jobs.doctor.pair import PAIR_SECONDS, Place, Post, Seen, examine
from thinwire.link.address import named
from thinwire.link.tcp import TcpLink

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LEAST_PAUSE, MOST_PAUSE = 0.005, 0.05  # seconds between two looks into the store
LATER_SECONDS = 15.0  # that others wait for rank 0 beyond its own patience
PIECE_BYTES, ASKED_AT_ONCE = 900, 16  # what a small packet holds, of text and of questions
TURN_SECONDS = PAIR_SECONDS + 5.0  # for all to have ended a turn
JOIN_SECONDS = 10.0  # for the links that training uses to come together


class NotTogether(ThinwireError):
    """This rank could not take part."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What rank 0 knows in the end.

    Attributes:
        hosts: of the ranks that came, in order.
        paths: between one rank of each machine, or between all ranks if there is one machine.
        untried: pairs of which one offers an address that leads the other to itself.
        seconds: that measuring took, on rank 0.
        remark: about the coming together.
    """

    world_size: int
    hosts: tuple[Host, ...]
    paths: Paths
    untried: frozenset[Pair] = frozenset()
    seconds: float = 0.0
    remark: Finding = Finding(NOTE, "links", "nothing was tried")

    @property
    def several(self) -> bool:
        """Whether the ranks are on more than one machine."""
        return len({host.machine for host in self.hosts}) > 1


def take_part(rank: int, world_size: int, patience: float) -> World | None:
    """Measure with the other ranks. Gives rank 0 what was found, the others None.

    Args:
        patience: seconds that rank 0 waits for the others to come.
    """
    turns = world_size + 1
    with _ended_after(2 * patience + 3 * LATER_SECONDS + turns * TURN_SECONDS, rank):
        store = open_store(rank, patience)
        try:
            return _Rank(rank, world_size, patience, store).take_part()
        except dist.DistError as error:
            raise NotTogether(f"rank {rank} lost the store that rank 0 keeps: has rank 0 ended?") from error


@contextmanager
def _ended_after(seconds: float, rank: int) -> Iterator[None]:
    """The last resort: a store whose host has vanished may let a question wait for ever."""

    def end() -> None:
        print(f"thinwire doctor: rank {rank} got no further for {seconds:.0f} s and gives up.", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def open_store(rank: int, patience: float) -> Store:
    """The ranks' common store: torchrun's own, or else one that rank 0 keeps."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdigit():
        raise NotTogether("RANK is set, but MASTER_ADDR and MASTER_PORT do not say where rank 0 is.")
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=patience if keeps else patience + LATER_SECONDS)
    if not keeps:
        _wait_for(rank, address, int(port), limit.total_seconds())
    try:
        store = TCPStore(address, int(port), None, keeps, limit, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        if keeps and "EADDRINUSE" in str(error):
            raise NotTogether(f"port {port} of {address} is in use: choose another MASTER_PORT.") from error
        what = "could not open its store at" if keeps else "could not reach rank 0's store at"
        raise NotTogether(f"rank {rank} {what} {address} port {port} (MASTER_ADDR, MASTER_PORT).") from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"thinwire/doctor/{attempt}", store)


def _wait_for(rank: int, address: str, port: int, seconds: float) -> None:
    """Until somebody listens there. torch would wait twice as long, and then show its insides."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                why = error.strerror or str(error)
                where = f"{address} port {port} (MASTER_ADDR, MASTER_PORT)"
                raise NotTogether(f"rank {rank} could not reach rank 0's store at {where}: {why}.") from error
        time.sleep(MOST_PAUSE)


class _Rank:
    """One rank's part."""

    def __init__(self, rank: int, world_size: int, patience: float, store: Store) -> None:
        self.rank, self.world_size, self.patience, self.store = rank, world_size, patience, store

    def take_part(self) -> World | None:
        host = this_host(self.rank, self.store)
        with self._post(host) as post:
            self._tell("host", {"host": host.to_json(), "ports": post.ports})
            present, run = self._meet()
            told = {rank: self._told("host", rank) for rank in present}
            hosts = {rank: Host.from_json(each["host"]) for rank, each in told.items()}
            places = one_of_each_machine([_place(hosts[rank], each["ports"]) for rank, each in told.items()])
            begin = time.monotonic()
            if self.rank in places:
                self._measure(post, places, run)
        if self.rank == 0:
            return self._gather(hosts, places, time.monotonic() - begin)
        self._await_verdict()
        return None

    def _post(self, host: Host) -> Post:
        if not host.ours.address:
            raise NotTogether(f"rank {self.rank} has no address for the others: {host.ours.why}")
        try:
            return Post(host.ours.address)
        except OSError as error:
            raise NotTogether(f"rank {self.rank} cannot listen at {host.ours.address}: {error.strerror}.") from error

    def _meet(self) -> tuple[list[int], str]:
        """Who is there, as rank 0 says after waiting for all."""
        if self.rank == 0:
            absent = self._await("host", range(self.world_size), self.patience)
            present = [rank for rank in range(self.world_size) if rank not in absent]
            self._tell("present", {"ranks": present, "run": secrets.token_hex(16)})
        limit = self.patience + LATER_SECONDS
        if self._await("present", [0], limit):
            raise NotTogether(f"rank {self.rank} heard nothing from rank 0 for {limit:g} s.")
        said = self._told("present", 0)
        if self.rank not in said["ranks"]:
            raise NotTogether(f"rank {self.rank} came too late: rank 0 had waited {self.patience:g} s (see --wait).")
        return said["ranks"], said["run"]

    def _measure(self, post: Post, places: Mapping[int, Place], run: str) -> None:
        """With each of the others once, as long as all keep up."""
        me, seen = places[self.rank], []
        for turn, pairs in enumerate(tournament(list(places))):
            self._tell(f"turn {turn}", True)
            if self._await(f"turn {turn}", places, TURN_SECONDS):
                break  # rank 0 will notice who is missing
            met = [places[other] for pair in pairs if self.rank in pair for other in pair if other != self.rank]
            seen += [examine(post, me, peer, run).to_json() for peer in met if not leads_to_itself(me, peer)]
        self._tell("seen", seen)

    # --- the end

    def _gather(self, hosts: Mapping[int, Host], places: Mapping[int, Place], seconds: float) -> World:
        absent = self._await("seen", places, TURN_SECONDS)
        seen: dict[Pair, Seen] = {}
        for rank in (rank for rank in places if rank not in absent):
            seen |= {(rank, each["peer"]): Seen.from_json(each) for each in self._told("seen", rank)}
        paths = Paths(list(places), seen)
        missing = sorted({*range(self.world_size)} - hosts.keys() | {*absent})
        world = World(
            world_size=self.world_size,
            hosts=tuple(hosts[rank] for rank in sorted(hosts)),
            paths=paths,
            untried=frozenset((i, j) for i, j in paths.pairs if leads_to_itself(places[i], places[j])),
            seconds=seconds,
        )
        remark = self._missing(missing) if missing else self._try_links(world)
        self._await(
            "left", [rank for rank in hosts if rank not in (0, *missing)], JOIN_SECONDS
        )  # the store goes with us
        return replace(world, remark=remark)

    def _missing(self, ranks: list[int]) -> Finding:
        self._tell("verdict", False)
        text = f"{named(ranks)} of {self.world_size} did not come within {self.patience:g} s, or left"
        advice = "See what they say themselves: can they reach MASTER_ADDR and MASTER_PORT? --wait gives more time."
        return Finding(PROBLEM, "missing", text, named(ranks), advice)

    def _try_links(self, world: World) -> Finding:
        """Let gloo and thinwire's own link come together as they would for training, if they can."""
        lost = world.several and any(host.ours.is_loopback or host.gloo.is_loopback for host in world.hosts)
        sound = not lost and len(world.paths.rate) == len(world.paths.directions)
        self._tell("verdict", sound)
        if not sound:
            text = "gloo and thinwire's links were not tried together, because of what else is wrong"
            return Finding(NOTE, "links", text)
        begin = time.monotonic()
        wrong = self._join()
        text = f"gloo and thinwire's links are up between all ranks in {time.monotonic() - begin:.2g} s"
        if wrong:
            return Finding(
                PROBLEM, "links", wrong, "rank 0", "Training would end like this; look at the peer it names."
            )
        return Finding(OK, "links", text)

    def _await_verdict(self) -> None:
        """Stay until rank 0 has all, and try the links with it if it says so."""
        if not self._await("verdict", [0], TURN_SECONDS + LATER_SECONDS) and self._told("verdict", 0):
            self._join()  # what goes wrong goes wrong on rank 0 too
        self._tell("left", True)

    def _join(self) -> str:
        """What went wrong; nothing if all is well."""
        store, limit = PrefixStore("gloo", self.store), timedelta(seconds=JOIN_SECONDS)
        try:
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=limit)
        except (RuntimeError, ValueError) as error:
            return f"gloo did not come together on rank {self.rank}: {str(error).splitlines()[0]}"
        try:
            TcpLink(timeout=JOIN_SECONDS).close()
        except (ThinwireError, RuntimeError, ValueError, OSError) as error:
            return f"thinwire's link did not come together: {error}"
        finally:
            dist.destroy_process_group()
        return ""

    # --- the store

    def _tell(self, what: str, value: Any) -> None:
        """Leave something in the store, piece by piece: on some paths only small packets pass, and those are ours."""
        text = json.dumps(value)
        pieces = [text[start : start + PIECE_BYTES] for start in range(0, len(text), PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            self.store.set(f"{what}/{self.rank}/{number}", piece)
            self.store.check(["nothing"])  # whose answer says that the piece is there, so that two never go together
        self.store.set(f"{what}/{self.rank}", str(len(pieces)))

    def _told(self, what: str, rank: int) -> Any:
        pieces = range(int(self.store.get(f"{what}/{rank}")))
        return json.loads(b"".join(self.store.get(f"{what}/{rank}/{number}") for number in pieces))

    def _await(self, what: str, ranks: Iterable[int], seconds: float) -> list[int]:
        """Wait until all of these ranks have told something; give those that have not."""
        waiting = list(ranks)
        until, pause = time.monotonic() + seconds, LEAST_PAUSE
        while waiting:
            some = waiting[:ASKED_AT_ONCE]
            if self.store.check([f"{what}/{rank}" for rank in some]):
                del waiting[: len(some)]
                continue
            if time.monotonic() > until:
                return [rank for rank in waiting if not self.store.check([f"{what}/{rank}"])]
            time.sleep(pause)
            pause = min(pause * 1.5, MOST_PAUSE)  # every look is a message to the store's host, where others measure
        return []


def _place(host: Host, ports: Sequence[int]) -> Place:
    return Place(host.rank, host.ours.address, ports[0], ports[1], host.mtu, host.machine)


# --- who with whom


def one_of_each_machine(places: Sequence[Place]) -> dict[int, Place]:
    """Who measures. Several on one machine would share its wire, and each would find a part of it.

    If there is only one machine there is no wire, and all measure what they have.
    """
    first: dict[str, Place] = {}
    for place in sorted(places):
        first.setdefault(place.machine, place)
    return {place.rank: place for place in (first.values() if len(first) > 1 else sorted(places))}


def leads_to_itself(one: Place, other: Place) -> bool:
    """Two machines of which one offers a loopback address, which leads whoever calls it to itself."""
    local = any(place.address.startswith("127.") or place.address == "::1" for place in (one, other))
    return local and one.machine != other.machine


def tournament(ranks: Sequence[int]) -> list[list[Pair]]:
    """Turns in which everybody meets somebody, until all have met all: the circle method.

    >>> tournament([0, 1, 2, 3])
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    >>> [len(turn) for turn in tournament([0, 1, 2])]
    [1, 1, 1]
    """
    circle: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    turns = []
    for _ in range(len(circle) - 1):
        facing = zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True)
        turns.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return turns
