"""Adaptive: chooses exchange, collective and ratio, and changes its mind when the network or the gradient changes.

Pure: `decide` sees numbers that all ranks hold with the same bits, and gives the same decision on all of them. A run
whose views were recorded can be decided again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from thinwire.control import pareto
from thinwire.control.agreement import rounded
from thinwire.control.computing import compress_seconds
from thinwire.control.decision import Candidate, Decision, Standing
from thinwire.control.gain import CANDIDATES
from thinwire.control.learning import DELAYS, delay, safe_gain
from thinwire.control.prices import Prices, Way, way_of, ways
from thinwire.control.ratios import knots, two_digit_ratios
from thinwire.control.view import Floats, View, is_off
from thinwire.control.wording import course_of_latency, course_of_step, rate_of
from thinwire.exchange import complete
from thinwire.types import Network, Plan

OBJECTIVES = ("goodput", "seconds", "knee")
EXPLORING = ("histogram", "restore")
SPARSE = ("topk-allgather", "star-topk")
ROOM = 1.25  # times the least gain that is allowed is the least that is chosen: it is never quite what was expected
PAUSE_SECONDS = 2.0  # between two decisions, unless the network has changed; longer where to decide takes long itself
DECIDING = 1.5e-5  # seconds for each pair of ranks that it takes to price all ways anew: 1 ms for eight ranks
USUALLY, AT_MOST = 0.01, 0.1  # the share of the time that pricing may take, and where the network keeps changing
FAR = 10.0  # times what latency or rate were when it was decided: then it is not waited for them to settle
URGENT = 0.4  # by so much, or by what makes a change if that is more
RISK = 2.0  # times what a step takes now is what it may take should a hope, or what came of one, be in vain
TRIAL = 3  # steps that a plan is tried for in hope, so that several can be looked at
WORTH_TRYING = 2  # times the margin is what a plan must be better by, if it is so in hope alone


ALL = itertools.repeat(True)
_Weighed: TypeAlias = Callable[[Candidate], float]  # what counts of a candidate: the less the better
_Learning: TypeAlias = Mapping[str, tuple[Floats, Floats]]  # by exchange, gains and steps at every ratio


class _Judged(NamedTuple):
    """One way at several ratios."""

    way: Way
    ratios: Floats
    seconds: Floats
    gains: Floats
    steps: Floats

    @property
    def costs(self) -> Floats:
        return self.seconds * self.steps

    def at(self, i: int) -> Candidate:
        plan = Plan(**self.way._asdict(), ratio=float(self.ratios[i]))
        return Candidate(plan, float(self.seconds[i]), float(self.gains[i]), float(self.steps[i]))


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """How to choose.

    Args:
        objective: "goodput" takes the plan with the least expected time to accuracy: the seconds of a step times how
            many more steps than dense training it needs (control/learning.py). "seconds" takes the fastest step,
            whatever it learns, so give it one ratio. "knee" is the rule of Tyagi & Swany: the knee of the front of time
            against 1/gain (control/pareto.py).
        horizon: for how many steps of dense training to plan. What a plan needs more is a delay, so the further one
            plans the more a fast step is worth. On networks that change, where delays come anew with every smaller
            ratio, 100 to 400 were as fast as each other, and 100 ended nearest to dense (docs/how-it-decides.md).
        ratios: the least and the largest ratio to consider. Dense is always considered.
        exchanges: the compressing exchanges to consider.
        values: how gathered values are sent. "log4", four bits each up to a ratio of 0.1 and sixteen beyond, is a third
            of the bytes of "float32" for the same entries. What rounding loses is kept in the error, and what that
            costs in steps is in docs/how-it-decides.md. "float32" sends them as they are.
        warmup: over so many steps the least ratio falls from 1 to the largest of `ratios`, in a line.
        change: decide again when latency or rate has changed by this share since the last decision.
        gain_change: the same for the gain.
        time_change: the same for the predicted time of a step.
        margin: and change the plan only if the new one is better by this share.
        advantage: with "goodput", compress only where that is better than dense by this share: where it hardly pays it
            is not worth the delay.
        patience: leave a plan alone for at least so many steps, unless a hope that it was tried in has ended.
        least_gain: if the plan in force comes to send a smaller share of the energy than this, raise the ratio, if need
            be to dense; and choose only what sends a quarter more than that. None for what was measured to be safe,
            which rises where errors grow longer beside the gradient than they usually do (control/learning.py); and
            for nothing where only seconds count.
        explore: how the gain at other ratios is known. "histogram": from one pass over the gradient's magnitudes and
            from what was sent, which costs nothing and disturbs nothing. "restore" is Tyagi & Swany's: each candidate
            is tried out for some steps, which are then undone; it needs a `thinwire.Explorer` in the loop.
        solver: how "knee" finds the front: "sweep", or "nsga2" with thinwire[moo].
    """

    objective: str = "goodput"
    horizon: int = 100
    ratios: tuple[float, float] = (0.001, 0.1)
    exchanges: tuple[str, ...] = SPARSE
    values: str = "log4"
    warmup: int = 0
    change: float = 0.1
    gain_change: float = 0.1
    time_change: float = 0.2
    margin: float = 0.03
    advantage: float = 0.1
    patience: int = 5
    least_gain: float | None = None
    explore: str = "histogram"
    solver: str = "sweep"

    def __post_init__(self) -> None:
        self._check_ratios()
        if self.objective not in OBJECTIVES:
            raise ValueError(f"unknown objective {self.objective!r}. Known are: {', '.join(OBJECTIVES)}.")
        if self.explore not in EXPLORING:
            raise ValueError(f"unknown explore {self.explore!r}. Known are: {', '.join(EXPLORING)}.")
        pareto.check_solver(self.solver)
        if self.solver != "sweep" and self.objective != "knee":
            raise ValueError(f'solver={self.solver!r} is for objective="knee" only, not for {self.objective!r}.')
        if isinstance(self.exchanges, str) or not self.exchanges or not set(self.exchanges) <= DELAYS.keys():
            raise ValueError(f"exchanges must be some of {', '.join(DELAYS)}, got {self.exchanges!r}.")
        complete("topk-allgather", values=self.values)  # or it is no type that values can have
        # A list or a set will do as well; in one order, for ranks to see that they have the same.
        object.__setattr__(self, "exchanges", tuple(name for name in DELAYS if name in self.exchanges))
        if self.least_gain is not None and not (_is_number(self.least_gain) and 0 <= self.least_gain <= 1):
            raise ValueError(f"least_gain is a share from 0 to 1, got {self.least_gain!r}.")
        for name, least in (("warmup", 0), ("patience", 1), ("horizon", 1)):
            number = getattr(self, name)
            if not (_is_number(number) and isinstance(number, int) and number >= least):
                raise ValueError(f"{name} is a whole number of steps, at least {least}, got {number!r}.")
        for name in ("change", "gain_change", "time_change", "margin", "advantage"):
            share = getattr(self, name)
            if not (_is_number(share) and 0 < share < 1):
                raise ValueError(f"{name} is a share between 0 and 1, got {share!r}.")

    def _check_ratios(self) -> None:
        try:
            low, high = self.ratios
        except (TypeError, ValueError):
            low = high = math.nan
        if not (_is_number(low) and _is_number(high) and 0 < low <= high <= 1):
            raise ValueError(f"ratios must be two numbers with 0 < low <= high <= 1, got {self.ratios!r}.")
        object.__setattr__(self, "ratios", (low, high))

    def ways(self, world_size: int, has_group: bool) -> tuple[Way, ...]:
        """What it may choose from."""
        return ways(world_size, has_group, ("dense", *self.exchanges), self.values)

    def decide(self, view: View, standing: Standing, step: int, prices: Prices) -> Decision | None:
        """The plan from `step` on if there is a reason to think about it, else None."""
        trigger = self._trigger(view, standing, step, prices)
        if trigger is None or view.network is None or view.assumed is None:
            return None
        ratios = self._ratios(step)
        learning = {exchange: self._learning(exchange, ratios, view) for exchange in self.exchanges}
        judged = list(self._all_judged(ratios, learning, standing.plan, view, view.assumed, prices))
        affordable = self._affordable(ratios, learning, standing.plan, view, prices)
        found = list(self._candidates(judged, affordable, view)) or list(self._candidates(judged, ALL, view))
        candidates = sorted(found, key=_by_cost)
        if self.objective == "knee":
            best, weighed = self._knee(view, judged, candidates)
        else:
            best, weighed = self._best(candidates), self._weighed
        now = self.judge(standing.plan, view, view.assumed, prices)
        chosen = now if self._is_good_enough(now, best, weighed, standing, view, prices) else best
        # What runs may be at a ratio that is no longer its best; or it was judged twice, once between two prices.
        candidates = sorted([*(each for each in candidates if each.plan != chosen.plan), chosen], key=_by_cost)
        return Decision(
            step=step,
            trigger=trigger,
            plan=chosen.plan,
            before=standing.plan,
            seconds=chosen.seconds,
            alpha=view.network.alpha,
            beta=view.network.beta,
            hope=view.hope.factor,
            rest=view.rest_seconds,
            compress=float(self._computing(way_of(chosen.plan), np.array([chosen.plan.ratio]), view, prices)[0]),
            gain=chosen.gain,
            gains={f"{ratio:g}": gain for ratio, gain in view.gains.points()},
            candidates=tuple(candidates),
        )

    def standing_after(self, decision: Decision, view: View) -> Standing:
        return Standing(
            plan=decision.plan,
            since=decision.step,
            alpha=decision.alpha,
            beta=None if view.assumed is None else view.assumed.beta,
            hope=decision.hope,
            gain=rounded(decision.gain),
            seconds=rounded(decision.seconds),
            guessed=view.rest is None,
        )

    def wants_exploring(self, view: View) -> bool:
        """Whether the candidate ratios should be tried out: first, and when the gain has changed since."""
        if self.explore != "restore" or view.assumed is None:
            return False
        return abs(view.gains.since_explored() - 1) >= self.gain_change

    def to_explore(self, plan: Plan) -> tuple[str, tuple[float, ...]]:
        """The exchange to try out, the one in force if it compresses, and the ratios: the candidates within bounds."""
        low, high = self.ratios
        within = tuple(ratio for ratio in CANDIDATES if low <= ratio <= high)
        ends = tuple(ratio for ratio in (high, low) if ratio < 1)  # at which all is sent, as everybody knows
        return plan.exchange if plan.exchange in self.exchanges else self.exchanges[0], within or ends

    # --- when

    def _trigger(self, view: View, standing: Standing, step: int, prices: Prices) -> str | None:
        if view.network is None or view.assumed is None:
            return None
        if standing.alpha is None or standing.beta is None or standing.seconds is None:
            return "the network was measured"
        warming_up = standing.since < self.warmup
        if warming_up and step >= min(standing.since + max(1, self.warmup // 10), self.warmup):
            return "warm-up"  # and once more when it is over, whenever that is heard of
        if not warming_up and not self._allows(standing.plan, prices):
            return "the plan in force is out of bounds"
        assert standing.known_beta is not None
        is_far = is_off(view.network.alpha, standing.alpha, FAR) or is_off(view.network.beta, standing.known_beta, FAR)
        is_settling = 0 < view.settling < self.patience and not is_far
        age, has_hope_ended = step - standing.since, view.hope.factor < standing.hope
        if age < (min(TRIAL, self.patience) if has_hope_ended else self.patience) or is_settling:
            return None
        gain = view.gains.gain(standing.plan.exchange, standing.plan.ratio)
        least = self._least_gain(standing.plan.exchange, view)
        deciding, is_urgent = DECIDING * prices.world_size**2, gain < least or has_hope_ended
        if not is_urgent and age * max(standing.seconds, view.took or 0.0) < deciding / AT_MOST:
            return None
        pause = max(PAUSE_SECONDS, deciding / USUALLY)
        is_rested = standing.guessed or age * standing.seconds >= pause
        change = self.change if is_rested else max(self.change, URGENT)
        if reason := self._network_trigger(view.assumed, view.hope.factor, standing, change, prices.world_size):
            return reason
        if gain < least:
            return f"gain would fall to {gain:.2g}, under the least allowed, {least:.2g}"
        if warming_up:
            return None
        if standing.gain is None:
            return "ratios were tried out"
        if not is_rested and age * (view.took or 0.0) < pause:  # which is known without judging anything
            return None
        now = self.judge(standing.plan, view, view.assumed, prices)
        if not is_rested and age * now.seconds < pause:
            return None
        if standing.guessed and view.rest is not None:
            return course_of_step(None, now.seconds)
        return self._slow_trigger(now, standing)

    def _network_trigger(self, network: Network, hope: int, standing: Standing, change: float, world_size: int) -> str:
        """What has changed of latency and rate by such a share; nothing if nothing has."""
        assert standing.alpha is not None and standing.beta is not None
        has_rate_changed = hope < standing.hope or _changed(standing.beta, network.beta, change)
        is_by_hope = has_rate_changed and hope != standing.hope  # which is then what makes the difference
        reasons = []
        is_felt = _changed(standing.alpha, network.alpha, change) and standing.feels(network.alpha, world_size)
        if is_felt and not is_by_hope:
            reasons.append(course_of_latency(standing.alpha, network.alpha))
        if has_rate_changed:
            reasons.append(self._course_of_rate(standing.beta, standing.hope, network.beta, hope))
        return " and ".join(reasons)

    def _course_of_rate(self, before: float, hope_before: int, now: float, hope: int) -> str:
        if hope > 1:
            return f"nobody has seen the rate for a while, and it may be {rate_of(now)} by now"
        if hope_before > 1 and not _changed(before, now, self.change):
            return f"the rate is what was hoped for, {rate_of(now)}"
        if hope_before > 1 and not _changed(before * hope_before, now, self.change):
            return f"the rate is taken as it was last seen, {rate_of(now)}"
        return f"rate went from {rate_of(before * hope_before)} to {rate_of(now)}"

    def _slow_trigger(self, now: Candidate, standing: Standing) -> str | None:
        """The plan in force as it is judged now, against what was expected of it."""
        assert standing.gain is not None and standing.seconds is not None
        if _changed(standing.gain, now.gain, self.gain_change):
            return f"gain went from {standing.gain:.2g} to {now.gain:.2g}"
        if _changed(standing.seconds, now.seconds, self.time_change):
            return course_of_step(standing.seconds, now.seconds)
        return None

    # --- what

    def judge(self, plan: Plan, view: View, network: Network, prices: Prices) -> Candidate:
        """One plan by the present view."""
        way, ratios = way_of(plan), np.array([plan.ratio])
        price = np.array([prices.seconds(way, plan.ratio, network)])
        price = view.exposed(way, price, network, prices)
        learning = self._learning(way.exchange, ratios, view)
        return self._judged(way, ratios, price, learning, way, view, prices).at(0)

    def _candidates(self, judged: Iterable[_Judged], affordable: Iterable[Any], view: View) -> Iterator[Candidate]:
        """Every way at the ratio at which it is best, of those that send enough, as dense does, and can be afforded."""
        for each, is_affordable in zip(judged, affordable, strict=False):
            fits = (each.gains >= self._enough(each.way.exchange, view)) & is_affordable
            if fits.any():
                yield each.at(int(np.where(fits, each.costs, np.inf).argmin()))

    def _affordable(self, ratios: Floats, learning: _Learning, plan: Plan, view: View, prices: Prices) -> Iterable[Any]:
        """Of each way, the ratios that may be tried: all, but only what would not hurt much if nobody saw the rate."""
        if view.feared is None or view.feared == view.assumed or self.objective == "knee":
            return ALL
        most = RISK * self.judge(plan, view, view.feared, prices).seconds
        return [each.seconds <= most for each in self._all_judged(ratios, learning, plan, view, view.feared, prices)]

    def _all_judged(
        self, ratios: Floats, learning: _Learning, plan: Plan, view: View, network: Network, prices: Prices
    ) -> Iterator[_Judged]:
        """The ways that may be chosen while `plan` is in force, at all ratios; dense at its own.

        Prices are nearly straight lines between neighbours of a few ratios, so only those are worked out.
        """
        few = self._priced_ratios(ratios)
        runs = way_of(plan)
        for way, row in zip(prices.ways, prices.table(network, few), strict=True):
            if way.exchange == "dense":
                whole = np.array([1.0])
                price = view.exposed(way, row[-1:], network, prices)
                yield self._judged(way, whole, price, (whole, whole), runs, view, prices)
            elif way.exchange in learning:
                price = np.interp(ratios, few, row)
                yield self._judged(way, ratios, price, learning[way.exchange], runs, view, prices)

    def _priced_ratios(self, ratios: Floats) -> tuple[float, ...]:
        """Those between which all others lie; throughout warming up they are the same, and are laid out only once."""
        low, high = self.ratios
        return knots(low, high if ratios[0] == low else 1.0)

    def _judged(
        self,
        way: Way,
        ratios: Floats,
        price: Floats,
        learning: tuple[Floats, Floats],
        runs: Way,
        view: View,
        prices: Prices,
    ) -> _Judged:
        expected = price + self._computing(way, ratios, view, prices) + view.handling(way, prices)
        extra = view.extra_of(way, runs, view.rest_seconds + expected)
        seconds = view.rest_seconds + np.maximum(expected + extra, 0.0)
        return _Judged(way, ratios, seconds, *learning)

    def _computing(self, way: Way, ratios: Floats, view: View, prices: Prices) -> Floats:
        return compress_seconds(way, ratios, prices.numel, prices.world_size) * view.compress_factor(way.exchange)

    def _learning(self, exchange: str, ratios: Floats, view: View) -> tuple[Floats, Floats]:
        """The gain at each ratio, and how many times more steps it takes."""
        gains = view.gains.gains(exchange, tuple(ratios.tolist()))
        delays = np.array([0.0 if self.objective == "seconds" else delay(exchange, gain) for gain in gains])
        return np.array(gains), 1 + delays / self.horizon

    def _least_gain(self, exchange: str, view: View) -> float:
        if self.least_gain is not None:
            return self.least_gain
        return 0.0 if self.objective == "seconds" else safe_gain(exchange, view.strain_level)

    def _enough(self, exchange: str, view: View) -> float:
        """The least gain to choose."""
        return min(1.0, ROOM * self._least_gain(exchange, view))

    def _allows(self, plan: Plan, prices: Prices) -> bool:
        """Not so of one that warming up has left behind, or a state of a run with other settings."""
        low, high = self.ratios
        known = {way.values for way in prices.ways if way.exchange == plan.exchange}  # none, of a run that was fixed
        fits = plan.exchange in self.exchanges and low <= plan.ratio <= high and (not known or plan.values in known)
        return plan.exchange == "dense" or fits

    def _ratios(self, step: int) -> Floats:
        """All ratios of two digits within bounds, and while warming up none below the line."""
        low, high = self.ratios
        if step < self.warmup:
            line = 1 - (1 - high) * step / self.warmup
            low = max(low, math.ceil(100 * line - 1e-9) / 100)  # which is of two digits, as all are
            high = max(low, high)
        return two_digit_ratios(low, high)

    def _is_good_enough(
        self, now: Candidate, best: Candidate, weighed: _Weighed, standing: Standing, view: View, prices: Prices
    ) -> bool:
        """Whether what runs already is nearly as good as the best."""
        enough = now.gain >= self._least_gain(now.plan.exchange, view)
        if standing.alpha is None or standing.guessed or not enough or not self._allows(now.plan, prices):
            return False
        margin = self.margin * (WORTH_TRYING if view.hope.is_open else 1)
        if self.objective == "knee":  # where objectives are flat, it cannot tell how near two plans are
            is_near = now.plan.exchange == "dense" or abs(now.plan.ratio / best.plan.ratio - 1) <= margin
            is_as_fast = now.seconds * (1 - margin) <= best.seconds
            if is_near and is_as_fast and now.gain >= best.gain * (1 - margin):
                return True
        return weighed(now) * (1 - margin) <= weighed(best)

    def _best(self, candidates: list[Candidate]) -> Candidate:
        """The one that costs least; but torch's own all_reduce is not left for another that costs next to nothing less.

        That is what would run without us, and prices are not that exact.
        """
        best = min(candidates, key=self._weighed)
        if best.plan.exchange != "dense":
            return best
        own = [each for each in candidates if each.plan.exchange == "dense" and each.plan.collective == "torch"]
        return next((each for each in own if each.cost * (1 - self.margin) <= best.cost), best)

    def _weighed(self, candidate: Candidate) -> float:
        """The cost that counts: dense has something in its favour, since it delays nothing."""
        favoured = candidate.plan.exchange == "dense" and self.objective == "goodput"
        return candidate.cost * (1 - self.advantage if favoured else 1.0)

    def _knee(self, view: View, judged: list[_Judged], candidates: list[Candidate]) -> tuple[Candidate, _Weighed]:
        """The paper's choice of the ratio; then the fastest way at it, or dense if that is faster still.

        Where a way sends too little at that ratio, it is taken at the next one at which it does not.

        Returns:
            that, and the knee's own measure of any candidate.
        """
        dense = min((c for c in candidates if c.plan.exchange == "dense"), key=lambda c: c.seconds)
        sparse = [j for j in judged if j.way.exchange != "dense"]
        ratios = sparse[0].ratios
        seconds = np.array([j.seconds for j in sparse])
        fastest = sparse[int(seconds.sum(axis=1).argmin())].way.exchange
        knee = pareto.knee(
            lambda r: float(np.interp(r, ratios, seconds.min(axis=0))),
            lambda r: view.gains.gain(fastest, r),
            float(ratios[0]),
            float(ratios[-1]),
            solver=self.solver,
        )
        nearest = int(np.abs(ratios - knee.ratio).argmin())
        enough = [j.gains[nearest:] >= self._enough(j.way.exchange, view) for j in sparse]
        found = [j.at(nearest + int(e.argmax())) for j, e in zip(sparse, enough, strict=True) if e.any()]
        return min([dense, *found], key=lambda c: c.seconds), lambda c: knee.cost(c.seconds, c.gain)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _by_cost(candidate: Candidate) -> tuple[float, str]:
    return candidate.cost, str(candidate.plan)


def _changed(then: float, now: float, share: float) -> bool:
    return now != then and abs(now - then) >= share * abs(then)
