"""What goes wrong with a lab as such, rather than with what runs in it."""

from __future__ import annotations

from thinwire.errors import ThinwireError


class LabError(ThinwireError):
    """The lab, or a part of it, is not there or does not answer."""


class LabUnavailable(LabError):
    """This machine does not let us make hosts."""


def unavailable(missing: str) -> LabUnavailable:
    """The error that says what is missing, and what there is instead."""
    return LabUnavailable(
        f"{missing}\nWithout the lab, thinwire.link.shaped delays and paces messages inside thinwire's own links. It "
        "needs no privilege and shapes only thinwire's own exchanges."
    )
