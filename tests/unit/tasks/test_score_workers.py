"""Whatever a reward function does, its worker bounds it, and the next group is scored."""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from vcpo.errors import RewardError
from vcpo.tasks import Scorer, make_task
from vcpo.types import Prompt, Trajectory, TrajectoryGroup

sys.path.insert(0, str(Path(__file__).parent))  # workers import it by its name
hostile = importlib.import_module("hostile_scorers")
sys.path.pop(0)


@pytest.fixture(autouse=True)
def importable_elsewhere(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def group_of(*completions: str, **columns) -> TrajectoryGroup:
    made = tuple(Trajectory(i, (1,), (-0.5,), (0,), "stop", completion=c) for i, c in enumerate(completions))
    return TrajectoryGroup(7, Prompt("t/1", "question", columns), (3, 4), made, completed_version=2)


@pytest.fixture
def scorer_of():
    made = []

    def make(function, **options) -> Scorer:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            made.append(Scorer(function, **{"timeout_s": 10.0, "on_error": "unscorable", **options}))
        assert made[-1].isolated
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def rewards(scorer: Scorer, *completions: str, **columns) -> list[float | None]:
    return [t.reward for t in scorer.score_group(group_of(*completions, **columns)).trajectories]


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_scored_in_another_process_whatever_it_prints(scorer_of):
    scorer = scorer_of(hostile.fine)
    assert rewards(scorer, "a", "bcd") == [1.0, 3.0]
    (pid,) = rewards(scorer_of(hostile.where), "a")
    assert pid != os.getpid()


BOUNDED = {
    "loops": (hostile.loops, "timeout"),
    "hangs in C": (hostile.hangs_in_c, "timeout"),
    "evaluates 9**9**9**9": (hostile.power_evaluated, "timeout"),
    "waits": (hostile.waits, "timeout"),
    "fills memory": (hostile.fills_memory, "raised"),
    "leaves": (hostile.leaves, "died"),
    "calls exit": (hostile.calls_exit, "raised"),
    "segfaults": (hostile.segfaults, "died"),
    "closes everything": (hostile.closes_everything, "died"),
}


@pytest.mark.parametrize("case", BOUNDED)
def test_what_it_does_is_bounded_and_the_next_group_is_scored(scorer_of, case):
    function, kind = BOUNDED[case]
    scorer = scorer_of(function, memory_gb=1.0)
    assert rewards(scorer, "fine") == [1.0]  # imports are not on the clock of what follows
    scorer._workers._timeout_s = 0.5 if kind == "timeout" else 20.0
    assert rewards(scorer, "fine", "bad") == [None, None]
    assert scorer.errors == {kind: 1}
    assert rewards(scorer, "fine", "fine") == [1.0, 1.0]
    assert scorer.isolated


def test_what_it_started_ends_with_it(scorer_of, tmp_path):
    scorer = scorer_of(hostile.forks)
    pids = tmp_path / "pids"
    assert rewards(scorer, "fine", pids=str(pids)) == [1.0]
    scorer._workers._timeout_s = 1.0
    assert rewards(scorer, "bad", pids=str(pids)) == [None]
    started = [int(line) for line in pids.read_text().split()]
    assert len(started) == 2
    assert all(gone(pid) for pid in started)


def test_a_fork_that_comes_back_too_changes_nothing(scorer_of):
    scorer = scorer_of(hostile.comes_back_twice)
    assert rewards(scorer, "bad") == [1.0]
    assert rewards(scorer, "fine", "fine") == [1.0, 1.0]
    assert not scorer.errors


def test_closing_ends_the_worker(scorer_of):
    scorer = scorer_of(hostile.where)
    (pid,) = rewards(scorer, "a")
    assert alive(int(pid))
    scorer.close()
    assert gone(int(pid))


def test_a_trainer_that_was_killed_leaves_no_worker_behind(tmp_path):
    pid = os.fork()
    if pid == 0:
        try:
            scorer = Scorer(hostile.where, timeout_s=30)
            (own,) = rewards(scorer, "a")
            (tmp_path / "worker").write_text(str(int(own)))
        finally:
            os._exit(0)  # no close, no exit handlers
    os.waitpid(pid, 0)
    assert gone(int((tmp_path / "worker").read_text()))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (hostile.raises, ("raised KeyError: 'no such answer'", "hostile_scorers.py:")),
        (hostile.wrong_length, ("returned 1 rewards for 2 completions",)),
        (hostile.deep, ("as reward 0, not a number or None",)),
        (hostile.leaves, ("took its worker process down with it", "exit status 3")),
        (hostile.segfaults, ("SIGSEGV",)),
    ],
)
def test_failures_end_the_run_in_one_line(scorer_of, function, words):
    with pytest.raises(RewardError) as info:
        rewards(scorer_of(function, on_error="stop"), "bad", "bad")
    assert "\n" not in str(info.value)
    assert all(word in str(info.value) for word in ("(prompt 't/1')", *words))
    if function is hostile.raises:
        assert 'raise KeyError("no such answer")' in str(info.value.__cause__)


def test_what_no_worker_can_load_runs_here_and_says_so():
    for function in (lambda completions: [1.0], functools.partial(lambda completions: [1.0])):
        with pytest.warns(UserWarning, match=r"runs on a thread of the trainer.*module of its own"):
            scorer = Scorer(function, timeout_s=5)
        assert not scorer.isolated
        assert rewards(scorer, "a") == [1.0]


def test_a_module_that_only_the_trainer_has(monkeypatch):
    module = type(sys)("only_here")
    exec("def score(completions): return [2.0] * len(completions)", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    scorer = Scorer(module.score, timeout_s=5)
    with pytest.warns(UserWarning, match="No module named 'only_here'"):
        assert rewards(scorer, "a") == [2.0]
    assert not scorer.isolated


def test_columns_that_cannot_travel_are_named_in_one_line(scorer_of):
    with pytest.raises(RewardError, match="cannot be given its columns") as info:
        rewards(scorer_of(hostile.where, on_error="stop"), "a", thing=threading.Lock())
    assert "\n" not in str(info.value)


def test_several_workers_score_at_once(scorer_of):
    scorer = scorer_of(hostile.where, workers=2)
    found: list[float | None] = []
    threads = [threading.Thread(target=lambda: found.extend(rewards(scorer, "a"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert None not in found
    assert len(set(found)) <= 2


@pytest.mark.parametrize("name", ["countdown", "running_sums"])
def test_every_task_is_scored_in_a_worker(scorer_of, name):
    """Row 23 of the case list: an answer such as 9**9**9**9 is worth 0 within its time, and costs nobody else theirs."""
    task = make_task(name)
    scorer = scorer_of(task, timeout_s=30.0, on_error="stop")
    prompt = task.heldout_prompts(1)[0]
    texts = ("9**9**9**9", "(" * 150, "9" * 5000, "")
    made = tuple(Trajectory(i, (1,), (-0.5,), (0,), "stop", completion=t) for i, t in enumerate(texts))
    scored = scorer.score_group(TrajectoryGroup(0, prompt, (1,), made))
    assert [t.reward for t in scored.trajectories] == [0.0] * 4
    assert scorer.isolated


def test_coroutines_too(scorer_of):
    assert rewards(scorer_of(hostile.waits), "a", "b") == [1.0, 1.0]
    assert asyncio.iscoroutinefunction(hostile.waits)
