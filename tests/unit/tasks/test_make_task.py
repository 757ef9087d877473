"""Tasks by name: what there is, and what a misspelt name is answered with."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vcpo.errors import ConfigError
from vcpo.tasks import TASKS, RunningSums, Task, make_task


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_task_has_the_members_of_the_protocol(name):
    task = make_task(name)
    assert isinstance(task, Task)
    assert task.name == name
    assert task.alphabet


def test_options_reach_the_task():
    assert make_task("running_sums", digits=4, flip_rewards=0.1) == RunningSums(digits=4, flip_rewards=0.1)


@pytest.mark.parametrize(("name", "nearest"), [("runing_sum", "running_sums"), ("count-down", "countdown")])
def test_an_unknown_task_is_refused_with_the_nearest_name(name, nearest):
    with pytest.raises(ConfigError) as info:
        make_task(name)
    text = str(info.value)
    assert f"did you mean '{nearest}'" in text
    assert "countdown, running_sums" in text
    assert "\n" not in text


def test_a_name_that_resembles_none_is_answered_with_the_list():
    with pytest.raises(ConfigError, match="unknown task 'xyz': there are countdown, running_sums"):
        make_task("xyz")


def test_an_unknown_option_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"no option 'digit': did you mean 'digits'\? there are digits, flip_rewards"):
        make_task("running_sums", digit=3)
    with pytest.raises(ConfigError, match="no option 'name'"):
        make_task("countdown", name="x")


@pytest.mark.parametrize("options", [{"digits": "7"}, {"digits": 2.5}, {"digits": True}, {"flip_rewards": "0.1"}])
def test_an_option_of_the_wrong_type_is_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))) as info:
        make_task("running_sums", **options)
    assert "\n" not in str(info.value)


def test_importing_tasks_is_cheap():
    code = "import sys, vcpo.tasks; sys.exit(bool({'torch', 'reasoning_gym', 'sympy', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
