"""View: what all ranks hold to be true of the network, the machine and the gradient.

It is made of sums that came to every rank with the same bits, so it has the same bits on every rank, and whatever is
decided from it alone is decided alike everywhere.

A step's time is taken apart as
    step = rest + exposed(price(way, ratio; alpha, beta)) + compress(way, ratio) + handling(way) + extra(way)
with `rest` the user's own work, `price` the schedule played on the wire, `exposed` what of it backward() does not hide,
`compress` and `handling` a model of our own work on entries and messages times a measured factor, and `extra` what an
exchange was measured to take beyond that: waiting for slower ranks, what TCP makes of a wire. It is much the same for
all ways, but single steps differ by as much again, and more so where hosts have little to compute with. So prices
decide between ways, and not what they were seen to take beyond, unless that is a large part of a step: as when TCP's
losses make one slow.

When the network changes, the first steps after it seem to take far too long or too short, until the change is known: so
what was beyond a price is believed some steps later, and only if latency and rate are then still what they were. And
what was learned of another way on another network is forgotten, so that it may be tried again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.control.agreement import ALPHAS, BETAS, START, moved, rounded
from thinwire.control.computing import MESSAGE, compress_seconds
from thinwire.control.gain import CANDIDATES, GainCurve
from thinwire.control.hope import WARY, Hope, Noise
from thinwire.control.prices import Prices, Way, way_of
from thinwire.types import Network, Plan, Told

Floats = NDArray[np.float64]

NEWEST = 0.2  # the weight of the newest of many samples in a running value
SOONER = 0.5  # of one that is far below it: many things make a step longer than it is, and few make it shorter
MOVING = 0.05  # a number that changes by more than this share in a step has not settled
SHORTEST = 1e-4  # seconds of an exchange beside which it is late
WELL_KNOWN = 5  # samples from which on it can be told what is more or less than usual
USUAL_REST = 0.1  # seconds, until one was measured: if it were 0, it would pay to send next to nothing
HELD_BACK = 4  # steps until what was beyond a price is believed
UNCHANGED = 1.25  # the ratio up to which latency and rate are what they were
ANOTHER = 1.6  # the ratio from which on it is another network
DOUBT = 0.4  # of a step: what ways are seen to take beyond their prices may differ by so much for no reason
STRAINS = (0.1, 10.0)  # that count: where the gradient vanishes any error is long beside it
NEWEST_STRAIN = 0.05  # the weight of the newest, as a logarithm, for each step
JUMP = 0.5  # a sample that is further off than this share of the running value counts as just so far off


def ratio_of_turn(turn: int) -> float:
    """One ratio is told of at a time, so that telling costs one number."""
    return CANDIDATES[turn % len(CANDIDATES)]


class Seen(NamedTuple):
    """What came of one step, the same on every rank.

    Attributes:
        step: which.
        turn: how often something was told before, which says what `told.kept` speaks of.
        plan: what ran.
        before: what ran in the step before, which is what the times in `told` speak of; None if there was none.
        told: sums over all ranks.
    """

    step: int
    turn: int
    plan: Plan
    before: Plan | None
    told: Told

    def to_json(self) -> dict[str, Any]:
        before = None if self.before is None else asdict(self.before)
        return self._asdict() | {"plan": asdict(self.plan), "before": before, "told": list(self.told)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Seen:
        before = None if state["before"] is None else Plan(**state["before"])
        if len(state["told"]) != len(Told._fields):
            raise ValueError(
                f"{len(state['told'])} numbers were told, not {len(Told._fields)}: it is of another version."
            )
        told = Told(*(math.nan if number is None else float(number) for number in state["told"]))  # as JSON has it
        return cls(state["step"], state["turn"], Plan(**state["plan"]), before, told)


class Running(NamedTuple):
    """A mean that forgets, and that no single sample can throw off."""

    value: float
    samples: int = 1

    def after(self, sample: float, scale: float = 0.0) -> Running:
        """One sample later. What counts as far off is so by the value, or by a larger scale that it is part of."""
        weight = max(NEWEST, 1 / (self.samples + 1))
        change, room = sample - self.value, JUMP * max(abs(self.value), scale) + 1e-4
        if change < -room:
            weight = max(weight, SOONER)
        elif self.samples >= 3:
            change = min(room, change)
        return Running(rounded(self.value + weight * change), self.samples + 1)


def _after(running: Running | None, sample: float, scale: float = 0.0) -> Running | None:
    if not math.isfinite(sample):
        return running
    return Running(rounded(sample)) if running is None else running.after(sample, scale)


def _has_moved(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and abs(after - before) > MOVING * before


@functools.lru_cache(maxsize=256)  # every step asks for that of the plan in force
def _compress_seconds(way: Way, ratio: float, numel: int, world_size: int) -> float:
    return float(compress_seconds(way, np.array([ratio]), numel, world_size)[0])


def _coarse(value: float) -> float:
    """Within one per cent, so that numbers which hardly move need not be priced anew at every step."""
    return rounded(math.exp(round(math.log(value) * 50) / 50))


class Beyond(NamedTuple):
    """What an exchange took beyond its price and its computing, and the network as it was held to be then."""

    way: str
    seconds: float
    alpha: float
    beta: float

    def is_of(self, network: Network) -> bool:
        return _are_near(Network(alpha=self.alpha, beta=self.beta), network, UNCHANGED)


def is_off(now: float, then: float, factor: float) -> bool:
    """Whether a number is more than so many times what it was, or less than such a share of it."""
    return now > factor * then or now * factor < then


def _are_near(a: Network, b: Network, factor: float) -> bool:
    return not is_off(a.alpha, b.alpha, factor) and not is_off(a.beta, b.beta, factor)


class View(NamedTuple):
    """See the module. All times in seconds; None where nothing is known yet.

    Attributes:
        alpha, beta: the network as it was seen, or as it was hoped to be when that came true.
        seen_beta: as it was last seen.
        step: the last one that was heard of.
        settling: for how many of these in a row latency or rate have been on the move.
        took: the last step that was told of.
        rest: a step without its exchange.
        overlap: in which backward() computes while parts of the gradient are there already.
        last_share: the share of its bytes that is there only after that.
        extra: by way, what an exchange takes beyond its price and its computing.
        learned_on: the network that this is of.
        held_back: what may be learned of it from the last steps, the oldest first.
        compress: by exchange, measured over modelled seconds of computing.
        hope: that the rate has risen since it was last seen.
        noise: by how much exchanges take more or less than is usual.
        gains: the energy that the largest entries keep, by ratio, and by exchange what of it is really sent.
        strain: the energy that is sent over that of the gradient alone. With the error e and the gradient g,
            e^2 / g^2 = strain (1 / gain - 1). It is 1 where gradients have nothing to do with each other, and more
            where they point the same way for long, or shrink.
    """

    alpha: float | None = None
    beta: float | None = None
    seen_beta: float | None = None
    step: int = -1
    settling: int = 0
    took: float | None = None
    rest: Running | None = None
    overlap: Running | None = None
    last_share: float = 1.0
    extra: Mapping[str, Running] = MappingProxyType({})
    learned_on: Network | None = None
    held_back: tuple[Beyond, ...] = ()
    compress: Mapping[str, Running] = MappingProxyType({})
    hope: Hope = Hope()
    noise: Noise = Noise()
    gains: GainCurve = GainCurve()
    strain: float = 1.0

    @property
    def network(self) -> Network | None:
        if self.alpha is None or self.beta is None:
            return None
        return Network(alpha=self.alpha, beta=self.beta)

    @property
    def assumed(self) -> Network | None:
        """The network to decide for: as it was measured, or better, where nobody has seen the rate for long."""
        network = self.network
        if network is None or self.hope.factor == 1:
            return network
        return replace(network, beta=max(network.beta / self.hope.factor, BETAS[0]))

    @property
    def feared(self) -> Network | None:
        """The network to fear: with the rate that was last seen, should that be less than what is assumed."""
        network = self.assumed
        if network is None or self.seen_beta is None or self.seen_beta <= network.beta:
            return network
        return replace(network, beta=self.seen_beta)

    @property
    def rest_seconds(self) -> float:
        return self.rest.value if self.rest else USUAL_REST

    def after(self, seen: Seen, prices: Prices, may_hope: bool = True) -> View:
        """The view one step later. Where nobody would send more for it, there is nothing to hope for."""
        told = seen.told
        if told.not_finite > 0 or not all(map(math.isfinite, told)):
            return self
        N = prices.world_size
        alpha = moved(self.alpha, told.alpha_off, told.alpha_known, N, START.alpha, ALPHAS)
        beta = moved(self.beta, told.beta_off, told.beta_known, N, START.beta, BETAS)
        seen_beta = beta if told.beta_known > 0 else self.seen_beta
        view = self._replace(alpha=alpha, beta=beta, seen_beta=seen_beta, step=seen.step)
        steps = max(1, seen.step - self.step)  # since the last that was heard of
        if told.energy > 0:
            view = view._with_gain(seen, steps)
        if seen.before is not None and told.timed == N:
            if told.step_seconds >= told.exchange_seconds > 0 and told.overlap_seconds >= 0:
                view = view._with_times(seen.before, told, steps, prices)
        moving = _has_moved(self.alpha, alpha) or _has_moved(self.beta, beta)
        return view._replace(settling=self.settling + 1 if moving else 0, hope=view.hope if may_hope else Hope())

    def _with_gain(self, seen: Seen, steps: int) -> View:
        told, gains = seen.told, self.gains
        gain = min(1.0, told.energy_sent / told.energy)
        if told.kept > 0:
            gains = gains.with_kept(ratio_of_turn(seen.turn), min(1.0, told.kept / told.energy))
        if seen.plan.exchange != "dense":
            gains = gains.with_measured(seen.plan.exchange, seen.plan.ratio, gain, steps)
        strain = 1.0 if seen.plan.exchange == "dense" else self.strain  # which leaves no error
        if told.gradient > 0 and seen.plan.exchange != "dense":
            strain = min(max(told.energy_sent / told.gradient, STRAINS[0]), STRAINS[1])
        strain = rounded(self.strain * math.pow(strain / self.strain, 1 - (1 - NEWEST_STRAIN) ** steps))
        return self._replace(gains=gains, strain=strain)

    def _with_times(self, plan: Plan, told: Told, steps: int, prices: Prices) -> View:
        N, rate_is_new = prices.world_size, told.beta_known > 0
        step, exchange, compress = told.step_seconds / N, told.exchange_seconds / N, told.compress_seconds / N
        way, factors = way_of(plan), dict(self.compress)
        modelled = _compress_seconds(way, plan.ratio, prices.numel, prices.world_size)
        if modelled > 0 and compress > 0:
            factors[way.exchange] = _after(factors.get(way.exchange), compress / modelled)  # type: ignore[assignment]
        view = self._replace(
            took=rounded(step),
            rest=_after(self.rest, step - exchange),
            overlap=_after(self.overlap, told.overlap_seconds / N),
            last_share=min(1.0, max(0.0, rounded(told.last_share / N))),
            compress=factors,
        )
        view = view._on_this_network(way, rate_is_new)
        return view._with_beyond(plan, exchange, compress, rate_is_new, steps, prices)

    def _on_this_network(self, way: Way, rate_is_new: bool) -> View:
        """Without what was learned of other ways on another one."""
        learned_on = self.learned_on or self.network
        if learned_on is None or self.network is None or _are_near(learned_on, self.network, ANOTHER):
            return self if learned_on is self.learned_on else self._replace(learned_on=learned_on)
        extras = {name: running for name, running in self.extra.items() if name == str(way)}
        if rate_is_new:  # and not guessed from what is to be learned anew
            extras = {name: Running(running.value) for name, running in extras.items()}
        is_worse = self.network.alpha > learned_on.alpha or self.network.beta > learned_on.beta
        hope = Hope(patience=WARY) if is_worse else Hope()  # as what gets worse seldom gets better at once
        return self._replace(learned_on=self.network, hope=hope, extra=extras)

    def _with_beyond(
        self, plan: Plan, exchange: float, compress: float, rate_is_new: bool, steps: int, prices: Prices
    ) -> View:
        way, network = way_of(plan), self.assumed
        if network is None:
            return self
        network = Network(alpha=_coarse(network.alpha), beta=_coarse(network.beta))
        price = prices.seconds(way, plan.ratio, network)
        waited = float(self.exposed(way, np.array(price), network, prices))
        beyond = exchange - compress - waited - self.handling(way, prices)
        hope, noise, usual = self.hope, self.noise, self._usual_extra(way, WELL_KNOWN)
        if rate_is_new:
            hope = hope.after_a_look()
        elif way.collective == "torch" or usual is None:  # which shows nothing, or nothing that one could compare with
            hope = hope.after_silence(steps)
        else:
            moving = price - prices.seconds(way, plan.ratio, replace(network, beta=BETAS[0]))
            late = beyond - usual.value
            expected = max(exchange - late, SHORTEST)
            hope = hope.after_an_exchange(late, moving, noise.deviation * expected, steps)
            if not self.hope.is_open:  # or it may be the rate that makes it late
                noise = noise.after(late / expected)
        if hope.has_come_true:
            return self._with_its_hope_come_true(way)
        extras, held_back = dict(self.extra), self.held_back
        if not hope.is_open:  # or it may be the rate that is not what it is held to be
            held_back = (*held_back, Beyond(str(way), round(beyond, 12), network.alpha, network.beta))
        if len(held_back) > HELD_BACK:
            oldest, *others = held_back
            held_back = tuple(others)
            if oldest.is_of(network):
                known = extras.get(oldest.way)
                extras[oldest.way] = _after(known, oldest.seconds, exchange)  # type: ignore[assignment]
        return self._replace(hope=hope, noise=noise, extra=extras, held_back=held_back)

    def _with_its_hope_come_true(self, way: Way) -> View:
        """The rate is what was assumed, on which everything is to be learned anew. Nobody has seen it, so beware."""
        assert self.assumed is not None
        extras = {name: Running(running.value) for name, running in self.extra.items() if name == str(way)}
        hope = Hope(patience=WARY)
        return self._replace(beta=self.assumed.beta, hope=hope, learned_on=self.assumed, extra=extras, held_back=())

    def hoping_for_nothing(self) -> View:
        """Once it is known that more would not be sent for it."""
        return self._replace(hope=self.hope.for_nothing())

    # --- what follows from it

    @property
    def strain_level(self) -> float:
        """The strain, rounded down to a power of 2, so that what is guarded by it is not raised bit by bit."""
        return math.ldexp(1.0, math.frexp(self.strain)[1] - 1)

    def exposed(self, way: Way, price: Floats, network: Network, prices: Prices) -> Floats:
        """What a step has to wait for of an exchange that takes so long on the wire: mostly all of it.

        But a dense one by torch's own all_reduce begins with the first part of the gradient that backward() has made,
        and goes on while that computes; only what does not fit into that time is waited for, or the last part, whose
        latencies are as many as those of the whole.
        """
        if way.exchange != "dense" or way.collective != "torch" or self.overlap is None or self.overlap.value <= 0:
            return price
        latencies = prices.seconds(way, 1.0, replace(network, beta=BETAS[0]))
        last_part = latencies + self.last_share * (price - latencies)
        waited: Floats = np.maximum(price - self.overlap.value, last_part)
        return waited

    def compress_factor(self, exchange: str) -> float:
        """How much slower than modelled this machine computes, by this exchange or else by those that have run."""
        if exchange in self.compress:
            return self.compress[exchange].value
        return self._slowness or 1.0

    @property
    def _slowness(self) -> float:
        """The same for whatever it computes; 0 where nothing was seen to be computed."""
        known = [running.value for running in self.compress.values()]
        return sum(known) / len(known) if known else 0.0

    def handling(self, way: Way, prices: Prices) -> float:
        """What a rank's processor needs for its messages; where nothing is computed at all, nothing."""
        return prices.messages(way) * MESSAGE * self._slowness

    def extra_of(self, way: Way, runs: Way, expected: Floats) -> Floats:
        """What this way takes beyond price and computing, where a step is expected to take so long without it.

        Of the way that runs it is known best. Another is held to take as much, unless that is out of proportion; and if
        it is known to take more or less than that, what is beyond doubt counts.
        """
        if str(way) == str(runs) and str(runs) in self.extra:
            return np.full_like(expected, self.extra[str(runs)].value)
        doubt, known_best = DOUBT * expected, self._usual_extra(runs)
        usual = np.minimum(doubt, 0.0 if known_best is None else known_best.value)
        if str(way) not in self.extra:
            return usual
        known: Floats = np.full_like(expected, self.extra[str(way)].value)
        return np.clip(usual, known - doubt, known + doubt)

    def _usual_extra(self, way: Way, samples: int = 1) -> Running | None:
        """What this way takes, or else the one that takes the least, of those that are known by so many samples."""
        known = {name: running for name, running in self.extra.items() if running.samples >= samples}
        if str(way) in known and way.collective != "torch":
            return known[str(way)]
        # What torch takes less than was expected it hides behind backward(), as no other can.
        lent = [Running(max(r.value, 0.0), r.samples) if name.endswith("torch") else r for name, r in known.items()]
        return min(lent, key=lambda running: running.value, default=None)

    def to_json(self) -> dict[str, Any]:
        def plain(running: Running | None) -> list[float] | None:
            return None if running is None else [running.value, running.samples]

        return {
            "alpha": self.alpha,
            "beta": self.beta,
            "seen_beta": self.seen_beta,
            "step": self.step,
            "settling": self.settling,
            "took": self.took,
            "rest": plain(self.rest),
            "overlap": plain(self.overlap),
            "last_share": self.last_share,
            "extra": {key: plain(value) for key, value in self.extra.items()},
            "learned_on": None if self.learned_on is None else [self.learned_on.alpha, self.learned_on.beta],
            "held_back": [list(beyond) for beyond in self.held_back],
            "compress": {key: plain(value) for key, value in self.compress.items()},
            "hope": self.hope._asdict(),
            "noise": list(self.noise),
            "gains": self.gains.to_json(),
            "strain": self.strain,
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> View:
        def running(pair: list[float] | None) -> Running | None:
            return None if pair is None else Running(float(pair[0]), int(pair[1]))

        def network(pair: list[float] | None) -> Network | None:
            return None if pair is None else Network(alpha=float(pair[0]), beta=float(pair[1]))

        def runnings(pairs: Mapping[str, list[float]]) -> dict[str, Running]:
            return {key: Running(float(value), int(samples)) for key, (value, samples) in pairs.items()}

        return cls(
            alpha=None if state["alpha"] is None else float(state["alpha"]),
            beta=None if state["beta"] is None else float(state["beta"]),
            seen_beta=None if state["seen_beta"] is None else float(state["seen_beta"]),
            step=int(state["step"]),
            settling=int(state["settling"]),
            took=None if state["took"] is None else float(state["took"]),
            rest=running(state["rest"]),
            overlap=running(state["overlap"]),
            last_share=float(state["last_share"]),
            extra=runnings(state["extra"]),
            learned_on=network(state["learned_on"]),
            held_back=tuple(Beyond(str(way), *map(float, numbers)) for way, *numbers in state["held_back"]),
            compress=runnings(state["compress"]),
            hope=Hope.from_json(state["hope"]),
            noise=Noise(*map(float, state["noise"])),
            gains=GainCurve.from_json(state["gains"]),
            strain=float(state["strain"]),
        )
