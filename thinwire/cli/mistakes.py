"""How the commands of the main job tell what cannot be: in one message, with the line of the file that it stands in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from thinwire.cli.streams import outlived
from thinwire.errors import ThinwireError


@contextmanager
def told(command: str, figures_only: bool = False) -> Iterator[None]:
    """A user's mistake and a machine's refusal are one message and no traceback. Who reads it may have gone."""
    with outlived(figures_only), _refused(command):
        yield


@contextmanager
def _refused(command: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, ThinwireError) as error:
        typer.echo(f"thinwire {command}: {error}", err=True)
        raise typer.Exit(2) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        typer.echo(f"thinwire {command}: {where}{error.strerror or error}.", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(130) from interrupt


@contextmanager
def blamed(config: Path | None, context: typer.Context) -> Iterator[None]:
    """A mistake in a file of settings is told with its line, also where it is found only when the setting is used."""
    try:
        yield
    except ValueError as error:
        from thinwire.jobs.job import Mistake
        from thinwire.jobs.settings import Settings

        if config is None or not isinstance(error, Mistake):
            raise
        with Settings.read(config, also=("methods", "seeds")).blamed(named(context)):
            raise


def named(context: typer.Context) -> dict[str, Any]:
    """What was given on the command line, by name."""
    return {key: value for key, value in context.params.items() if value is not None}
