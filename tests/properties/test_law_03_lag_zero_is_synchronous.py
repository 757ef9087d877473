"""Law 3: max_policy_lag = 0 gives the same parameters as the synchronous loop, bit for bit."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def fakes() -> ModuleType:
    """The parts of tests/pipeline/fakes.py."""
    name = "vcpo_pipeline_fakes"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "pipeline" / "fakes.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.mark.parametrize("slots", [1, 3, 100])
def test_lag_zero_equals_the_synchronous_loop(fakes, slots):
    """The fake learner's weights are a hash of all it ever trained, tokens and versions and order included."""
    sync, lag_zero = fakes.World(), fakes.World(pool_options={"slots": slots})
    sync.run_sync(steps=12, groups_per_batch=4)
    lag_zero.run_async(steps=12, groups_per_batch=4, max_policy_lag=0)
    assert lag_zero.learner.weights == sync.learner.weights
    assert lag_zero.trained_ids == sync.trained_ids
    assert lag_zero.pool.submits == sync.trained_ids  # each optimizer batch was one generation batch
    timing = {name for name in sync.rows[0] if name.endswith("_s")} | {"reward_current"}
    for a, b in zip(sync.rows, lag_zero.rows, strict=True):
        assert {n: v for n, v in a.items() if n not in timing} == {n: v for n, v in b.items() if n not in timing}


def test_replay_at_lag_zero_is_the_synchronous_loop(fakes):
    sync, replay = fakes.World(), fakes.World()
    sync.run_sync(steps=5)
    replay.run_replay(steps=5, policy_lag=0)
    assert replay.learner.weights == sync.learner.weights


def test_lag_one_is_another_run(fakes):
    """The comparison can tell: one version of lag gives other weights."""
    sync, lag_one = fakes.World(), fakes.World()
    sync.run_sync(steps=5)
    lag_one.run_async(steps=5, max_policy_lag=1)
    assert lag_one.learner.weights != sync.learner.weights


def test_lag_zero_holds_with_skipped_steps_and_with_replaced_groups(fakes):
    options = {"pool_options": {"fate": lambda group_id, member, attempt: "failed" if group_id == 5 else "stop"}}
    first, second = (fakes.World(learner=fakes.Learner(skip=frozenset({2})), **options) for _ in range(2))
    for world in (first, second):
        result = world.run_async(steps=5, max_policy_lag=0)
        assert result.counts.dropped_total == 1
        assert result.counts.trained == 20
        assert all(r["policy_lag_max"] == 0 for r in world.rows)
    assert first.learner.weights == second.learner.weights


# ---- the same with a real model, engine and learner ----


@pytest.fixture(scope="module")
def policy():
    from vcpo.policy import load_policy

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return load_policy(architecture={"model_type": "llama", **sizes}, tokenizer="characters", alphabet="0123456789>")


class EnginePool:
    """Samplers in this process: an engine with weights of its own, which it takes from the publisher between steps."""

    def __init__(self, engine, publisher):
        self.engine, self.publisher, self.outstanding = engine, publisher, 0

    @property
    def num_outstanding(self):
        return self.outstanding

    def submit(self, requests):
        self.outstanding += len(requests)
        self.engine.submit(requests)

    def poll(self, timeout_s):
        from vcpo.rollout.pool import GroupCompleted, GroupStarted

        if not self.engine.num_active:
            return []
        if self.engine.policy_version != self.publisher.version:
            self.engine.load_weights(self.publisher.weights, self.publisher.version)
        results = self.engine.step()
        self.outstanding -= len(results)
        started = [GroupStarted(group_id, version, 0) for group_id, version in self.engine.started()]
        return [*started, *(GroupCompleted(result, 0) for result in results)]

    def abort(self, group_ids):
        return []

    def close(self): ...


class CopyingPublisher:
    """Keeps the newest weights, as a file or shared memory would: later changes of the model do not show."""

    def publish(self, named, policy_version):
        self.weights = {name: weight.detach().clone() for name, weight in named.items()}
        self.version = policy_version


def real_parts(policy, publisher, rows):
    """Parts around a copy of the policy; the reward counts even digits, so that there is something to learn."""
    import copy
    import itertools

    import torch

    from vcpo.batch import collate
    from vcpo.learner.learner import Learner
    from vcpo.learner.optimizer import make_optimizer
    from vcpo.learner.variance_control import VarianceControl
    from vcpo.pipeline import Parts
    from vcpo.types import Prompt

    torch.set_num_threads(1)
    model = copy.deepcopy(policy.model)
    optimizer = make_optimizer(model, lr=1e-2)

    class Port(Learner):
        def named_weights(self):
            return dict(self.model.named_parameters())

    class Scorer:
        def score_group(self, group):
            return group.with_rewards([float(sum(c in "02468" for c in t.completion)) for t in group.trajectories])

    class Sink:
        def write(self, row):
            rows.append(row)

        def close(self): ...

    return model, Parts(
        prompts=(Prompt(f"p/{i}", f"{i % 10}>") for i in itertools.count()),
        scorer=Scorer(),
        learner=Port(model, optimizer, VarianceControl(model, optimizer)),
        make_batch=lambda groups, version: collate(
            groups, pad_token_id=policy.pad_token_id, policy_version=version, temperature=1.0
        ),
        publisher=publisher,
        sinks=[Sink()],
    )


def real_run(policy, max_policy_lag):
    """Parameters and rows after 4 updates; max_policy_lag None: the synchronous loop."""
    import copy
    from functools import partial

    from vcpo.pipeline import RolloutParts, VersionStamp, run_async, run_sync
    from vcpo.rollout import EmbeddedEngine, SamplingParams, collect_groups, encode_prompt, to_trajectory_group

    rows = []
    params = SamplingParams(max_new_tokens=8, stop_token_ids=(policy.eos_token_id,))
    sizes = {"steps": 4, "groups_per_batch": 3}
    publisher = CopyingPublisher()
    model, parts = real_parts(policy, publisher, rows)
    if max_policy_lag is None:
        engine = EmbeddedEngine(model, params, pad_token_id=policy.pad_token_id)
        object.__setattr__(parts, "publisher", VersionStamp(engine))
        run_sync(parts, partial(collect_groups, engine, policy.tokenizer, num_generations=4, seed=5), **sizes)
    else:
        engine = EmbeddedEngine(copy.deepcopy(policy.model), params, pad_token_id=policy.pad_token_id)
        rollout = RolloutParts(
            pool=EnginePool(engine, publisher),
            encode=lambda prompt: encode_prompt(policy.tokenizer, prompt, 8),
            decode=partial(to_trajectory_group, policy.tokenizer),
            num_generations=4,
            seed=5,
        )
        run_async(parts, rollout, max_policy_lag=max_policy_lag, stall_timeout_s=60, **sizes)
    return dict(model.named_parameters()), rows


def test_lag_zero_equals_the_synchronous_loop_with_a_real_model(policy):
    import torch

    sync, sync_rows = real_run(policy, None)
    lag_zero, rows = real_run(policy, 0)
    lag_two, _ = real_run(policy, 2)
    assert sync_rows[0]["reward_mean"] > 0
    assert [r["reward_mean"] for r in rows] == [r["reward_mean"] for r in sync_rows]
    assert [r["grad_norm"] for r in rows] == [r["grad_norm"] for r in sync_rows]
    for name, weight in sync.items():
        assert torch.equal(lag_zero[name], weight), name
    assert any(not torch.equal(lag_two[name], weight) for name, weight in sync.items())  # the comparison can tell
