"""`vcpo tasks`: what can be trained on."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Annotated, Any

import typer

from vcpo.cli.errors import one_line_errors


@one_line_errors
def tasks(
    name: Annotated[str, typer.Argument(help="Show this task: three prompts and a demonstration.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value for programs.")] = False,
) -> None:
    """List the tasks, or show one."""
    shown = _describe(name) if name else _list()
    if as_json:
        typer.echo(json.dumps(shown, ensure_ascii=False))
    elif name:
        typer.echo(_page(shown))
    else:
        width = max(len(n) for n in shown)
        typer.echo("\n".join(f"{n:<{width}}  {text}" for n, text in shown.items()))


def _list() -> dict[str, str]:
    from vcpo.tasks import TASKS

    return {name: _first_line(factory) for name, factory in sorted(TASKS.items())}


def _describe(name: str) -> dict[str, Any]:
    from dataclasses import fields, is_dataclass

    from vcpo.tasks import TASKS, make_task

    task = make_task(name)
    prompt, completion = next(task.demonstrations(0, noise=0.0))
    options = {f.name: getattr(task, f.name) for f in fields(task)} if is_dataclass(task) else {}
    return {
        "name": name,
        "description": _first_line(TASKS[name]),
        "options": options,
        "alphabet": task.alphabet,
        "prompts": [p.text for p in itertools.islice(task.train_prompts(0), 3)],
        "demonstration": {"prompt": prompt, "completion": completion},
    }


def _first_line(factory: Any) -> str:
    """A task is described on top of its module, which says more than its class."""
    module = sys.modules.get(factory.__module__)
    return (getattr(module, "__doc__", "") or factory.__doc__ or "").strip().split("\n")[0]


def _page(shown: dict[str, Any]) -> str:
    lines = [shown["name"], f"  {shown['description']}", "", "prompts"]
    lines += [f"  {_indented(text)}" for text in shown["prompts"]]
    demonstration = shown["demonstration"]
    lines += ["", "demonstration", f"  {_indented(demonstration['prompt'] + demonstration['completion'])}"]
    if shown["options"]:
        options = ", ".join(f"{k} = {v!r}" for k, v in shown["options"].items())
        lines += ["", f"options of [task.options], with their defaults\n  {options}"]
    return "\n".join(lines)


def _indented(text: str) -> str:
    return text.replace("\n", "\n  ")
