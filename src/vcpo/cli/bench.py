"""`vcpo bench`: measurements that compare methods, on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from vcpo.cli.errors import one_line_errors
from vcpo.errors import ConfigError

bench_app = typer.Typer(
    help="Measure methods against each other on this machine.", no_args_is_help=True, rich_markup_mode=None
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON value for programs; progress goes to stderr.")]
Save = Annotated[
    Path | None, typer.Option("--save", help="Also write the figures, with where they come from, as JSON.")
]


@bench_app.callback()
def _bench() -> None:
    """Measure methods against each other on this machine."""


@bench_app.command("stability")
@one_line_errors
def stability(
    grid: Annotated[
        str,
        typer.Option(
            help="smoke (4 methods x 3 seeds), rates (two lower learning rates x 2 seeds) or quick (5 seeds)."
        ),
    ] = "smoke",
    seeds: Annotated[str | None, typer.Option(help="Seeds instead of the grid's own, such as 5,6,7.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps instead of the grid's own.")] = None,
    out: Annotated[Path, typer.Option(help="Where runs are kept; finished ones are not run again.")] = Path(
        "runs/stability"
    ),
    results: Annotated[Path, typer.Option(help="Where JSON, page and picture go.")] = Path("docs/results"),
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; default one per core.")] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Only draw page and picture again from the JSON.")] = False,
    as_json: Json = False,
) -> None:
    """Who keeps learning at a high policy lag: synchronous, TIS and VCPO on the same task, by replay."""
    from dataclasses import replace

    from vcpo.bench.evidence import command_line, write_evidence
    from vcpo.bench.stability import GRIDS, bench_stability
    from vcpo.bench.stability_page import plot_stability, stability_page

    if grid not in GRIDS:
        raise ConfigError(f"unknown grid {grid!r}; use one of {', '.join(GRIDS)}")
    chosen = GRIDS[grid]
    if seeds is not None:
        chosen = replace(chosen, seeds=_numbers("--seeds", seeds))
    if steps is not None:
        chosen = replace(chosen, steps=steps)
    stem = f"stability-{grid}"
    source = results / f"{stem}.json"
    if plot:
        if not source.exists():
            raise ConfigError(f"{source} does not exist: run `vcpo bench stability --grid {grid}` first")
        evidence = json.loads(source.read_text(encoding="utf-8"))
    else:
        say = lambda line: typer.echo(line, err=as_json)  # noqa: E731
        evidence = bench_stability(chosen, out=out, jobs=jobs, command=command_line(), report=say)
        write_evidence(source, evidence)
    notes = results / f"{stem}-notes.md"
    page = stability_page(evidence, f"{stem}.png", notes.read_text(encoding="utf-8") if notes.exists() else "")
    plot_stability(evidence, results / f"{stem}.png")
    (results / f"{stem}.md").write_text(page, encoding="utf-8")
    if as_json:
        typer.echo(json.dumps({**evidence, "runs": [{**r, "curves": None} for r in evidence["runs"]]}))
        return
    typer.echo("\n".join(line for line in page.splitlines() if line.startswith("|")))
    typer.echo(f"page        {results / f'{stem}.md'}\npicture     {results / f'{stem}.png'}")


@bench_app.command("speed")
@one_line_errors
def speed(
    out: Annotated[Path, typer.Option(help="Where the runs are kept.")] = Path("runs/speed"),
    results: Annotated[Path, typer.Option(help="Where JSON and page go.")] = Path("docs/results"),
    plot: Annotated[bool, typer.Option("--plot", help="Only write the page again from the JSON.")] = False,
    as_json: Json = False,
) -> None:
    """Every speed figure of this machine: start-up, engine, overhead, replay, synchronous against asynchronous."""
    from vcpo.bench.evidence import command_line, write_evidence
    from vcpo.bench.speed import bench_speed, speed_page

    source = results / "speed.json"
    if plot:
        if not source.exists():
            raise ConfigError(f"{source} does not exist: run `vcpo bench speed` first")
        evidence = json.loads(source.read_text(encoding="utf-8"))
    else:
        evidence = bench_speed(out=out, command=command_line(), report=lambda line: typer.echo(line, err=as_json))
        write_evidence(source, evidence)
    notes = results / "speed-notes.md"
    page = speed_page(evidence, notes.read_text(encoding="utf-8") if notes.exists() else "")
    (results / "speed.md").write_text(page, encoding="utf-8")
    typer.echo(json.dumps(evidence) if as_json else page)


@bench_app.command("score-norms")
@one_line_errors
def score_norms(
    cells: Annotated[
        str | None, typer.Option(help="Only cells whose name contains one of these words, such as 'T=64,LoRA'.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Where JSON and page go.")] = Path("docs/results"),
    plot: Annotated[bool, typer.Option("--plot", help="Only write the page again from the JSON.")] = False,
    as_json: Json = False,
) -> None:
    """What exact score norms cost over a plain step: time, peak memory and error of every method."""
    from vcpo.bench.evidence import command_line, write_evidence
    from vcpo.bench.score_norms import CELLS, bench_score_norms
    from vcpo.bench.score_norms_page import score_norms_page

    source = results / "score-norms.json"
    if plot:
        if not source.exists():
            raise ConfigError(f"{source} does not exist: run `vcpo bench score-norms` first")
        evidence = json.loads(source.read_text(encoding="utf-8"))
    else:
        chosen = tuple(c for c in CELLS if cells is None or any(word in c.name for word in cells.split(",")))
        if not chosen:
            raise ConfigError(f"--cells {cells!r} names no cell; there are: {', '.join(c.name for c in CELLS)}")
        say = lambda line: typer.echo(line, err=as_json)  # noqa: E731
        evidence = bench_score_norms(chosen, command=command_line(), report=say)
        write_evidence(source, evidence)
    notes = results / "score-norms-notes.md"
    page = score_norms_page(evidence, notes.read_text(encoding="utf-8") if notes.exists() else "")
    (results / "score-norms.md").write_text(page, encoding="utf-8")
    typer.echo(json.dumps(evidence) if as_json else page)


@bench_app.command("proxies")
@one_line_errors
def proxies(
    model: Annotated[Path, typer.Option(help="Folder of a pretrained chat model; `make smollm2` fetches one.")] = Path(
        ".vcpo-cache/models/smollm2-135m-instruct"
    ),
    prompts: Annotated[int, typer.Option(min=2, help="Prompts; intervals are over these.")] = 12,
    groups: Annotated[int, typer.Option(min=2, help="Groups of 8 per prompt.")] = 6,
    lags: Annotated[str, typer.Option(help="Updates between sampling and measuring, comma-separated.")] = "3,8",
    lr: Annotated[float, typer.Option(help="Learning rate of these updates.")] = 1e-5,
    seed: Annotated[int, typer.Option(help="Seed of prompts, samples and sketches.")] = 0,
    results: Annotated[Path, typer.Option(help="Where JSON and page go.")] = Path("docs/results"),
    plot: Annotated[bool, typer.Option("--plot", help="Only write the page again from the JSON.")] = False,
    as_json: Json = False,
) -> None:
    """Whether cheap score norms make as good a baseline as exact ones, on a pretrained model with stale rollouts."""
    from vcpo.bench.evidence import command_line, provenance, write_evidence
    from vcpo.bench.proxies import bench_proxies
    from vcpo.bench.proxies_page import proxies_page

    source = results / "score-norm-proxies.json"
    if plot:
        if not source.exists():
            raise ConfigError(f"{source} does not exist: run `vcpo bench proxies` first")
        evidence = json.loads(source.read_text(encoding="utf-8"))
    else:
        if not model.exists():
            raise ConfigError(f"{model} does not exist: `make smollm2` fetches it, or give --model FOLDER")
        say = lambda line: typer.echo(line, err=as_json)  # noqa: E731
        settings = {"prompts": prompts, "groups": groups, "lag": _numbers("--lags", lags), "lr": lr, "seed": seed}
        found = bench_proxies(model, **settings, report=say)
        evidence = {**provenance(command_line()), "seeds": [seed], "model": model.name, **found}
        write_evidence(source, evidence)
    notes = results / "score-norm-proxies-notes.md"
    page = proxies_page(evidence, notes.read_text(encoding="utf-8") if notes.exists() else "")
    (results / "score-norm-proxies.md").write_text(page, encoding="utf-8")
    typer.echo(json.dumps(evidence) if as_json else page)


@bench_app.command("startup")
@one_line_errors
def startup(save: Save = None, as_json: Json = False) -> None:
    """How long `import vcpo` and `vcpo --help` take."""
    from vcpo.bench.startup import bench_startup

    _finish(bench_startup(), save, as_json)


@bench_app.command("overhead")
@one_line_errors
def overhead(
    tokens: Annotated[int, typer.Option(min=8, help="Tokens per trajectory.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Paired repetitions.")] = 9,
    save: Save = None,
    as_json: Json = False,
) -> None:
    """What variance control costs over a plain REINFORCE step: time and peak memory, as ratios of one run."""
    from vcpo.bench.overhead import bench_overhead

    _finish(bench_overhead(tokens=tokens, repeats=repeats), save, as_json)


@bench_app.command("engine")
@one_line_errors
def engine(
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions; the median is quoted.")] = 9,
    save: Save = None,
    as_json: Json = False,
) -> None:
    """How fast the embedded decode engine writes 128 trajectories of the benchmark's policy on one core."""
    from vcpo.bench.engine import bench_engine

    _finish(bench_engine(repeats=repeats), save, as_json)


@bench_app.command("asynchrony")
@one_line_errors
def asynchrony(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps a run.")] = 60,
    repeats: Annotated[int, typer.Option(min=1, help="Pairs of runs; the median is quoted.")] = 3,
    out: Annotated[Path, typer.Option(help="Where the runs are kept.")] = Path("runs/asynchrony"),
    save: Save = None,
    as_json: Json = False,
) -> None:
    """Wall time of the same steps taking turns and side by side, beside what perfect overlap would give."""
    from vcpo.bench.asynchrony import bench_asynchrony

    say = lambda line: typer.echo(line, err=as_json)  # noqa: E731
    _finish(bench_asynchrony(steps=steps, repeats=repeats, out=out, report=say), save, as_json)


def _finish(figures: dict[str, Any], save: Path | None, as_json: bool) -> None:
    from vcpo.bench.evidence import command_line, provenance, write_evidence

    if save is not None:
        write_evidence(save, {**provenance(command_line()), **figures})
    if as_json:
        typer.echo(json.dumps(figures))
        return
    for key, value in figures.items():
        if isinstance(value, list):
            typer.echo(f"{key}:")
            for row in value:
                typer.echo("  " + "  ".join(f"{k} {_short(v)}" for k, v in row.items()))
        else:
            typer.echo(f"{key:16s} {_short(value)}")


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{k} {_short(v)}" for k, v in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = (-1,)
    if min(found) < 0:
        raise ConfigError(
            f"{option} must be whole numbers from 0 with commas between them, such as 5,6,7; got {text!r}"
        )
    return found
