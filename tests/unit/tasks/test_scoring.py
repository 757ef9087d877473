"""A reward function may do anything; what comes out is a reward per trajectory, or one clear line."""

from __future__ import annotations

import asyncio
import functools
import math
import subprocess
import sys
import threading
import time
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from vcpo.errors import ConfigError, RewardError
from vcpo.tasks import RunningSums, scoring
from vcpo.tasks.scoring import Scorer
from vcpo.types import Prompt, Trajectory, TrajectoryGroup


def group_of(*completions: str, finish: str = "stop", **columns) -> TrajectoryGroup:
    made = tuple(
        Trajectory(
            member=i,
            token_ids=(1,),
            sampler_logprobs=(-0.5,),
            policy_versions=(0,),
            finish_reason=finish,  # type: ignore[arg-type]
            completion=c,
        )
        for i, c in enumerate(completions)
    )
    return TrajectoryGroup(7, Prompt("t/1", "question", columns), (3, 4), made, completed_version=2)


def rewards_of(function, group=None, **options) -> list[float | None]:
    scorer = Scorer(function, **{"timeout_s": 5.0, **options})
    return [t.reward for t in scorer.score_group(group or group_of("a", "b")).trajectories]


def error_line(function, **options) -> str:
    with pytest.raises(RewardError) as info:
        rewards_of(function, **options)
    text = str(info.value)
    assert "\n" not in text
    assert "'t/1'" in text
    return text


# ---- what functions are given, and what they may be ----


def test_a_function_sees_trls_lists():
    seen = {}

    def record(prompts, completions, **columns):
        seen.update(prompts=prompts, completions=completions, **columns)
        return [0.25, 1]

    group = group_of("a", "b", answer="8", numbers=[1, 2])
    assert rewards_of(record, group) == [0.25, 1.0]
    assert seen == {
        "prompts": ["question"] * 2,
        "completions": ["a", "b"],
        "answer": ["8", "8"],
        "numbers": [[1, 2], [1, 2]],
    }


def test_the_group_is_the_same_but_for_the_rewards():
    group = group_of("a", "b", answer="8")
    scored = Scorer(lambda completions: [1, 2], timeout_s=5).score_group(group)
    assert scored == group.with_rewards([1.0, 2.0])


def test_a_function_without_catch_all_is_given_only_what_it_names():
    group = group_of("8", "9", answer="8", other=1)
    assert rewards_of(lambda completions, answer: [c == answer[0] for c in completions], group) == [1.0, 0.0]


def test_closures_partials_objects_and_async_functions_are_reward_functions():
    bonus = 3.0

    def plain(completions, scale=1.0, **_):
        return [scale * bonus for _ in completions]

    class Judge:
        def __call__(self, completions, **_):
            return [bonus] * len(completions)

    async def judge(completions, **_):
        await asyncio.sleep(0)
        return [bonus] * len(completions)

    async def threads(completions, **_):
        return await asyncio.to_thread(plain, completions)

    for function in (plain, Judge(), judge, threads, functools.partial(plain, scale=1)):
        assert rewards_of(function) == [3.0, 3.0]
    assert Scorer(functools.partial(plain, scale=2), timeout_s=1).name.endswith("plain")


def test_a_task_is_scored_by_its_own_score():
    scorer = Scorer(RunningSums(digits=2), timeout_s=5)
    group = replace(group_of("1+2=3", "1+2=4"), prompt=Prompt("running_sums/12", "12>"))
    assert [t.reward for t in scorer.score_group(group).trajectories] == [1.0, 0.0]
    assert scorer.name == "running_sums.score"


def test_failed_and_aborted_trajectories_are_not_shown_and_not_counted():
    stopped, cut, failed, aborted = group_of("a", "b", "c", "d").trajectories
    group = replace(
        group_of(),
        trajectories=(
            replace(failed, finish_reason="failed"),
            stopped,
            replace(aborted, finish_reason="aborted"),
            replace(cut, finish_reason="length"),
        ),
    )
    scorer = Scorer(lambda completions, **_: [{"a": 1.0, "b": 2.0}[c] for c in completions], timeout_s=5)
    assert [t.reward for t in scorer.score_group(group).trajectories] == [None, 1.0, None, 2.0]
    assert scorer.unscorable == 0
    calls = []
    nothing = Scorer(calls.append, timeout_s=5).score_group(group_of("a", finish="failed"))
    assert (nothing.trajectories[0].reward, calls) == (None, [])


# ---- rewards ----


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0],
        (1.0, 0.0),
        [True, False],
        np.array([1.0, 0.0], dtype=np.float32),
        [np.float32(1), np.bool_(False)],
        [np.array(1.0), np.int64(0)],
        torch.tensor([1.0, 0.0], requires_grad=True),
        [torch.tensor(1), torch.tensor(False)],
        [Fraction(1), Fraction(0)],
    ],
)
def test_any_kind_of_real_number_is_a_reward(returned):
    got = rewards_of(lambda **_: returned)
    assert got == [1.0, 0.0]
    assert all(type(r) is float for r in got)


@pytest.mark.parametrize(
    "bad", [None, math.nan, math.inf, -math.inf, 10**400, 1e39, -1e300, np.float64("nan"), torch.tensor(float("inf"))]
)
def test_what_is_not_a_finite_number_is_unscorable_and_counted(bad):
    scorer = Scorer(lambda **_: [bad, 0.5], timeout_s=5)
    assert [t.reward for t in scorer.score_group(group_of("a", "b")).trajectories] == [None, 0.5]
    scorer.score_group(group_of("a", "b"))
    assert scorer.unscorable == 2
    assert not scorer.errors


# ---- functions that misbehave ----


def raising(completions, **_):
    raise KeyError("no such\nanswer")


def exiting(completions, **_):
    sys.exit(3)


async def raising_later(completions, **_):
    await asyncio.sleep(0)
    raise ValueError("judge said no")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (raising, ["raising raised KeyError", "no such", "test_scoring.py:"]),
        (exiting, ["exiting raised SystemExit: 3"]),
        (raising_later, ["raising_later raised ValueError: judge said no"]),
        (lambda prompts: [1.0] * 3, ["returned 3 rewards for 2 completions"]),
        (lambda prompts: [], ["returned 0 rewards for 2 completions"]),
        (lambda prompts: None, ["returned NoneType None, not a list"]),
        (lambda prompts: 1.0, ["returned float 1.0, not a list"]),
        (lambda prompts: "10", ["returned str '10', not a list"]),
        (lambda prompts: {0: 1.0, 1: 2.0}, ["returned dict", "not a list"]),
        (lambda prompts: np.float64(1.0), ["not a list"]),
        (lambda prompts: [1.0, "1"], ["returned str '1' as reward 1, not a number or None"]),
        (lambda prompts: [[1.0], [0.0]], ["returned list [1.0] as reward 0"]),
        (lambda prompts: np.ones((2, 1)), ["returned list [1.0] as reward 0"]),
        (lambda prompts: [1 + 2j, 0], ["complex (1+2j) as reward 0"]),
        (lambda prompts: [torch.ones(2), 0], ["returned Tensor", "as reward 0"]),
        (lambda unknown: [1.0, 1.0], ["raised TypeError"]),
    ],
)
def test_a_misbehaving_function_ends_the_run_in_one_line(function, words):
    text = error_line(function)
    assert text.startswith("reward function ")
    assert all(word in text for word in words), text


def test_the_error_keeps_the_functions_own_traceback():
    with pytest.raises(RewardError) as info:
        rewards_of(lambda completions, **_: raising(completions))
    assert isinstance(info.value.__cause__, KeyError)


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_hanging_function_is_named_with_its_limit(kind):
    release = threading.Event()

    def hangs(completions, **_):
        release.wait()
        return [1.0, 1.0]

    async def hangs_async(completions, **_):
        await asyncio.Event().wait()

    text = error_line(hangs if kind == "plain" else hangs_async, timeout_s=0.05)
    release.set()
    assert "hangs" in text
    assert "did not return within its time limit of 0.05 s" in text


def test_a_hanging_coroutine_is_cancelled():
    ended = threading.Event()

    async def hangs(completions, **_):
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    error_line(hangs, timeout_s=0.05)
    assert ended.wait(10)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (raising, "raised"),
        (lambda prompts: [1.0], "wrong_length"),
        (lambda prompts: ["x", 1.0], "wrong_type"),
        (lambda prompts: time.sleep(0.5), "timeout"),
    ],
)
def test_on_request_errors_are_counted_by_kind_and_the_run_goes_on(function, kind):
    scorer = Scorer(function, timeout_s=0.1, on_error="unscorable")
    for _ in range(2):
        assert [t.reward for t in scorer.score_group(group_of("a", "b")).trajectories] == [None, None]
    assert scorer.errors == {kind: 2}
    assert scorer.unscorable == 4


def test_calls_that_hang_for_ever_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(scoring, "MAX_HUNG_CALLS", 3)
    release = threading.Event()
    scorer = Scorer(lambda prompts: release.wait(), timeout_s=0.02, on_error="unscorable")
    for _ in range(2):
        scorer.score_group(group_of("a"))
    with pytest.raises(RewardError, match="time limit"):
        scorer.score_group(group_of("a"))
    release.set()
    assert scorer.errors["timeout"] == 3


@pytest.mark.parametrize(
    "body",
    [
        "def f(completions, **_): time.sleep(3600)",
        "async def f(completions, **_): await asyncio.to_thread(time.sleep, 3600)",
        "def f(completions, **_):\n    while True: pass",
    ],
)
def test_the_process_can_end_although_a_call_still_hangs(body):
    code = f"""
import asyncio, time
from vcpo.tasks.scoring import Scorer
from vcpo.types import Prompt, Trajectory, TrajectoryGroup
{body}
t = Trajectory(0, (1,), (0.0,), (0,), "stop", "a")
Scorer(f, timeout_s=0.2).score_group(TrajectoryGroup(0, Prompt("p", "p"), (1,), (t,)))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "RewardError: reward function f did not return within its time limit of 0.2 s" in ended.stderr


def test_a_scorer_may_be_used_from_several_threads():
    scorer = Scorer(lambda completions, **_: [None if c == "n" else float(c) for c in completions], timeout_s=30)
    results: dict[int, list[float | None]] = {}

    def work(i: int) -> None:
        results[i] = [t.reward for t in scorer.score_group(group_of(str(i), "n")).trajectories]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(20)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {i: [float(i), None] for i in range(20)}
    assert scorer.unscorable == 20


@pytest.mark.parametrize(
    ("options", "word"),
    [({"timeout_s": 0}, "time limit"), ({"timeout_s": math.nan}, "time limit"), ({"on_error": "skip"}, "'skip'")],
)
def test_settings_out_of_range_are_refused(options, word):
    with pytest.raises(ConfigError, match=word):
        Scorer(raising, **{"timeout_s": 1.0, **options})


def test_what_is_neither_a_task_nor_a_function_is_refused():
    with pytest.raises(ConfigError, match="int"):
        Scorer(3, timeout_s=1)  # type: ignore[arg-type]
