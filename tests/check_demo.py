"""Holds a finished demo run against what README promises: python tests/check_demo.py RUN_DIR. Not a pytest file."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> int:
    folder = Path(sys.argv[1])
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"] > 0]
    checks = {
        "256 held-out prompts": summary["heldout_prompts"] == 256,
        "reward after >= before + 0.3": summary["reward_after"] >= summary["reward_before"] + 0.3,
        "median realised policy lag >= 2": summary["policy_lag_median"] >= 2,
        "policy lag within its bound": summary["policy_lag_max"] <= summary["max_policy_lag"],
        "ess_ratio moves": summary["ess_ratio_max"] - summary["ess_ratio_min"] > 0.05,
        "lr_effective moves": len({row["lr_effective"] for row in steps}) > len(steps) // 2,
        "nothing dropped": summary["groups_dropped"] == 0,
        "the picture is there": Path(summary["picture"]).stat().st_size > 10_000,
        "the policy is there": (Path(summary["policy"]) / "config.json").exists(),
    }
    for name, held in checks.items():
        print(f"{'ok  ' if held else 'FAIL'}  {name}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
