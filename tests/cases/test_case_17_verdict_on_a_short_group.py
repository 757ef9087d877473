"""Row 17: one failed generation left its group short for ever. The verdict is one pure function and an explicit setting."""

from __future__ import annotations

import pytest

from vcpo.rollout import GroupResult, settle_group
from vcpo.types import Trajectory


def group_of_four(*survivors: int) -> GroupResult:
    members = tuple(
        Trajectory(member=m, token_ids=(1,), sampler_logprobs=(0.0,), policy_versions=(0,), finish_reason="stop")
        for m in survivors
    )
    return GroupResult(7, (1,), members, 0, 0)


@pytest.mark.parametrize(("short_groups", "kind"), [("train", "keep"), ("refill", "refill")])
def test_case_17_member_three_of_four_raised(short_groups, kind):
    settled = settle_group(group_of_four(0, 1, 2), 4, short_groups)
    assert settled.kind == kind
    assert settled.reason == "3 of 4 members survived"
    assert [t.member for t in settled.result.trajectories] == [0, 1, 2]


@pytest.mark.parametrize("short_groups", ["train", "refill"])
def test_case_17_a_lone_survivor_is_dropped_and_the_reason_can_be_counted(short_groups):
    settled = settle_group(group_of_four(2), 4, short_groups, refills_left=0)
    assert (settled.kind, settled.reason) == ("drop", "lone survivor of 4 members")


def test_case_17_a_member_that_fails_for_ever_does_not_keep_its_group_for_ever():
    kinds = [settle_group(group_of_four(0, 1, 2), 4, "refill", refills_left=left).kind for left in (2, 1, 0)]
    assert kinds == ["refill", "refill", "keep"]
