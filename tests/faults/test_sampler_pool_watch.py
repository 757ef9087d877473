"""ProcessSamplerPool against samplers that misbehave in every way; the samplers are small scripts without a model."""

from __future__ import annotations

import os
import signal
import textwrap
import time

import pytest

from vcpo.errors import ConfigError, RolloutError
from vcpo.rollout import (
    GroupAborted,
    GroupCompleted,
    GroupRequest,
    GroupStarted,
    ProcessSamplerPool,
    SamplerRestarted,
    SamplingParams,
)

FAKE = '''
import json, os, select, signal, socket, sys, time
from vcpo.rollout.channel import JsonChannel
from vcpo.rollout.requests import GroupRequest, GroupResult
from vcpo.types import Trajectory

channel = JsonChannel(socket.socket(fileno=int(sys.argv[1])))
inbox = []
def read(wait=0.05):
    channel.wait(wait)
    inbox.extend(channel.receive())
    if channel.closed:
        sys.exit(0)
def result(request):
    members = [Trajectory(member=m, token_ids=(7,), sampler_logprobs=(-0.5,), policy_versions=(3,), finish_reason="stop")
               for m in range(request["num_generations"])]
    return GroupResult(request["group_id"], tuple(request["prompt_token_ids"]), tuple(members), 3, 3).to_json()
def complete(request):
    channel.send({"type": "started", "groups": [[request["group_id"], 3]]})
    channel.send({"type": "completed", "result": result(request)})
def first_life(name="marker"):
    """True in the first process that asks."""
    path = os.path.join(init["model_dir"], name)
    if os.path.exists(path):
        return False
    open(path, "w").close()
    return True
while not inbox:
    read()
init = inbox.pop(0)
'''


@pytest.fixture
def make_pool(tmp_path, monkeypatch):
    """make_pool(script, **options): a pool whose samplers run FAKE and then `script`."""
    pools = []

    def make(script, **options):
        (tmp_path / "fake_sampler.py").write_text(FAKE + textwrap.dedent(script))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        pool = ProcessSamplerPool(
            tmp_path, {}, SamplingParams(4), log_dir=tmp_path / "logs", child_module="fake_sampler", **options
        )
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pids = pool.pids
        pool.close()
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def requests(*group_ids, n=2):
    return [GroupRequest(group_id=g, prompt_token_ids=(1, 2), num_generations=n, seed=0) for g in group_ids]


def poll_until(pool, done, timeout_s=30.0):
    events, deadline = [], time.monotonic() + timeout_s
    while not done(events):
        assert time.monotonic() < deadline, f"nothing more than {events}"
        events += pool.poll(0.5)
    return events


def of(kind, events):
    return [e for e in events if isinstance(e, kind)]


WELL = """
    channel.send({"type": "ready"})
    while True:
        read()
        for message in inbox:
            if message["type"] == "submit":
                with open(os.path.join(init["model_dir"], f"got-{os.getpid()}"), "a") as file:
                    file.write(json.dumps([r["group_id"] for r in message["requests"]]) + "\\n")
                for request in message["requests"]:
                    complete(request)
        inbox.clear()
"""


def test_groups_are_started_and_completed_and_go_to_the_least_loaded_in_one_message_each(make_pool, tmp_path):
    pool = make_pool(WELL, num_samplers=2)
    pool.wait_ready(30)
    pool.submit(requests(0, n=6) + requests(1, 2, 3, n=2) + requests(4, n=1))
    assert pool.num_outstanding == 5
    events = poll_until(pool, lambda e: len(of(GroupCompleted, e)) == 5)
    assert pool.num_outstanding == 0
    where = {e.result.group_id: e.sampler for e in of(GroupCompleted, events)}
    assert where == {0: 0, 1: 1, 2: 1, 3: 1, 4: 0}
    assert {(e.group_id, e.policy_version, e.sampler) for e in of(GroupStarted, events)} == {
        (g, 3, s) for g, s in where.items()
    }
    assert sorted(p.read_text() for p in tmp_path.glob("got-*")) == ["[0, 4]\n", "[1, 2, 3]\n"]
    (first,) = [e.result for e in of(GroupCompleted, events) if e.result.group_id == 0]
    assert len(first.trajectories) == 6
    assert first.trajectories[0].policy_versions == (3,)
    assert pool.poll(0.0) == []


def test_killed_samplers_are_restarted_and_their_groups_dispatched_again(make_pool):
    pool = make_pool(
        """
        channel.send({"type": "ready"})
        first = first_life()
        while True:
            read()
            for message in inbox:
                for request in message["requests"]:
                    if not first or request["group_id"] == 0:
                        complete(request)
            inbox.clear()
        """
    )
    pool.submit(requests(0, 1, 2))
    events = poll_until(pool, lambda e: of(GroupCompleted, e))
    os.kill(pool.pids[0], signal.SIGKILL)
    events += poll_until(pool, lambda e: len(of(GroupCompleted, e)) == 2)
    (restart,) = of(SamplerRestarted, events)
    assert restart == SamplerRestarted(0, "killed by signal 9 (SIGKILL)", (1, 2))
    assert sorted(e.result.group_id for e in of(GroupCompleted, events)) == [0, 1, 2]


def test_a_silent_sampler_with_work_is_replaced_an_idle_one_is_not(make_pool):
    pool = make_pool(
        """
        channel.send({"type": "ready"})
        while not inbox:
            read()
        if first_life():
            time.sleep(1000)
        complete(inbox[0]["requests"][0])
        read(1000)
        """,
        silence_timeout_s=0.6,
    )
    pool.wait_ready(30)
    assert pool.poll(1.5) == [], "idle samplers may be silent"
    pool.submit(requests(5))
    events = poll_until(pool, lambda e: of(GroupCompleted, e))
    (restart,) = of(SamplerRestarted, events)
    assert restart.cause == "silent for 0.6 s with 1 groups in flight"
    assert restart.lost_group_ids == (5,)


def test_heartbeats_are_signs_of_life(make_pool):
    pool = make_pool(
        """
        channel.send({"type": "ready"})
        while not inbox:
            read()
        for _ in range(20):
            time.sleep(0.1)
            channel.send({"type": "heartbeat"})
        complete(inbox[0]["requests"][0])
        read(1000)
        """,
        silence_timeout_s=1.0,
    )
    pool.submit(requests(5))
    assert not of(SamplerRestarted, poll_until(pool, lambda e: of(GroupCompleted, e)))


def test_a_coordinator_that_was_busy_reads_before_it_judges(make_pool):
    pool = make_pool(WELL, silence_timeout_s=0.5)
    pool.wait_ready(30)
    pool.submit(requests(0))
    time.sleep(1.5)  # an update of the learner: nobody polls
    assert [type(e) for e in pool.poll(5.0)] == [GroupStarted, GroupCompleted]


def test_restarts_end_with_the_samplers_own_traceback(make_pool, tmp_path):
    pool = make_pool(
        """
        channel.send({"type": "ready"})
        while not inbox:
            read()
        channel.send({"type": "error", "traceback": "Traceback: division of the seas"})
        sys.exit(7)
        """,
        max_restarts=2,
    )
    pool.submit(requests(0, 1))
    events = []
    with pytest.raises(RolloutError) as caught:
        events += poll_until(pool, lambda _: False)
    first, rest = str(caught.value).split("\n", 1)
    assert first == (
        f"sampler 0 died 3 times (max_restarts=2), last: exit code 7; its log is {tmp_path / 'logs' / 'sampler_0.log'}"
    )
    assert rest == "Traceback: division of the seas"
    with pytest.raises(RolloutError, match="sampler 0 died 3 times"):
        pool.poll(0.0)
    with pytest.raises(RolloutError, match="sampler 0 died 3 times"):
        pool.submit(requests(9))


def test_without_a_traceback_of_its_own_the_end_of_stderr_is_shown_of_the_last_life_only(make_pool):
    pool = make_pool(
        """
        print("first life" if first_life() else "terminate called after throwing", file=sys.stderr, flush=True)
        channel.send({"type": "ready"})
        os.abort()
        """,
        max_restarts=1,
    )
    with pytest.raises(RolloutError) as caught:
        poll_until(pool, lambda _: False)
    first, rest = str(caught.value).split("\n", 1)
    assert "died 2 times (max_restarts=1), last: killed by signal 6 (SIGABRT)" in first
    assert "terminate called" in rest
    assert "first life" not in rest


def test_a_sampler_that_cannot_start_is_not_tried_again(make_pool):
    pool = make_pool(
        """
        channel.send({"type": "error", "traceback": "OSError: no such model"})
        sys.exit(1)
        """
    )
    with pytest.raises(
        RolloutError, match=r"sampler 0 died while starting, last: exit code 1; .*\nOSError: no such model"
    ):
        pool.wait_ready(30)


def test_a_sampler_that_never_gets_ready(make_pool):
    pool = make_pool("time.sleep(1000)", startup_timeout_s=0.5, max_restarts=0)
    with pytest.raises(RolloutError, match=r"died 1 time \(max_restarts=0\), last: not ready after 0.5 s"):
        pool.wait_ready(30)
    slow = make_pool("while inbox or not channel.closed:\n    read()")  # never ready, but it ends when told to
    with pytest.raises(RolloutError, match=r"sampler 0 is not ready after 0\.2 s; its log is"):
        slow.wait_ready(0.2)


def test_a_sampler_that_reads_nothing_cannot_block_the_coordinator(make_pool):
    pool = make_pool('channel.send({"type": "ready"})\ntime.sleep(1000)', silence_timeout_s=1.0, max_restarts=0)
    pool.wait_ready(30)
    long_prompt = tuple(range(100_000))
    for group_id in range(10):  # megabytes: far more than a socket takes
        pool.submit([GroupRequest(group_id=group_id, prompt_token_ids=long_prompt, num_generations=1, seed=0)])
    with pytest.raises(RolloutError, match="silent for 1 s with 10 groups in flight"):
        poll_until(pool, lambda _: False)


ABORTS = """
    channel.send({"type": "ready"})
    held = {}
    while True:
        read()
        for message in inbox:
            if message["type"] == "submit":
                held.update((r["group_id"], r) for r in message["requests"])
            else:
                if 9 in message["group_ids"]:
                    os.kill(os.getpid(), signal.SIGKILL)
                if 2 in message["group_ids"]:
                    complete(held.pop(2))  # it was done before it heard of the abort
                for group_id in message["group_ids"]:
                    if group_id in held:
                        channel.send({"type": "aborted", "request": held.pop(group_id)})
        inbox.clear()
"""


def test_every_aborted_group_comes_back_exactly_once(make_pool):
    pool = make_pool(ABORTS)
    pool.submit(requests(0, 1, 2, 3))
    assert pool.abort([0, 2, 77]) == [0, 2]
    assert pool.abort([0, 2]) == []
    assert pool.num_outstanding == 4
    events = poll_until(pool, lambda e: len(e) == 2)
    assert [type(e) for e in events] == [GroupAborted] * 2
    partial = {e.request.group_id: len(e.request.partial) for e in events}
    assert partial == {0: 0, 2: 2}
    assert pool.num_outstanding == 2
    pool.submit(requests(0))  # it may be asked for again now
    with pytest.raises(RolloutError, match="group 3 is with a sampler already"):
        pool.submit(requests(3))
    assert pool.num_outstanding == 3


def test_a_sampler_that_dies_on_an_abort_still_answers_it_through_the_pool(make_pool):
    pool = make_pool(ABORTS)
    pool.submit(requests(8, 9))
    assert pool.abort([9]) == [9]
    events = poll_until(pool, lambda e: of(SamplerRestarted, e))
    assert [e.request.group_id for e in of(GroupAborted, events)] == [9]
    (restart,) = of(SamplerRestarted, events)
    assert restart.lost_group_ids == (8,)
    assert pool.num_outstanding == 1


def test_close_is_bounded_even_for_a_sampler_that_will_not_end(make_pool):
    pool = make_pool(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        channel.send({"type": "ready"})
        while True:
            time.sleep(1000)
        """
    )
    pool.wait_ready(30)
    (pid,) = pool.pids
    began = time.monotonic()
    pool.close(timeout_s=0.3)
    pool.close()
    assert time.monotonic() - began < 20
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    for call in (lambda: pool.poll(0), lambda: pool.submit(requests(0)), lambda: pool.abort([0]), pool.wait_ready):
        with pytest.raises(RolloutError, match="the sampler pool is closed"):
            call()


def test_bad_arguments_start_nothing(make_pool):
    for options, message in [
        ({"num_samplers": 0}, "num_samplers must be at least 1, got 0"),
        ({"threads_per_sampler": 0}, "threads_per_sampler must be at least 1"),
        ({"max_restarts": -1}, "max_restarts must be at least 0, got -1"),
        ({"silence_timeout_s": 0}, "silence_timeout_s must be a positive number"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make_pool(WELL, **options)
