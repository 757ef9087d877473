"""Learner.update on real (tiny) causal language models, micro-batches by token budget, and the parts it is made of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from vcpo import Batch, VarianceControl, core
from vcpo.errors import BatchError, ConfigError
from vcpo.forward import forward_logits
from vcpo.learner.clipping import GradientClip
from vcpo.learner.learner import Learner
from vcpo.learner.micro_batches import micro_batches
from vcpo.learner.optimizer import make_optimizer, schedule_factor


def llama(dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(dtype)


def lagged_batch(model, make_toy_batch):
    """Sampler log-probs of the model itself plus noise."""
    batch = make_toy_batch(lambda ids, mask: forward_logits(model, ids, mask).double(), groups=4)
    return Batch(
        **{**batch.__dict__, "sampler_logprobs": batch.sampler_logprobs.float(), "rewards": batch.rewards.float()}
    )


def learner_for(model, *, budget=10_000, lr=1e-2, loss="reinforce", loss_options=None, **settings):
    optimizer = make_optimizer(model, lr=lr)
    vc = VarianceControl(model, optimizer, **settings)
    return Learner(model, optimizer, vc, max_tokens_per_micro_batch=budget, loss=loss, loss_options=loss_options)


@pytest.mark.parametrize("norms", ["logit", "two_pass", "length", "loop", "exact"])
def test_the_token_budget_changes_memory_and_nothing_else(make_toy_batch, norms):
    reports = []
    for budget in (10_000, 45, 12):
        model = llama(torch.float64)
        batch = lagged_batch(model, make_toy_batch)
        reports.append(learner_for(model, budget=budget, score_norms=norms).update(batch))
    for report in reports[1:]:
        assert report.grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-6)
        assert report.ess_ratio == pytest.approx(reports[0].ess_ratio, rel=1e-6)
        assert report.loss == pytest.approx(reports[0].loss, rel=1e-5, abs=1e-8)


def test_training_on_good_answers_makes_them_likelier(make_toy_batch):
    model = llama()
    batch = lagged_batch(model, make_toy_batch)
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0] * 4)
    batch = Batch(**{**batch.__dict__, "rewards": rewards})

    def mean_logprob():
        with torch.no_grad():
            lp = core.token_logprobs(forward_logits(model, batch.input_ids, batch.attention_mask), batch.input_ids)
        return core.masked_mean(lp, batch.action_mask)

    before = mean_logprob()
    learner = learner_for(model)
    for _ in range(10):
        report = learner.update(batch)
    change = mean_logprob() - before
    assert float(change[rewards == 1].mean()) > float(change[rewards == 0].mean()) + 0.1
    assert report.policy_version == learner.policy_version == 10
    assert report.learner_s > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_in_bf16_or_fp32(make_toy_batch, dtype):
    model = llama(dtype)
    batch = lagged_batch(model, make_toy_batch)
    before = [p.detach().clone() for p in model.parameters()]
    for norms in ("logit", "two_pass", "exact"):
        report = learner_for(model, score_norms=norms, budget=60).update(batch)
        assert report.skipped is None
    assert all(p.dtype == dtype and bool(p.isfinite().all()) for p in model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_left_and_right_padding_give_the_same_update(make_toy_batch):
    norms = []
    for side in ("right", "left"):
        model = llama(torch.float64)
        batch = lagged_batch(model, make_toy_batch)
        if side == "left":
            shift = (batch.input_ids.shape[1] - batch.attention_mask.sum(1)).tolist()
            turned = {
                name: torch.stack([row.roll(k) for row, k in zip(getattr(batch, name), shift, strict=True)])
                for name in ("input_ids", "attention_mask", "action_mask", "sampler_logprobs")
            }
            batch = Batch(**{**batch.__dict__, **turned})
        norms.append(learner_for(model).update(batch))
    assert norms[0].grad_norm == pytest.approx(norms[1].grad_norm, rel=1e-6)
    assert norms[0].ess_ratio == pytest.approx(norms[1].ess_ratio, rel=1e-6)


def test_ppo_clip_goes_through_advantages_and_refuses_cut_groups(make_toy_batch):
    model = llama()
    batch = lagged_batch(model, make_toy_batch)
    report = learner_for(model, loss="ppo_clip", loss_options={"clip_high": 0.28}).update(batch)
    assert report.grad_norm > 0
    with pytest.raises(BatchError, match="every group must be whole"):
        learner_for(llama(), loss="ppo_clip", budget=20).update(batch)
    learner_for(llama(), loss="ppo_clip", budget=20, baseline="group_mean").update(batch)


def test_unknown_losses_and_misplaced_options_are_refused():
    model = llama()
    with pytest.raises(ConfigError, match="loss must be one of reinforce"):
        learner_for(model, loss="reinforcee")
    with pytest.raises(ConfigError, match="not from loss_options"):
        learner_for(model, loss_options={"cap": 3.0})


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    groups=st.data(),
    budget=st.integers(1, 200),
)
def test_micro_batches_cover_every_row_once_within_the_budget(sizes, groups, budget):
    ids = groups.draw(st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes)))
    parts = micro_batches(torch.tensor(sizes), torch.tensor(ids), max_tokens=budget)
    assert sorted(row for part in parts for row in part) == list(range(len(sizes)))
    for part in parts:
        assert len(part) == 1 or len(part) * max(sizes[r] for r in part) <= budget
    for group in set(ids):
        members = [r for r, g in enumerate(ids) if g == group]
        if len(members) * max(sizes[r] for r in members) <= budget:
            assert sum(bool(set(part) & set(members)) for part in parts) == 1


def test_running_median_clip_follows_the_norms():
    clip = GradientClip("running_median")
    for norm in (0.1, 0.2, 0.3, 0.2):
        clip.observe(norm)
        assert clip.bound() == 1.0
    clip.observe(float("nan"))
    assert clip.bound() == 1.0
    clip.observe(0.2)
    assert clip.bound() == pytest.approx(0.3)
    for _ in range(60):
        clip.observe(50.0)
    assert clip.bound() == 1.0
    assert GradientClip(None).bound() is None
    assert GradientClip(0.5).bound() == 0.5


def test_schedules_start_and_end_where_they_should():
    linear = schedule_factor("linear", warmup_steps=2, total_steps=10)
    assert [linear(s) for s in (0, 1, 2, 6)] == [0.5, 1.0, 1.0, 0.5]
    with pytest.raises(ConfigError, match="lr_schedule must be one of"):
        schedule_factor("exponential", warmup_steps=0, total_steps=1)
