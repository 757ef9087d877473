"""What travels between the coordinator and its samplers."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from vcpo.errors import ConfigError
from vcpo.rollout import GroupRequest, GroupResult, SamplingParams
from vcpo.types import Trajectory

CUT = Trajectory(
    member=1, token_ids=(7, 9), sampler_logprobs=(-2.3, -0.1), policy_versions=(4, 5), finish_reason="aborted"
)


@pytest.mark.parametrize(
    "value",
    [
        SamplingParams(5, 0.5, (7, 2)),
        GroupRequest(group_id=3, prompt_id="p", prompt_token_ids=(1, 2), num_generations=4, seed=9, partial=(CUT,)),
        GroupResult(3, (1, 2), (CUT,), 6, 4),
    ],
)
def test_json_round_trip(value):
    assert type(value).from_json(json.loads(json.dumps(value.to_json()))) == value


def test_stop_tokens_are_a_set():
    assert SamplingParams(4, stop_token_ids=[7, 2, 7]) == SamplingParams(4, stop_token_ids=(2, 7))


@pytest.mark.parametrize("temperature", [0, 0.0, -1.0, math.nan, math.inf])
def test_temperature_that_is_no_positive_number_is_refused(temperature):
    with pytest.raises(ConfigError, match=r"temperature must be a positive number, got .*use a small temperature"):
        SamplingParams(4, temperature)


def test_other_values_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="max_new_tokens must be at least 1, got 0"):
        SamplingParams(0)
    with pytest.raises(ConfigError, match="stop_token_ids must be token ids >= 0"):
        SamplingParams(4, stop_token_ids=(-1,))
    with pytest.raises(ConfigError, match="the prompt has no tokens"):
        GroupRequest(group_id=0, prompt_token_ids=(), num_generations=1, seed=0)
    with pytest.raises(ConfigError, match="num_generations must be at least 1, got 0"):
        GroupRequest(group_id=0, prompt_token_ids=(1,), num_generations=0, seed=0)
    for partial in ((CUT, CUT), (CUT,)):
        with pytest.raises(ConfigError, match="partial members must be distinct and below 1"):
            GroupRequest(group_id=0, prompt_token_ids=(1,), num_generations=1, seed=0, partial=partial)


def test_the_coordinators_side_of_a_sampler_process_needs_no_torch():
    """Neither the pool nor the wire types; a sampler that cannot start says so before it has loaded anything heavy."""
    code = (
        "import sys; from vcpo.rollout import ProcessSamplerPool, GroupRequest, settle_group\n"
        "import vcpo.rollout.sampler_process\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
