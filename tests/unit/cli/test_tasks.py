from __future__ import annotations

import json

from typer.testing import CliRunner

from vcpo.cli.main import app
from vcpo.tasks import TASKS, make_task


def run(*arguments: str):
    return CliRunner().invoke(app, ["tasks", *arguments])


def test_tasks_are_listed_with_one_line_each():
    lines = run().output.splitlines()
    assert [line.split()[0] for line in lines] == sorted(TASKS)
    assert all(len(line.split()) > 3 for line in lines)
    assert set(json.loads(run("--json").output)) == set(TASKS)


def test_one_task_is_shown_with_three_prompts_and_a_demonstration():
    shown = json.loads(run("running_sums", "--json").output)
    assert shown["name"] == "running_sums"
    assert len(set(shown["prompts"])) == 3
    prompt, completion = shown["demonstration"]["prompt"], shown["demonstration"]["completion"]
    assert make_task("running_sums").score([prompt], [completion]) == [1.0]
    text = run("running_sums").output
    assert all(p in text for p in shown["prompts"])
    assert prompt + completion in text


def test_an_unknown_task_is_one_line_with_the_nearest_name():
    result = run("runing_sums")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert (
        result.stderr
        == "error: unknown task 'runing_sums': did you mean 'running_sums'? there are countdown, running_sums\n"
    )
