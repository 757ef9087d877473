"""Do cheap score norms make as good a baseline as exact ones? On a pretrained model, with rollouts older than the learner.

For every prompt several groups are sampled by the policy as loaded; then the learner takes a few updates on other
prompts, so that the groups are that many versions old. Each trajectory's gradient is taken alone, and from all of them
follows what any baseline would have done: the group's gradient is G = sum_i w^_i (R_i - b_i) g_i / N, linear in g_i, so
inner products of the g_i are enough. They come from sketches (signed sums of coordinates, unbiased).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vcpo import core, score_norms
from vcpo.batch import Batch, collate
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
CAP = 8.0


def bench_proxies(
    model: Path,
    *,
    prompts: int = 10,
    groups: int = 5,
    members: int = 8,
    lag: int = 4,
    lr: float = 1e-5,
    max_new_tokens: int = 24,
    seed: int = 0,
    threads: int = 2,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Sample, update `lag` times, measure: per prompt the log weights, rewards, norms and sketched inner products."""
    torch.set_num_threads(threads)
    policy = load_policy(path=model, seed=seed)
    problems = addition(prompts + 2 * lag, seed)
    asked = sample(policy, problems[:prompts], groups=groups, members=members, tokens=max_new_tokens, seed=seed)
    report(f"sampled {sum(len(a) for a in asked)} groups; reward {mean_reward(asked):.2f}")
    trained = take_updates(
        policy, problems[prompts:], lag=lag, lr=lr, members=members, tokens=max_new_tokens, seed=seed
    )
    sketch = Sketch(sum(p.numel() for p in policy.model.parameters()), seed)
    found: list[dict[str, Tensor]] = []
    for number, own in enumerate(asked):
        found.append(measure(policy.model, collate(own, pad_token_id=policy.pad_token_id), sketch))
        report(f"prompt {number + 1} of {prompts}: mean |log w| {found[-1]['log_weights'].abs().mean():.2f}")
    settings = {"prompts": prompts, "groups": groups, "members": members, "lag": lag, "lr": lr, "cap": CAP}
    kept = [{k: v.tolist() for k, v in row.items() if k != "products"} for row in found]
    return {
        "settings": {**settings, "max_new_tokens": max_new_tokens, "sketch": SKETCH, "threads": threads},
        "updates": trained,
        "summary": summarise(found),
        "prompts": kept,
    }


def addition(count: int, seed: int) -> list[tuple[str, str]]:
    """One-digit sums of reasoning-gym as (question, answer)."""
    import reasoning_gym

    one_digit = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "allow_negation": False}
    data = reasoning_gym.create_dataset("chain_sum", size=count, seed=seed, **one_digit)
    return [(item["question"], str(item["answer"])) for item in data]


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


def take_updates(
    policy: Policy, problems: list[tuple[str, str]], *, lag: int, lr: float, members: int, tokens: int, seed: int
) -> list[dict[str, Any]]:
    """`lag` real updates, on policy, on other problems; what the last groups are measured under afterwards."""
    optimizer = make_optimizer(policy.model, lr=lr)
    learner = Learner(policy.model, optimizer, VarianceControl(policy.model, optimizer))
    found = []
    for step in range(lag):
        own = problems[2 * step : 2 * step + 2]
        asked = sample(policy, own, groups=1, members=members, tokens=tokens, seed=seed, first=10_000 + 2 * step)
        report = learner.update(collate([a[0] for a in asked], pad_token_id=policy.pad_token_id))
        found.append({k: getattr(report, k) for k in ("reward_mean", "ess_ratio", "lr_scale", "grad_norm")})
    policy.model.eval()
    return found


class Sketch:
    """Signed sums of a gradient's coordinates: <sketch(g), sketch(h)> is <g, h> on average over the signs."""

    def __init__(self, size: int, seed: int, dimensions: int = SKETCH) -> None:
        self._rows = -(-size // dimensions)
        generator = torch.Generator().manual_seed(seed)
        self._signs = torch.randint(0, 2, (self._rows, dimensions), generator=generator, dtype=torch.float32)
        self._signs.mul_(2).sub_(1)

    def __call__(self, gradients: dict[str, Tensor]) -> Tensor:
        """Parameter -> gradient; [dimensions] fp32."""
        flat = torch.cat([g.flatten() for g in gradients.values()])
        flat = nn.functional.pad(flat, (0, self._signs.numel() - len(flat))).view_as(self._signs)
        total = torch.zeros(flat.shape[1], dtype=flat.dtype)
        for row, signs in zip(flat, self._signs, strict=True):  # the sum stays in the cache
            total.addcmul_(row, signs.to(flat.dtype))
        return total


def measure(model: nn.Module, batch: Batch, sketch: Sketch) -> dict[str, Tensor]:
    """One prompt's trajectories [n]: rewards, log weights, exact, logit and length norms, groups, and [n, n] inner products."""
    with torch.no_grad():
        logits = forward_logits(model, batch.input_ids, batch.attention_mask)
        logprobs, score_sq = core.token_logprobs(logits, batch.input_ids, with_score_sq=True)
    sketches, squares = [], []
    for row in range(len(batch)):
        gradients = score_norms.trajectory_gradient(model, batch, row)
        squares.append(sum(float(torch.linalg.vector_norm(g)) ** 2 for g in gradients.values()))
        sketches.append(sketch(gradients))
    together = torch.stack(sketches)
    return {
        "rewards": batch.rewards.double(),
        "group_ids": batch.group_ids,
        "lengths": batch.action_lengths,
        "log_weights": core.trajectory_log_weights(logprobs, batch.sampler_logprobs, batch.action_mask).double(),
        "exact": torch.tensor(squares, dtype=torch.float64).sqrt(),
        "logit": score_norms.logit_norms(score_sq, batch.action_mask),
        "length": score_norms.length_norms(batch.action_mask),
        "products": (together @ together.t()).double(),
    }


def baselines(row: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every baseline that is compared, on one prompt's trajectories: name -> [n]."""
    r, lw, groups = row["rewards"], row["log_weights"], row["group_ids"]

    def optimal(norms: Tensor) -> Tensor:
        return core.optimal_baseline(r, lw, norms, groups)

    return {
        "exact": optimal(row["exact"]),
        "logit": optimal(row["logit"]),
        "length": optimal(row["length"]),
        "weights alone": optimal(torch.ones_like(r)),
        "exact, for the truncated weight": core.optimal_baseline(
            r, lw, row["exact"], groups, weights="estimator", cap=CAP
        ),
        "exact, leave one out": _without_own(row),
        "group mean": core.group_mean(r, groups),
        "group mean, leave one out": core.leave_one_out(r, groups),
        "none": torch.zeros_like(r),
    }


def _without_own(row: dict[str, Tensor]) -> Tensor:
    """The exact optimal baseline of the other members."""
    log_v = 2 * row["log_weights"] + 2 * row["exact"].log()
    found = torch.empty_like(row["rewards"])
    for i, group in enumerate(row["group_ids"].tolist()):
        others = (row["group_ids"] == group) & (torch.arange(len(found)) != i)
        found[i] = (log_v[others].softmax(0) * row["rewards"][others]).sum()
    return found


def variances(row: dict[str, Tensor]) -> dict[str, float]:
    """Trace of the covariance of a group's gradient under each baseline, over one prompt's groups (unbiased)."""
    weights = core.truncated_weights(row["log_weights"], CAP)
    groups = row["group_ids"].unique()
    own = (row["group_ids"][None, :] == groups[:, None]).double()
    found = {}
    for name, baseline in baselines(row).items():
        c = weights * (row["rewards"] - baseline) * own / own.sum(1, keepdim=True)
        products = c @ row["products"] @ c.t()
        k = len(groups)
        squares = products.diagonal().sum()
        found[name] = float(squares / k - (products.sum() - squares) / (k * (k - 1)))
    return found


def summarise(rows: list[dict[str, Tensor]], draws: int = 2000) -> dict[str, Any]:
    """Variances relative to the exact baseline's with 95 % intervals over prompts, and how well norms and baselines agree."""
    found = [variances(row) for row in rows]
    names = list(found[0])
    table = torch.tensor([[v[name] for name in names] for v in found], dtype=torch.float64)
    ratios = table.sum(0) / table[:, 0].sum()
    picks = torch.randint(len(rows), (draws, len(rows)), generator=torch.Generator().manual_seed(0))
    drawn = table[picks].sum(1)
    drawn = drawn / drawn[:, :1]
    low, high = drawn.quantile(0.025, dim=0), drawn.quantile(0.975, dim=0)
    weights = core.WeightMoments.from_log_weights(torch.cat([row["log_weights"] for row in rows]))
    return {
        "variance_over_exact": {
            name: {"ratio": float(ratios[i]), "low": float(low[i]), "high": float(high[i])}
            for i, name in enumerate(names)
        },
        "agreement": {name: agreement(rows, name) for name in ("logit", "length")},
        "ess_ratio": float(weights.ess_ratio),
        "ess_ratio_of_groups": [float(core.ess_ratio(row["log_weights"])) for row in rows],
        "reward": float(torch.cat([row["rewards"] for row in rows]).mean()),
        "tokens": float(torch.cat([row["lengths"] for row in rows]).double().mean()),
        "sketch_error": float(
            torch.cat([row["products"].diagonal().sqrt() / row["exact"] - 1 for row in rows]).abs().max()
        ),
    }


def agreement(rows: list[dict[str, Tensor]], name: str) -> dict[str, float]:
    """Correlation of log norms within a prompt, and how far the baseline moves in groups whose rewards differ."""
    exact = torch.cat([row["exact"].log() - row["exact"].log().mean() for row in rows])
    proxy = torch.cat([row[name].log() - row[name].log().mean() for row in rows])
    moved = torch.cat([(baselines(row)[name] - baselines(row)["exact"]).abs()[_mixed(row)] for row in rows])
    return {
        "correlation_of_log_norms": float(torch.corrcoef(torch.stack([exact, proxy]))[0, 1]),
        "baseline_moved_mean": float(moved.mean()) if len(moved) else 0.0,
        "baseline_moved_p95": float(moved.quantile(0.95)) if len(moved) else 0.0,
    }


def _mixed(row: dict[str, Tensor]) -> Tensor:
    return ~core.zero_variance(row["rewards"], row["group_ids"])
