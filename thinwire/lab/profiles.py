"""Networks by name: the TOML files in `profiles/`, or the user's own. docs/lab.md shows all keys."""

from __future__ import annotations

import math
import random
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from thinwire.lab import settings, units
from thinwire.lab.network import OF_HOST, Change, Pair, Value
from thinwire.lab.schedule import Schedule, read_trace
from thinwire.lab.settings import did_you_mean, read_values

T = TypeVar("T")

VALUES = set(settings.READERS)
WALKING = ("latency", "rate", "up", "down", "loss")
KEYS: dict[str, set[str]] = {
    "": {"about", "epoch", "repeat", "network", "sites", "change", "walk", "trace"},
    "network": VALUES,
    "sites": {"number", "sizes", "inside", "between"},
    "sites.inside": VALUES - {"rate", "up", "down", "queue"},
    "sites.between": VALUES - {"up", "down", "queue"},
    "change": VALUES | {"at", "epoch", "hosts", "pairs", "where", "partition", "heal"},
    "walk": {"seed", "every", "length", "each_host", "jump", *WALKING},
    "walk.*": {"low", "high", "step"},
    "trace": {"file"},
}
TABLES = {"network", "sites", "sites.inside", "sites.between", "walk", "trace", *(f"walk.{key}" for key in WALKING)}


def names() -> list[str]:
    """The profiles that come with thinwire."""
    return sorted(entry.name.removesuffix(".toml") for entry in _shipped() if entry.name.endswith(".toml"))


def _shipped() -> Iterable[Any]:
    return (resources.files("thinwire.lab") / "profiles").iterdir()


def schedule(name: str | None, hosts: int, *, epoch: float | None = None, seed: int | None = None) -> Schedule:
    """The schedule of a profile for so many hosts.

    Args:
        name: a name, or the path of a .toml profile or a .csv trace; None for a network without limits.
        epoch: seconds that an epoch lasts, instead of what the profile says.
        seed: of a random walk, instead of what the profile says.
    """
    if name is None:
        return Schedule(name="unlimited", changes=())
    if name.endswith(".csv"):
        return Schedule(name=name, changes=tuple(read_trace(Path(name))))
    return load(name).schedule(hosts, epoch=epoch, seed=seed)


def load(name: str) -> Profile:
    """Read a profile by name, or by the path of its file."""
    if name.endswith(".toml"):
        path = Path(name)
        try:
            return Profile(path.stem, path.read_text(), path)
        except OSError as error:
            raise ValueError(f"{name} cannot be read: {error.strerror}.") from error
    if name not in names():
        raise ValueError(f"there is no network {name!r}.{did_you_mean(name, names())} A file ends in .toml or .csv.")
    path = Path(str(resources.files("thinwire.lab") / "profiles" / f"{name}.toml"))
    return Profile(name, path.read_text(), path)


class Profile:
    """A network as a file describes it, for any number of hosts. Whatever is wrong with it is told with its line."""

    def __init__(self, name: str, text: str, path: Path) -> None:
        self.name = name
        self._text = text
        self._path = path
        try:
            self._data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: {error}") from error
        self._check_keys(self._data, "", "")
        self.about = str(self._data.get("about", ""))

    def schedule(self, hosts: int, *, epoch: float | None = None, seed: int | None = None) -> Schedule:
        site = self._sites(hosts)
        changes = [*self._first(), *self._site_changes(site), *self._later(hosts, site, epoch)]
        if "trace" in self._data:
            changes += self._read("trace", lambda: read_trace(self._path.parent / self._data["trace"]["file"]))
        if "walk" in self._data:
            changes += self._read("walk", lambda: Walk.read(self._data["walk"], seed).changes(hosts))
        repeat = self._read("repeat", lambda: _seconds(self._data["repeat"])) if "repeat" in self._data else 0.0
        changes.sort(key=lambda change: change.at)
        if repeat and changes and changes[-1].at > repeat:
            raise ValueError(f"{self._at('repeat')}: a change at {changes[-1].at:g} s comes after the repeat.")
        return Schedule(name=self.name, changes=tuple(changes), repeat=repeat, site=tuple(site))

    # --- the parts

    def _first(self) -> list[Change]:
        words = self._data.get("network", {})
        return [Change(values=self._values(words, "network"), cause=self.name)] if words else []

    def _sites(self, hosts: int) -> list[int]:
        sites = self._data.get("sites", {})
        if "sizes" in sites:
            if not isinstance(sites["sizes"], list) or not all(isinstance(n, int) and n > 0 for n in sites["sizes"]):
                raise ValueError(f"{self._at('sizes')}: sizes must be a list of numbers of hosts, like [2, 6].")
            site = [number for number, size in enumerate(sites["sizes"]) for _ in range(size)]
            if len(site) != hosts:
                raise ValueError(f"{self._at('sizes')}: the sites have {len(site)} hosts, the lab has {hosts}.")
            return site
        number = sites.get("number", 1)
        if not isinstance(number, int) or not 1 <= number:
            raise ValueError(f"{self._at('number')}: number must be 1 or more, got {number!r}.")
        return [host * number // hosts for host in range(hosts)]

    def _site_changes(self, site: list[int]) -> list[Change]:
        sites = self._data.get("sites", {})
        return [
            self._of_place(where, site, self._values(sites[where], f"sites.{where}"), 0.0)
            for where in ("inside", "between")
            if where in sites
        ]

    def _of_place(self, where: str, site: list[int], values: Mapping[str, Value], at: float) -> Change:
        """A change inside all sites, or between them; there a rate is that of the sites' lines."""
        hosts = range(len(site))
        pairs: list[Pair] = [
            (src, dst)
            for src in hosts
            for dst in hosts
            if src != dst and (site[src] == site[dst]) == (where == "inside")
        ]
        kept = {key: value for key, value in values.items() if key not in OF_HOST}
        if "up" in values and where == "between":
            kept["line"] = values["up"]
        return Change(at=at, values=kept, hosts=(), pairs=tuple(pairs), cause=self.name)

    def _later(self, hosts: int, site: list[int], epoch: float | None) -> list[Change]:
        return [
            self._read_change(number, dict(words), hosts, site, epoch)
            for number, words in enumerate(self._data.get("change", []))
        ]

    def _read_change(
        self, number: int, words: dict[str, Any], hosts: int, site: list[int], epoch: float | None
    ) -> Change:
        place = f"change {number}"
        at = self._read(place, lambda: self._time(words, epoch))
        who: dict[str, Any] = {
            key: words.pop(key) for key in ("hosts", "pairs", "where", "partition", "heal") if key in words
        }
        if len(who) > 1:
            raise ValueError(f"{self._at(place)}: choose one of {', '.join(who)}.")
        values = self._values(words, place)
        self._check_it_means_something(who, words, place)
        more = {"at": at, "cause": self.name}
        match who:
            case {"hosts": list(chosen)}:
                return self._read(place, lambda: settings.of_hosts(chosen, hosts, values, **more))
            case {"pairs": list(texts)}:
                pairs = self._read(
                    place, lambda: [pair for text in texts for pair in settings.read_pairs(str(text), hosts)]
                )
                return self._read(place, lambda: settings.of_pairs(pairs, values, **more))
            case {"where": where}:
                return self._of_place(where, site, values, at)
            case {"partition": text}:
                return self._read(place, lambda: settings.partition(str(text), hosts, **more))
            case {"heal": True}:
                return settings.heal(**more)
            case {}:
                if who:
                    raise ValueError(f"{self._at(place)}: {next(iter(who))} must be a list, or true for heal.")
        return Change(values=values, at=at, cause=self.name)

    def _check_it_means_something(self, who: Mapping[str, Any], words: Mapping[str, Any], place: str) -> None:
        """Refuse a change that would silently do less than it says."""
        alone = "partition" in who or "heal" in who
        if alone and words:
            raise ValueError(f"{self._at(place)}: a {next(iter(who))} stands alone: give the rest a change of its own.")
        if not alone and not words:
            raise ValueError(f"{self._at(place)}: this change sets nothing.")
        if "where" in who:
            if who["where"] not in ("inside", "between"):
                raise ValueError(f"{self._at(place, 'where')}: where must be inside or between, got {who['where']!r}.")
            if "sites" not in self._data:
                raise ValueError(f"{self._at(place, 'where')}: where needs [sites].")
            self._check_keys(words, f"sites.{who['where']}", place)

    def _time(self, words: dict[str, Any], epoch: float | None) -> float:
        if ("at" in words) == ("epoch" in words):
            raise ValueError("a change needs `at` or `epoch`.")
        if "at" in words:
            return _seconds(words.pop("at"))
        if "epoch" not in self._data:
            raise ValueError("a change at an epoch needs the profile's `epoch`, the time that one lasts.")
        return float(words.pop("epoch")) * (epoch if epoch is not None else _seconds(self._data["epoch"]))

    # --- errors with a line

    def _check_keys(self, table: Mapping[str, Any], where: str, place: str) -> None:
        known = KEYS.get(where) or KEYS["walk.*"]
        for key, value in table.items():
            inner = f"{where}.{key}" if where else key
            if key not in known:
                of = f" of [{where}]" if where else ""
                raise ValueError(f"{self._at(place, key)}: {key!r} is no key{of}.{did_you_mean(key, known)}")
            if inner == "change":
                self._check_changes(value)
            elif isinstance(value, dict) != (inner in TABLES):
                raise ValueError(f"{self._at(place, key)}: {key} must be {'a' if inner in TABLES else 'no'} table.")
            elif isinstance(value, dict):
                self._check_keys(value, inner, inner)

    def _check_changes(self, changes: object) -> None:
        if not isinstance(changes, list) or not all(isinstance(change, dict) for change in changes):
            raise ValueError(f"{self._at('change')}: change must be [[change]], in two brackets.")
        for number, change in enumerate(changes):
            self._check_keys(change, "change", f"change {number}")

    def _values(self, words: Mapping[str, Any], place: str) -> dict[str, Value]:
        for key in words:
            try:
                read_values({key: words[key]})
            except ValueError as error:
                raise ValueError(f"{self._at(place, key)}: {error}") from error
        return read_values(words)

    def _read(self, place: str, function: Callable[[], T]) -> T:
        try:
            return function()
        except KeyError as error:
            raise ValueError(f"{self._at(place)}: {error.args[0]} is missing.") from error
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self._at(place)}: {error}") from error

    def _at(self, place: str, key: str = "") -> str:
        """File and line of a key in a table. tomllib keeps no lines, so they are looked for in the text."""
        name, _, number = place.partition(" ")
        start = self._line_of_table(name, int(number or 0))
        return f"{self._path}:{self._line_of_key(key, start) if key else start}"

    def _line_of_table(self, name: str, number: int) -> int:
        header = re.compile(rf"\s*\[+\s*{re.escape(name)}\s*\]+|\s*{re.escape(name.rpartition('.')[2])}\s*=")
        found = [line for line, text in enumerate(self._text.splitlines(), 1) if name and header.match(text)]
        return found[min(number, len(found) - 1)] if found else 1

    def _line_of_key(self, key: str, start: int) -> int:
        pattern = re.compile(rf"([^#]*[{{,\s.\[]|^)[\"']?{re.escape(key)}[\"']?\s*(=|\])")
        for line, text in enumerate(self._text.splitlines(), 1):
            if line >= start and pattern.match(text):
                return line
        return start


def _seconds(value: object) -> float:
    return units.seconds(settings.as_text(value))


# --- networks that wander


@dataclass(frozen=True, kw_only=True)
class Range:
    """Where a value may wander, and how far in one step (the standard deviation of its logarithm)."""

    low: float
    high: float
    step: float

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < math.inf or not self.step >= 0:
            raise ValueError("a walk needs 0 < low < high, both finite, and a step of 0 or more.")

    def begin(self, random: random.Random) -> float:
        return math.exp(random.uniform(math.log(self.low), math.log(self.high)))

    def wander(self, value: float, random: random.Random) -> float:
        """One step, reflected at the ends so that the value does not stick to them."""
        low, high = math.log(self.low), math.log(self.high)
        position = math.log(value) + random.gauss(0, self.step)
        while not low <= position <= high:
            position = 2 * low - position if position < low else 2 * high - position
        return math.exp(position)


@dataclass(frozen=True, kw_only=True)
class Walk:
    """A random walk of the network's values, with jumps."""

    ranges: Mapping[str, Range]
    seed: int
    every: float
    length: float
    each_host: bool
    jump: float

    @staticmethod
    def read(words: Mapping[str, Any], seed: int | None) -> Walk:
        ranges = {}
        for key, span in words.items():
            if isinstance(span, dict):
                low, high = (next(iter(read_values({key: span[end]}).values())) for end in ("low", "high"))
                ranges[key] = Range(low=float(low), high=float(high), step=float(span["step"]))
        every, length = _seconds(words["every"]), _seconds(words["length"])
        if not ranges or not 0 < every <= length:
            raise ValueError(f"a walk needs one of {', '.join(WALKING)}, and a length of at least one step (`every`).")
        return Walk(
            ranges=ranges,
            seed=seed if seed is not None else int(words.get("seed", 0)),
            every=every,
            length=length,
            each_host=bool(words.get("each_host", False)),
            jump=float(words.get("jump", 0.0)),
        )

    def changes(self, hosts: int) -> list[Change]:
        """Every host's own walk, or one for all."""
        if not self.each_host:
            return self._one_walk(random.Random(self.seed), None, None)
        walks = []
        for host in range(hosts):
            leaving = tuple((host, other) for other in range(hosts) if other != host)
            walks += self._one_walk(random.Random(f"{self.seed} {host}"), (host,), leaving)
        return walks

    def _one_walk(
        self, random: random.Random, hosts: tuple[int, ...] | None, pairs: tuple[Pair, ...] | None
    ) -> list[Change]:
        values = {key: span.begin(random) for key, span in self.ranges.items()}
        changes = []
        for step in range(round(self.length / self.every)):
            now = _both_ways(values)
            changes.append(Change(at=step * self.every, values=now, hosts=hosts, pairs=pairs, cause="walk"))
            jumps = random.random() < self.jump
            values = {
                key: span.begin(random) if jumps else span.wander(values[key], random)
                for key, span in self.ranges.items()
            }
        return changes


def _both_ways(values: Mapping[str, float]) -> dict[str, Value]:
    rest: dict[str, Value] = {key: value for key, value in values.items() if key != "rate"}
    return rest | ({"up": values["rate"], "down": values["rate"]} if "rate" in values else {})
