"""How a command ends when it cannot go on: one line on stderr and a non-zero exit code, never a traceback of ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import typer

from vcpo.errors import VcpoError

Command = TypeVar("Command", bound=Callable[..., Any])

INTERRUPTED = 130
"""What a shell expects of a program that Ctrl-C ended."""


def one_line_errors(command: Command) -> Command:
    """Wrap a command: VcpoError -> `error: ...`, exit 1; Ctrl-C -> `interrupted`, exit 130.

    A RolloutError may carry the traceback of a sampler process in its further lines; they are printed as they are,
    because they are not our error but the cause.
    """

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except VcpoError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None

    return wrapped  # type: ignore[return-value]
