"""How many more steps a plan needs: what error feedback makes of a gradient that is sent in part.

Where dense training takes N_0 steps to an accuracy, an exchange e that sends the share `gain` of the energy takes

    N = N_0 + d_e (1 / gain - 1)^(2/3)

What is not sent now is sent later. So training by error feedback is not slower but late: it needs as many steps more
after a thousand steps as after a hundred, and what that is worth depends on how long it goes on. (In theory, too,
compression is in the terms of the rate that vanish first: Stich & Karimireddy 2020.) The delay d is about 22 steps
where every rank sends its own largest entries, and 36 where it sends others: the largest of each layer, or those that
are a leader's largest; 1 / gain - 1 is the energy kept back over the energy sent.

The constants are fitted to the runs in benchmarks/results/steps_to_accuracy.json: seven trainings that take dense 40 to
1,500 steps, all exchanges, ratios from 0.1 to 0.001, three targets each. RMS_ERROR is the root mean square of
log(predicted / measured) over all of them; of a training that the fit has not seen it is UNSEEN_ERROR.
docs/how-it-decides.md has the table and the forms that lost.
"""

from __future__ import annotations

import math

_LARGEST, _OTHERS = 22.0, 36.0
DELAYS = {
    "topk-allgather": _LARGEST,
    "ms-topk": _LARGEST,
    "layerwise-topk": _OTHERS,
    "star-topk": _OTHERS,
    "var-topk": _OTHERS,
}
RMS_ERROR = 0.28
UNSEEN_ERROR = 0.32

# The gain below which runs missed targets that dense training reached, for those that follow a leader; the others
# reached theirs at the smallest gains that were tried.
_SAFE_GAINS = {"star-topk": 0.03, "var-topk": 0.03}
_SMALLEST_TRIED = 0.01

# How many times as long as the gradient the error of runs was that did reach their targets, by the median over a run.
_SAFE_ERRORS = {"star-topk": 7.5, "var-topk": 7.5}
_LONGEST_TRIED = 15.0


def delay(exchange: str, gain: float) -> float:
    """How many steps later than dense training this exchange is at this gain: d (1 / gain - 1)^(2/3).

    >>> [round(delay("topk-allgather", gain)) for gain in (1.0, 0.5, 0.1, 0.01)]
    [0, 22, 95, 471]
    """
    if exchange == "dense" or gain >= 1:
        return 0.0
    return DELAYS[exchange] * math.pow(1 / gain - 1, 2 / 3) if gain > 0 else math.inf


def safe_gain(exchange: str, strain: float = 1.0) -> float:
    """The least gain at which this exchange is known to train: below it the ratio should be raised.

    Neither the gain nor the error may leave the range in which runs reached their targets. The error e is

        |e| / |g| = sqrt(strain (1 / gain - 1))

    times as long as the gradient g. The strain is 1 where gradients have nothing to do with each other, was 1.2 to 2.6
    at the gains of our runs, and is measured (control/view.py): so an error of L times is reached at strain /
    (strain + L^2).

    >>> [round(safe_gain("topk-allgather", strain), 3) for strain in (1, 2, 10)]
    [0.01, 0.01, 0.043]
    """
    if exchange == "dense":
        return 0.0
    longest = _SAFE_ERRORS.get(exchange, _LONGEST_TRIED)
    return max(_SAFE_GAINS.get(exchange, _SMALLEST_TRIED), strain / (strain + longest**2))
