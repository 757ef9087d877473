"""`vcpo train`: one recipe, one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vcpo.cli.errors import one_line_errors

if TYPE_CHECKING:
    from vcpo.cli.console import Console
    from vcpo.config import RunConfig


_RUN_DIR_HELP = (
    "Folder for the run's files. Without it the recipe's, with -2, -3, ... added while that one holds a run."
)


@one_line_errors
def train(
    recipe: Annotated[str, typer.Argument(help="TOML file of the run, for example recipes/quickstart.toml.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings laid over the recipe: learner.lr=1e-3 mode=sync seed=1."),
    ] = None,
    run_dir: Annotated[str | None, typer.Option("--run-dir", metavar="DIR", help=_RUN_DIR_HELP)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that the folder holds.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all that can be checked, print the plan.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line for programs.")] = False,
) -> None:
    """Train a policy: samplers and learner side by side, in turns, or replayed."""
    from vcpo.cli.console import JsonConsole, TextConsole
    from vcpo.config import load_config
    from vcpo.run_dir import check_run_dir
    from vcpo.run_plan import plan_run

    console = JsonConsole() if as_json else TextConsole()
    words = list(overrides or [])
    named = run_dir is not None or any(word.split("=")[0].strip() == "run_dir" for word in words)
    config = load_config(recipe, words)
    config = _with_run_dir(config, run_dir, may_number=not named and not overwrite)
    plan = plan_run(config)
    check_run_dir(Path(config.run_dir), overwrite=overwrite)
    console.plan(plan)
    if not dry_run:
        _run(config, console, overwrite=overwrite)


def _with_run_dir(config: RunConfig, run_dir: str | None, *, may_number: bool) -> RunConfig:
    """A folder that the caller named is taken as it is; the recipe's own may get a number, so that it can be repeated."""
    from vcpo.run_dir import free_run_dir

    folder = Path(run_dir or config.run_dir)
    return config.model_copy(update={"run_dir": str(free_run_dir(folder) if may_number else folder)})


def _run(config: RunConfig, console: Console, *, overwrite: bool) -> None:
    import warnings

    from transformers.utils import logging

    from vcpo.training import train as train_run

    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: console.note(f"warning: {message}")
        console.summary(train_run(config, console, overwrite=overwrite))
