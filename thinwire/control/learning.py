"""How many more steps a plan needs: what error feedback makes of a gradient that is sent in part.

Where dense training takes N_0 steps to an accuracy, an exchange e that sends the share `gain` of the energy takes

    N = N_0 gain^-p_e

What is not sent now is sent later, so learning slows far less than the gain falls: p is not 1, as it would be if what
is not sent were lost, but about 0.3 where every rank sends its own largest entries, and 0.4 where it sends others: the
largest of each layer, or those that are a leader's largest.

The constants are fitted to the runs in benchmarks/results/steps_to_accuracy.json: four models, all exchanges, ratios
from 0.1 to 0.001, three targets each. RMS_ERROR is the root mean square of log(predicted / measured) over all of them;
of a model that the fit has not seen it is UNSEEN_ERROR. docs/how-it-decides.md has the table and the forms that lost.
"""

from __future__ import annotations

import math

_LARGEST, _OTHERS = 0.30, 0.41
POWERS = {
    "topk-allgather": _LARGEST,
    "ms-topk": _LARGEST,
    "layerwise-topk": _OTHERS,
    "star-topk": _OTHERS,
    "var-topk": _OTHERS,
}
RMS_ERROR = 0.32
UNSEEN_ERROR = 0.39

# The gain below which runs missed targets that dense training reached, for those that follow a leader; the others
# reached theirs at the smallest gains that were tried.
_SAFE_GAINS = {"star-topk": 0.03, "var-topk": 0.03}
_SMALLEST_TRIED = 0.01


def steps_factor(exchange: str, gain: float) -> float:
    """How many times the steps of dense training this exchange needs at this gain: gain^-p.

    >>> [round(steps_factor("topk-allgather", gain), 2) for gain in (1.0, 0.5, 0.1, 0.01)]
    [1.0, 1.23, 2.0, 3.98]
    """
    if exchange == "dense" or gain >= 1:
        return 1.0
    return math.pow(gain, -POWERS[exchange]) if gain > 0 else math.inf


def safe_gain(exchange: str) -> float:
    """The least gain at which this exchange is known to train: below it the ratio should be raised.

    There the error is some sqrt(1 / gain - 1) times as long as the gradient: 6 times for those that follow a leader, 10
    times for the others.
    """
    return 0.0 if exchange == "dense" else _SAFE_GAINS.get(exchange, _SMALLEST_TRIED)
