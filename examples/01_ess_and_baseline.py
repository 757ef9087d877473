"""Effective sample size and the optimal baseline on plain numbers: no model, no trainer.

Run: python examples/01_ess_and_baseline.py
"""

import argparse

import torch

from vcpo import core


def bar(share: float) -> str:
    return "#" * round(40 * share)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).add_argument(
        "--smoke", action="store_true", help="CI's mode: the same, it is short"
    )

    print("1. How many trajectories is this batch of 64 worth? Log weights with growing spread, as policy lag grows:")
    g = torch.Generator().manual_seed(0)
    noise = torch.randn(64, generator=g, dtype=torch.float64)
    for spread in (0.0, 0.5, 1.0, 2.0, 4.0):
        log_weights = spread * noise
        ratio = float(core.ess_ratio(log_weights))
        scale = core.lr_scale(ratio)
        print(f"   sd {spread:3.1f}   ess {64 * ratio:5.1f} of 64   lr x {scale:.2f}   {bar(ratio)}")

    print("\n2. One outlier owns the batch, and truncation hides it:")
    log_weights = torch.zeros(64, dtype=torch.float64)
    log_weights[0] = 12.0
    truncated = core.truncated_weights(log_weights, 8.0).log()
    print(
        f"   raw ess_ratio {float(core.ess_ratio(log_weights)):.3f}   after truncation at 8: {float(core.ess_ratio(truncated)):.3f}"
    )

    print("\n3. Bad numbers shrink the step, never enlarge it:")
    broken = torch.tensor([0.0, 0.0, float("nan"), float("inf")], dtype=torch.float64)
    ratio = float(core.ess_ratio(broken))
    print(
        f"   log weights {broken.tolist()} -> ess_ratio {ratio:.2f} (two of four carry weight), lr x {core.lr_scale(ratio):.2f}"
    )

    print("\n4. One group of four: rewards, weights, score norms -> which baseline leaves the least variance?")
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    log_weights = torch.tensor([1.2, -0.3, 0.1, -1.5], dtype=torch.float64)
    score_norms = torch.tensor([9.0, 4.0, 5.0, 3.0], dtype=torch.float64)
    groups = torch.zeros(4, dtype=torch.int64)
    candidates = {
        "group mean": core.group_mean(rewards, groups),
        "leave one out": core.leave_one_out(rewards, groups),
        "optimal": core.optimal_baseline(rewards, log_weights, score_norms, groups),
    }
    for name, baseline in candidates.items():
        moment = float(((log_weights.exp() * (rewards - baseline) * score_norms) ** 2).mean())
        print(
            f"   {name:14s} b = {[round(b, 3) for b in baseline.tolist()]}   second moment of the gradient {moment:6.2f}"
        )


if __name__ == "__main__":
    main()
