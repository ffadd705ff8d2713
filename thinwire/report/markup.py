"""HTML by calls: whatever is not markup already is escaped."""

from __future__ import annotations

import html
from typing import Any

_VOID = {"meta", "input", "br"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: str | None, **attributes: Any) -> Markup:
    """An element. Attributes are given with underscores; those that are None or False are left out.

    >>> tag("p", "a < b", tag("b", "c"), class_="x y", data_n=1, hidden=True)
    '<p class="x y" data-n="1" hidden>a &lt; b<b>c</b></p>'
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: str | None) -> Markup:
    return Markup("".join(child if isinstance(child, Markup) else html.escape(child) for child in children if child))


def _attribute(key: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'
