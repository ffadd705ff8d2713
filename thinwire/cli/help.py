"""How commands explain themselves: every option with its default, and examples that can be typed."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from typer.core import TyperCommand, TyperGroup


def examples(*shown: tuple[str, str]) -> str:
    """What stands at the end of a command's help: for each command what it is for, as a shell would take both."""
    return "\n\n".join(["Examples:", *(f"[dim]# {what}[/dim]\n[bold]{command}[/bold]" for what, command in shown)])


class Command(TyperCommand):
    """A command whose help fits any terminal and shows no type where there is nothing to give."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _tidy(self, ctx)
        super().format_help(ctx, formatter)


class JobCommand(Command):
    """One whose options are settings of a job: where none is given, it is the job's own."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from thinwire.jobs.job import Job

        defaults = {field.name: field.default for field in fields(Job)}
        options: Any = self.get_params(ctx)
        for option in options:
            if option.default is None and defaults.get(option.name) is not None:
                option.default, option.show_default = defaults[option.name], True
        super().format_help(ctx, formatter)


class Group(TyperGroup):
    """A group of such commands."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _tidy(self, ctx)
        super().format_help(ctx, formatter)


def _tidy(command: Any, ctx: Any) -> None:
    for param in command.get_params(ctx):
        if getattr(param, "is_flag", False):
            param.metavar = ""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
