"""The paper's prices and rules against its own table."""

from __future__ import annotations

import math
import random
from statistics import mean

import pytest

from thinwire.control import paper
from thinwire.types import Network

NUMELS = {"ResNet18": 11_689_512, "ResNet50": 25_557_032, "AlexNet": 61_100_840}
RATIOS = (0.1, 0.01, 0.001)
# Table VI: milliseconds of AG, ART-Ring and ART-Tree, 8 workers, alpha = 1 ms, by model, Gbit/s and ratio.
TABLE_VI = {
    "ResNet18": {
        10: ((54, 35, 43.2), (7.66, 18.1, 12.2), (3.28, 16.7, 9)),
        5: ((107.76, 52.5, 76.3), (13.83, 20.8, 16.1), (4.25, 17.9, 10.1)),
        1: ((526.3, 194.7, 345.6), (51.93, 34.1, 41.9), (8.86, 19.5, 12.8)),
    },
    "ResNet50": {
        10: ((115.1, 52.9, 83.4), (14.35, 20.3, 15.9), (4.65, 18.1, 10)),
        5: ((232, 94.7, 156.2), (28.1, 26.1, 24.2), (5.3, 17.8, 10.5)),
        1: ((1148, 405.5, 745), (126.5, 58.8, 83.7), (14.35, 21, 16.1)),
    },
    "AlexNet": {
        10: ((271.8, 106.8, 180.4), (32.73, 25.2, 25.8), (6, 18.6, 11.1)),
        5: ((544.5, 200.4, 354.8), (61.75, 34.8, 42.6), (8.92, 19.3, 13.1)),
        1: ((2718.7, 964.4, 1778), (282.7, 111.8, 186.8), (31.33, 27, 27.3)),
    },
}
NAMES = tuple(paper.COMPRESSED)


def _case(model: str, gbit: float, ratio: float) -> tuple[Network, float, float, int]:
    return Network(alpha=1e-3, beta=8 / (gbit * 1e9)), 4 * NUMELS[model], ratio, 8


@pytest.mark.parametrize("model", TABLE_VI)
def test_table_vi_is_reproduced_within_3_percent_and_its_winner_in_every_row(model: str) -> None:
    errors = []
    for gbit, rows in TABLE_VI[model].items():
        for ratio, measured in zip(RATIOS, rows, strict=True):
            case = _case(model, gbit, ratio)
            prices = [1e3 * paper.seconds(*case)[name] for name in NAMES]
            errors += [abs(price / ms - 1) for price, ms in zip(prices, measured, strict=True)]
            winner = NAMES[measured.index(min(measured))]
            assert NAMES[prices.index(min(prices))] == winner, (gbit, ratio)
            assert paper.choose(*case) == winner, (gbit, ratio)
    assert len(errors) == 27
    assert mean(errors) < 0.03


def test_the_rules_name_the_cheapest_in_ten_thousand_random_cases() -> None:
    rng = random.Random(0)
    for _ in range(10_000):
        network = Network(alpha=10 ** rng.uniform(-5, -0.5), beta=10 ** rng.uniform(-10.5, -5))
        case = network, 10 ** rng.uniform(3, 10), 10 ** rng.uniform(-4, 0), rng.choice((2, 3, 4, 5, 8, 16, 64, 100))
        prices = {name: price(*case) for name, price in paper.COMPRESSED.items()}
        assert paper.choose(*case) == min(prices, key=prices.__getitem__), case
        assert paper.ring_over_tree(*case) == (prices["ART-Ring"] < prices["ART-Tree"]), case
        assert paper.ring_over_allgather(*case) == (prices["ART-Ring"] < prices["AG"]), case
        assert paper.tree_over_allgather(*case) == (prices["ART-Tree"] < prices["AG"]), case


@pytest.mark.parametrize("network", [Network(alpha=0.0, beta=1e-9), Network(alpha=1e-3, beta=0.0)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_where_the_printed_rules_divide_by_zero_the_all_gather_wins(network: Network, world_size: int) -> None:
    assert paper.choose(network, 1e8, 0.01, world_size) == ("AG" if world_size < 4 or not network.beta else "ART-Ring")


def test_exchanges_cost_what_equations_4a_and_4b_say() -> None:
    network, M, c, N = Network(alpha=3e-3, beta=2e-9), 5e7, 0.02, 8
    alpha, beta, log = network.alpha, network.beta, math.log2(N)
    prices = paper.seconds(network, M, c, N)
    assert prices["AG"] == pytest.approx(alpha * log + 2 * M * c * beta * (N - 1))
    assert prices["ART-Ring"] == pytest.approx(alpha * (2 * (N - 1) + log) + M * c * beta * (2 * (N - 1) / N + log))
    assert prices["ART-Tree"] == pytest.approx(3 * alpha * log + 3 * M * c * beta * log)
    assert prices["PS"] == pytest.approx(2 * alpha + 2 * (N - 1) * M * beta)


@pytest.mark.parametrize("model", paper.GAINS)
def test_a_gain_curve_rises_through_its_readings_to_one(model: str) -> None:
    curve = paper.gain_curve(paper.GAINS[model])
    for ratio, gain in paper.GAINS[model].items():
        assert curve(ratio) == pytest.approx(gain)
    gains = [curve(1.1**-i) for i in range(100)]
    assert gains[0] == 1.0
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] > 0


@pytest.mark.parametrize("readings", [{}, {0.1: 1.5}, {0.0: 0.1}, {0.1: 0.0}, {0.1: 0.2, 0.01: 0.5}, {0.1: math.nan}])
def test_readings_that_cannot_be_gains_are_refused(readings: dict[float, float]) -> None:
    with pytest.raises(ValueError, match="gain"):
        paper.gain_curve(readings)
