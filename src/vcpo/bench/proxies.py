"""Do cheap score norms make as good a baseline as exact ones? On a pretrained model, with rollouts older than the learner.

For every prompt several groups are sampled by the policy as loaded; then the learner takes a few updates on other
prompts, so that the groups are that many versions old; and again, so that the same groups are older still. Each
trajectory's gradient is taken alone, and from all of them follows what any baseline would have done: the group's
gradient is G = sum_i w^_i (R_i - b_i) g_i / N, linear in g_i, so inner products of the g_i are enough. They come from
sketches (signed sums of coordinates, unbiased).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vcpo import core, score_norms
from vcpo.batch import Batch, collate
from vcpo.bench.proxies_summary import CAP, summarise
from vcpo.errors import ConfigError
from vcpo.forward import forward_logits
from vcpo.learner.learner import Learner
from vcpo.learner.optimizer import make_optimizer
from vcpo.learner.variance_control import VarianceControl
from vcpo.policy import Policy, load_policy
from vcpo.rollout.engine import EmbeddedEngine
from vcpo.rollout.requests import GroupRequest, SamplingParams
from vcpo.types import Prompt, TrajectoryGroup

SKETCH = 2**20
"""Dimensions of a sketch; the relative error of an inner product is about 1 / 1000 of the product of norms."""


def bench_proxies(
    model: Path,
    *,
    prompts: int = 12,
    groups: int = 6,
    members: int = 8,
    lag: int | Sequence[int] = (3, 8),
    lr: float = 1e-5,
    max_new_tokens: int = 24,
    seed: int = 0,
    threads: int = 1,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Sample once; after each number of updates in `lag` measure the same trajectories anew.

    Per lag: the updates taken, a summary (`proxies_summary.summarise`), and per prompt the rewards, log weights (nats),
    norms and gradient variances. ConfigError when no group has rewards that differ: there is nothing to compare then.
    """
    lags = sorted({lag} if isinstance(lag, int) else set(lag))
    torch.set_num_threads(threads)
    policy = load_policy(path=model, seed=seed)
    problems = addition(prompts + 2 * max(lags), seed)
    asked = sample(policy, problems[:prompts], groups=groups, members=members, tokens=max_new_tokens, seed=seed)
    mixed = sum(len({t.reward for t in group.trajectories}) > 1 for own in asked for group in own)
    report(
        f"sampled {prompts * groups} groups, {mixed} of them with rewards that differ; reward {mean_reward(asked):.2f}"
    )
    if not mixed:
        raise ConfigError(f"no group of {prompts} prompts has rewards that differ: ask for more prompts or groups")
    updates = Updates(policy, problems[prompts:], lr=lr, members=members, tokens=max_new_tokens, seed=seed)
    sketch = Sketch(sum(p.numel() for p in policy.model.parameters()), seed)
    found = []
    for versions in lags:
        updates.until(versions)
        rows = []
        for number, own in enumerate(asked):
            rows.append(measure(policy.model, collate(own, pad_token_id=policy.pad_token_id), sketch))
            spread = rows[-1]["log_weights"].abs().mean()
            report(f"lag {versions}, prompt {number + 1} of {prompts}: mean |log w| {spread:.2f}")
        found.append({"lag": versions, "updates": updates.taken[:versions], **summarise(rows)})
    settings = {"prompts": prompts, "groups": groups, "members": members, "lag": lags, "lr": lr, "cap": CAP}
    return {
        "settings": {**settings, "max_new_tokens": max_new_tokens, "sketch": SKETCH, "threads": threads},
        "mixed_groups": mixed,
        "lags": found,
    }


def addition(count: int, seed: int) -> list[tuple[str, str]]:
    """One-digit additions of reasoning-gym's chain_sum as (question, answer); its subtractions are passed over."""
    import reasoning_gym

    one_digit = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "allow_negation": False}
    data = reasoning_gym.create_dataset("chain_sum", size=4 * count + 32, seed=seed, **one_digit)
    sums = [(item["question"], str(item["answer"])) for item in data if "+" in item["metadata"]["expression"]]
    return sums[:count]


def sample(
    policy: Policy,
    problems: list[tuple[str, str]],
    *,
    groups: int,
    members: int,
    tokens: int,
    seed: int,
    first: int = 0,
) -> list[list[TrajectoryGroup]]:
    """`groups` scored groups for each problem, with the policy as it is now."""
    params = SamplingParams(max_new_tokens=tokens, temperature=1.0, stop_token_ids=(policy.eos_token_id,))
    found: list[list[TrajectoryGroup]] = []
    for number, (question, answer) in enumerate(problems):
        engine = EmbeddedEngine(policy.model, params, pad_token_id=policy.pad_token_id)
        text = policy.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        ids = tuple(policy.tokenizer.encode(str(text), add_special_tokens=False))
        base = first + number * groups
        asked = [
            GroupRequest(group_id=base + k, prompt_token_ids=ids, num_generations=members, seed=seed)
            for k in range(groups)
        ]
        engine.submit(asked)
        done = []
        while engine.num_active:
            done += engine.step()
        prompt = Prompt(f"addition-{base}", question, {"answer": answer})
        found.append([_scored(policy, result, prompt) for result in sorted(done, key=lambda r: r.group_id)])
    return found


def _scored(policy: Policy, result: Any, prompt: Prompt) -> TrajectoryGroup:
    rows = []
    for t in result.trajectories:
        text = str(policy.tokenizer.decode(t.token_ids, skip_special_tokens=True))
        numbers = re.findall(r"-?\d+", text)
        rows.append(
            replace(t, completion=text, reward=float(bool(numbers) and numbers[-1] == prompt.columns["answer"]))
        )
    return TrajectoryGroup(
        group_id=result.group_id,
        prompt=prompt,
        prompt_token_ids=result.prompt_token_ids,
        trajectories=tuple(rows),
    )


def mean_reward(asked: list[list[TrajectoryGroup]]) -> float:
    rewards = [t.reward for own in asked for group in own for t in group.trajectories]
    return sum(r for r in rewards if r is not None) / len(rewards)


class Updates:
    """Real updates of the policy, on policy, on two other problems each: what makes the groups old."""

    def __init__(
        self, policy: Policy, problems: list[tuple[str, str]], *, lr: float, members: int, tokens: int, seed: int
    ) -> None:
        optimizer = make_optimizer(policy.model, lr=lr)
        self.taken: list[dict[str, Any]] = []
        """What each update reported."""
        self._learner = Learner(policy.model, optimizer, VarianceControl(policy.model, optimizer))
        self._policy, self._problems = policy, problems
        self._sampling = {"groups": 1, "members": members, "tokens": tokens, "seed": seed}

    def until(self, count: int) -> None:
        """Go on until `count` updates have been taken; the model is in eval mode afterwards."""
        for step in range(len(self.taken), count):
            own = self._problems[2 * step : 2 * step + 2]
            asked = sample(self._policy, own, first=10_000 + 2 * step, **self._sampling)
            report = self._learner.update(collate([a[0] for a in asked], pad_token_id=self._policy.pad_token_id))
            self.taken.append({k: getattr(report, k) for k in ("reward_mean", "ess_ratio", "lr_scale", "grad_norm")})
        self._policy.model.zero_grad(set_to_none=True)
        self._policy.model.eval()


class Sketch:
    """Signed sums of a gradient's coordinates: <sketch(g), sketch(h)> is <g, h> on average over the signs."""

    def __init__(self, size: int, seed: int, dimensions: int = SKETCH) -> None:
        self._size, self._rows = size, -(-size // dimensions)
        generator = torch.Generator().manual_seed(seed)
        self._signs = torch.randint(0, 2, (self._rows, dimensions), generator=generator, dtype=torch.float32)
        self._signs.mul_(2).sub_(1)
        self._flat = torch.zeros(0)  # one buffer for all gradients: fresh pages cost as much as the sums

    def __call__(self, gradients: dict[str, Tensor]) -> Tensor:
        """Parameter -> gradient; [dimensions] of the gradients' type."""
        parts = [g.flatten() for g in gradients.values()]
        if self._flat.dtype != parts[0].dtype or not len(self._flat):
            self._signs = self._signs.to(parts[0].dtype)
            self._flat = torch.zeros(self._signs.numel(), dtype=parts[0].dtype)
        torch.cat(parts, out=self._flat[: self._size])
        total = torch.zeros_like(self._signs[0])
        for row, signs in zip(self._flat.view_as(self._signs), self._signs, strict=True):  # the sum stays in the cache
            total.addcmul_(row, signs)
        return total


def measure(model: nn.Module, batch: Batch, sketch: Sketch) -> dict[str, Tensor]:
    """One prompt's trajectories [n]: rewards, log weights, exact, logit and length norms, groups, and [n, n] inner products.

    A group whose rewards are all 0 gives no gradient under any baseline: its exact norms are NaN, its products 0.
    """
    with torch.no_grad():
        logits = forward_logits(model, batch.input_ids, batch.attention_mask)
        logprobs, score_sq = core.token_logprobs(logits, batch.input_ids, with_score_sq=True)
    rewarded = torch.isin(batch.group_ids, batch.group_ids[batch.rewards != 0])
    exact = torch.full((len(batch),), torch.nan, dtype=torch.float64)
    sketches: dict[int, Tensor] = {}
    for row in rewarded.nonzero().flatten().tolist():
        gradients = score_norms.trajectory_gradient(model, batch, row)
        exact[row] = sum(float(torch.linalg.vector_norm(g)) ** 2 for g in gradients.values()) ** 0.5
        sketches[row] = sketch(gradients)
    products = torch.zeros(len(batch), len(batch), dtype=torch.float64)
    if sketches:
        together, own = torch.stack(list(sketches.values())), torch.tensor(list(sketches))
        products[own[:, None], own] = (together @ together.t()).double()
    return {
        "rewards": batch.rewards.double(),
        "group_ids": batch.group_ids,
        "lengths": batch.action_lengths,
        "log_weights": core.trajectory_log_weights(logprobs, batch.sampler_logprobs, batch.action_mask).double(),
        "exact": exact,
        "logit": score_norms.logit_norms(score_sq, batch.action_mask),
        "length": score_norms.length_norms(batch.action_mask),
        "products": products,
    }
