"""The verdict on groups whose members failed (the case itself is in tests/cases)."""

from __future__ import annotations

import pytest

from vcpo.errors import ConfigError
from vcpo.rollout import GroupResult, settle_group
from vcpo.types import Trajectory


def result(*reasons):
    members = tuple(
        Trajectory(member=m, token_ids=(1,), sampler_logprobs=(0.0,), policy_versions=(0,), finish_reason=r)
        for m, r in enumerate(reasons)
        if r
    )
    return GroupResult(5, (1,), members, 0, 0)


@pytest.mark.parametrize("setting", ["train", "refill"])
def test_a_full_group_is_kept_whatever_the_setting(setting):
    full = result("stop", "length", "stop")
    settled = settle_group(full, 3, setting)
    assert (settled.kind, settled.reason, settled.result) == ("keep", "", full)


def test_a_group_of_one_that_was_asked_for_is_full():
    assert settle_group(result("stop"), 1, "train").kind == "keep"


@pytest.mark.parametrize("setting", ["train", "refill"])
def test_nobody_left(setting):
    assert settle_group(result(), 4, setting, refills_left=0).kind == "drop"
    assert settle_group(result("failed", "failed"), 2, setting, refills_left=0).reason == "no survivor of 2 members"


def test_failed_and_aborted_members_do_not_count_and_are_taken_out():
    settled = settle_group(result("stop", "failed", "aborted", "length"), 4, "train")
    assert settled.kind == "keep"
    assert settled.reason == "2 of 4 members survived"
    assert [t.member for t in settled.result.trajectories] == [0, 3]


def test_refills_end():
    assert settle_group(result("stop", "stop"), 3, "refill", refills_left=1).kind == "refill"
    assert settle_group(result("stop", "stop"), 3, "refill", refills_left=0).kind == "keep"
    assert settle_group(result("stop"), 3, "refill", refills_left=0).kind == "drop"


def test_bad_arguments():
    with pytest.raises(ConfigError, match="short_groups must be one of train, refill, got 'wait'"):
        settle_group(result("stop"), 1, "wait")
    with pytest.raises(ValueError, match="group 5 has 2 trajectories, 1 were asked for"):
        settle_group(result("stop", "stop"), 1, "train")
