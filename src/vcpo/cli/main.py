"""The `vcpo` command. Heavy imports happen inside the commands, so that `vcpo --help` answers at once."""

from __future__ import annotations

from typing import Annotated

import typer

from vcpo import __version__
from vcpo.cli.bench import bench_app
from vcpo.cli.tasks import tasks
from vcpo.cli.train import train

app = typer.Typer(
    help="Stable asynchronous RL post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train)
app.command("tasks")(tasks)
app.add_typer(bench_app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vcpo {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Stable asynchronous RL post-training of language models."""


def main() -> None:
    """Entry point of the `vcpo` command."""
    app()


if __name__ == "__main__":
    main()
