"""A measurement may miss its bar twice, and not three times."""

from __future__ import annotations

import pytest

from tests.timing import timing


def missing(times: int) -> list[int]:
    """Measure something that misses its bar so often; gives the attempts."""
    attempts: list[int] = []

    @timing
    def measurement() -> None:
        attempts.append(len(attempts))
        assert len(attempts) > times

    measurement()
    return attempts


def test_a_miss_is_measured_again_and_shown(recwarn: pytest.WarningsRecorder) -> None:
    assert len(missing(0)) == 1 and len(recwarn) == 0
    assert len(missing(2)) == 3
    assert ["measured again" in str(warning.message) for warning in recwarn] == [True, True]


def test_what_misses_every_time_fails() -> None:
    with pytest.raises(AssertionError), pytest.warns(UserWarning):
        missing(3)
