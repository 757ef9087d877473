"""Real sampler processes: killed, updated in flight, unable to start, orphaned. Few tests: each child takes seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vcpo.errors import RolloutError
from vcpo.rollout import (
    EmbeddedEngine,
    GroupCompleted,
    GroupRequest,
    GroupStarted,
    ProcessSamplerPool,
    SamplerRestarted,
    SamplingParams,
)
from vcpo.weight_sync import make_publisher

LONG = SamplingParams(max_new_tokens=600)  # without a stop token: long enough to be interrupted
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=13, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=2048, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model_dir(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    model.save_pretrained(folder)
    return folder


def requests(*group_ids):
    return [GroupRequest(group_id=g, prompt_token_ids=(3, 4, 5 + g % 3), num_generations=2, seed=0) for g in group_ids]


def poll_until(pool, done):
    events, deadline = [], time.monotonic() + TIMEOUT_S
    while not done(events):
        assert time.monotonic() < deadline, f"nothing more than {events}"
        events += pool.poll(1.0)
    return events


def of(kind, events):
    return [e for e in events if isinstance(e, kind)]


def wait_for_end(pid):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} did not end")


def test_case_16_a_killed_sampler_is_restarted_and_completes_what_an_undisturbed_one_would(model, model_dir, tmp_path):
    """kill -9, in the middle of generation: same tokens and log-probs, bit for bit, as in this process (law 3)."""
    engine = EmbeddedEngine(model, LONG, pad_token_id=0)
    engine.submit(requests(0, 1, 2))
    want = {}
    while engine.num_active:
        want |= {r.group_id: r for r in engine.step()}
    publisher = make_publisher("shared_memory", tmp_path, dict(model.named_parameters()))
    publisher.publish(dict(model.named_parameters()), 0)
    with ProcessSamplerPool(model_dir, publisher.address(), LONG, log_dir=tmp_path, max_restarts=1) as pool:
        pool.submit(requests(0, 1, 2))
        poll_until(pool, lambda e: of(GroupStarted, e))
        os.kill(pool.pids[0], signal.SIGKILL)
        events = poll_until(pool, lambda e: len(of(GroupCompleted, e)) == 3)
        (restart,) = of(SamplerRestarted, events)
        assert restart == SamplerRestarted(0, "killed by signal 9 (SIGKILL)", (0, 1, 2))
        assert {e.result.group_id: e.result for e in of(GroupCompleted, events)} == want

        # In-flight weights: published while the next groups are being written.
        pool.submit(requests(5))
        poll_until(pool, lambda e: of(GroupStarted, e))
        os.kill(pool.pids[0], signal.SIGINT)  # what Ctrl-C would send: it is the coordinator's to handle
        publisher.publish({n: p.detach() * 1.5 for n, p in model.named_parameters()}, 4)
        (done,) = of(GroupCompleted, poll_until(pool, lambda e: of(GroupCompleted, e)))
        assert (done.result.started_version, done.result.completed_version) == (0, 4)
        for t in done.result.trajectories:
            assert list(t.policy_versions) == sorted(t.policy_versions)
            assert set(t.policy_versions) == {0, 4}

        # Idle while version 5 is published: it must be in use for the first token of what is submitted after it.
        publisher.publish(dict(model.named_parameters()), 5)
        pool.submit(requests(6))
        started = of(GroupStarted, poll_until(pool, lambda e: of(GroupStarted, e)))
        assert [(e.group_id, e.policy_version) for e in started] == [(6, 5)]

        os.kill(pool.pids[0], signal.SIGKILL)
        with pytest.raises(RolloutError, match=r"sampler 0 died 2 times \(max_restarts=1\), last: killed by signal 9"):
            poll_until(pool, lambda _: False)


def test_a_sampler_that_cannot_load_its_model_ends_the_run_with_its_own_traceback(tmp_path):
    with ProcessSamplerPool(tmp_path / "nowhere", {}, LONG, log_dir=tmp_path) as pool:
        with pytest.raises(RolloutError) as caught:
            pool.wait_ready(TIMEOUT_S)
        first, rest = str(caught.value).split("\n", 1)
        assert first.startswith("sampler 0 died while starting, last: exit code 1; its log is ")
        assert rest.startswith("Traceback (most recent call last):")
        assert rest.endswith(f"ConfigError: the model folder {tmp_path / 'nowhere'} does not exist")


ORPHAN = """
import sys, time
from vcpo.rollout import GroupRequest, ProcessSamplerPool, SamplingParams
from vcpo.weight_sync import open_reader
import json
model_dir, address, log_dir = sys.argv[1:]
pool = ProcessSamplerPool(model_dir, json.loads(address), SamplingParams(1000), log_dir=log_dir)
pool.submit([GroupRequest(group_id=0, prompt_token_ids=(3,), num_generations=64, seed=0)])
while not pool.poll(1.0):
    pass
print(*pool.pids, flush=True)
time.sleep(1000)
"""


def test_samplers_end_with_a_coordinator_that_was_killed(model, model_dir, tmp_path):
    publisher = make_publisher("safetensors", tmp_path, dict(model.named_parameters()))
    publisher.publish(dict(model.named_parameters()), 0)
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(model_dir), json.dumps(publisher.address()), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_for_end(pid)


def test_a_sampler_that_hangs_inside_a_step_ends_with_its_coordinator_too():
    """It never looks at its socket again; a thread of its own watches the coordinator."""
    code = "import time, vcpo.rollout.sampler_process as s; s._end_with_parent(2**30); time.sleep(1000)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
