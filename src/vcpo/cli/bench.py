"""`vcpo bench`: measurements that compare methods, on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from vcpo.cli.errors import one_line_errors
from vcpo.errors import ConfigError

bench_app = typer.Typer(
    help="Measure methods against each other on this machine.", no_args_is_help=True, rich_markup_mode=None
)


@bench_app.callback()
def _bench() -> None:
    """Measure methods against each other on this machine."""


@bench_app.command("stability")
@one_line_errors
def stability(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value for programs.")] = False,
) -> None:
    """Who keeps learning at a high policy lag (not available yet)."""
    raise ConfigError(
        "the stability benchmark is not available yet; one cell of it runs with: vcpo train recipes/stability.toml "
        "rollout.max_policy_lag=16 learner.lr=2e-3 seed=0"
    )
