"""The whole of VCPO flat in one file: sample, lag, weigh, score, baseline, loss, scaled step. About a minute on one core.

A GRU learns to reverse four digits from the share of digits it got right. Batches are trained LAG updates after they were
sampled, as an asynchronous run would. Left out, to stay short: micro-batches, processes, checkpoints; `vcpo train` has them.

Run: python examples/02_flat_loop.py
"""

import argparse
from collections import deque

import torch
from torch import Tensor, nn

import vcpo
from vcpo import core

DIGITS, GO, LENGTH = 10, 10, 4
GROUPS, MEMBERS = 16, 8


class Policy(nn.Module):
    """Next-token logits [n, s, 11] of [n, s] token ids."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DIGITS + 1, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, DIGITS + 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.gru(self.embedding(ids))[0])


@torch.no_grad()
def rollout(policy: Policy, generator: torch.Generator) -> dict[str, Tensor]:
    """GROUPS prompts of four digits and `>`, MEMBERS answers each; log-probs recorded while sampling."""
    digits = torch.randint(0, DIGITS, (GROUPS, LENGTH), generator=generator).repeat_interleave(MEMBERS, 0)
    ids = torch.cat([digits, torch.full((len(digits), 1), GO)], 1)
    logprobs = torch.zeros(len(ids), LENGTH + 1)
    for _ in range(LENGTH):
        log_p = policy(ids)[:, -1].log_softmax(-1)
        token = torch.multinomial(log_p.exp(), 1, generator=generator)
        ids = torch.cat([ids, token], 1)
        logprobs = torch.cat([logprobs, log_p.gather(1, token)], 1)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, LENGTH + 1 :] = True
    rewards = (ids[:, LENGTH + 1 :] == digits.flip(1)).float().mean(1)
    groups = torch.arange(GROUPS).repeat_interleave(MEMBERS)
    return {"ids": ids, "sampler_logprobs": logprobs, "mask": mask, "rewards": rewards, "groups": groups}


def update(policy: Policy, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> dict[str, float]:
    """One step of VCPO (arXiv 2602.17616), every line of it."""
    mask, rewards, groups = batch["mask"], batch["rewards"], batch["groups"]
    logprobs, score_sq = core.token_logprobs(policy(batch["ids"]), batch["ids"], with_score_sq=True)

    # Importance weights: how much likelier the learner is to write each trajectory than the sampler was.
    log_weights = core.trajectory_log_weights(logprobs.detach(), batch["sampler_logprobs"], mask)
    weights = core.truncated_weights(log_weights, cap=8.0)

    # The baseline that minimises the variance of the off-policy gradient, from weights and score norms.
    score_norms = core.masked_sum(score_sq, mask).sqrt()
    baseline = core.optimal_baseline(rewards, log_weights, score_norms, groups)
    advantages = core.advantages(rewards, baseline, core.group_scale(rewards, groups))

    loss = -(weights * advantages * core.masked_mean(logprobs, mask)).mean()
    optimizer.zero_grad()
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0)

    # The step: as large as the number of trajectories that really carry the gradient allows.
    ess_ratio = float(core.ess_ratio(log_weights))
    scale = core.lr_scale(ess_ratio)
    if ess_ratio > 0 and torch.isfinite(grad_norm):
        with vcpo.scaled_lr(optimizer, scale):
            optimizer.step()
    return {"ess_ratio": ess_ratio, "lr_scale": scale, "grad_norm": float(grad_norm)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="20 steps only, for CI")
    parser.add_argument("--lag", type=int, default=8, help="updates between sampling a batch and training on it")
    parser.add_argument("--steps", type=int, default=800)
    options = parser.parse_args()
    steps = 20 if options.smoke else options.steps

    torch.set_num_threads(1)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)

    queue = deque(rollout(policy, generator) for _ in range(options.lag))
    for step in range(1, steps + 1):
        fresh = rollout(policy, generator)
        queue.append(fresh)
        report = update(policy, optimizer, queue.popleft())
        if step == 1 or step % (steps // 10) == 0:
            reward = float(fresh["rewards"].mean())
            print(f"step {step:4d}  reward {reward:.2f}  " + "  ".join(f"{k} {v:.2f}" for k, v in report.items()))


if __name__ == "__main__":
    main()
