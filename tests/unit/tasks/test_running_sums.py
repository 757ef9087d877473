"""The text, the reward and the splits of the running sums task."""

from __future__ import annotations

import math
import re
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.errors import ConfigError
from vcpo.tasks import RunningSums
from vcpo.tasks.split import is_heldout

PROMPT = "4408123>"
RIGHT = "4+4=8|8+0=8;8+8=6,6+1=7|7+2=9;9+3=2"


def reward(completion, prompt=PROMPT, **options):
    return RunningSums(**options).score([prompt], [completion])[0]


# ---- reward ----


@pytest.mark.parametrize(
    "completion",
    [
        RIGHT,
        RIGHT + "$",
        "___" + RIGHT.replace("|", "|_").replace(";", ";__"),
        "0+0=0|0+0=0;0+0=0,0+0=0|0+0=0;0+0=2",  # only the last digit is judged
    ],
)
def test_a_whole_chain_with_the_right_last_digit_earns_one(completion):
    assert reward(completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "2",
        RIGHT[:-1] + "3",
        RIGHT[:-1],
        RIGHT[6:],  # five links
        RIGHT + "|2+0=2",  # seven links
        RIGHT + "_",
        RIGHT + "\n",
        "\n" + RIGHT,
        RIGHT + "$$",
        RIGHT.replace("|", "||", 1),
        RIGHT.replace("8+0", "8 + 0"),
        RIGHT.replace("2", "\u0662"),  # a digit two, but of another script
        RIGHT.replace("2", "\uff12"),
        RIGHT.replace("4", "\u0664"),
        RIGHT[:-1] + "12",
        "9**9**9**9",
        "__import__('os')",
    ],
)
def test_anything_else_earns_nothing(completion):
    assert reward(completion) == 0.0


def test_a_prompt_of_another_task_cannot_be_scored():
    assert RunningSums().score(["12>", "44081233", PROMPT], [RIGHT] * 3) == [None, None, 1.0]


@given(st.text(alphabet=RunningSums().alphabet + "$\n", max_size=60))
def test_hostile_text_earns_a_number(completion):
    assert reward(completion) in (0.0, 1.0)


def test_a_very_long_text_is_read_in_linear_time():
    assert reward("_" * 1_000_000 + RIGHT) == 1.0
    assert reward("_" * 1_000_000) == 0.0
    assert reward("4+4=8|" * 200_000) == 0.0


def test_turned_rewards_are_the_announced_share_and_always_the_same_ones():
    task = RunningSums(flip_rewards=0.2, flip_seed=1)
    rows = [(p, c) for p, c in islice(task.demonstrations(0), 4000)]
    prompts, completions = map(list, zip(*rows, strict=True))
    rewards = task.score(prompts, completions)
    share = rewards.count(0.0) / 4000
    assert abs(share - 0.2) < 4 * math.sqrt(0.2 * 0.8 / 4000)
    assert task.score(prompts[::-1], completions[::-1]) == rewards[::-1]
    assert RunningSums(flip_rewards=0.2, flip_seed=2).score(prompts, completions) != rewards
    assert set(RunningSums(flip_rewards=1.0).score(prompts, completions)) == {0.0}
    of_one_prompt = [RIGHT.replace("|", "|" + "_" * i) for i in range(50)]
    assert set(task.score([PROMPT] * 50, of_one_prompt)) == {0.0, 1.0}


# ---- demonstrations ----


@pytest.fixture(scope="module")
def noisy():
    return list(islice(RunningSums().demonstrations(0, noise=0.3), 20_000))


def test_demonstrations_without_noise_are_right_and_over_the_alphabet():
    task = RunningSums()
    for prompt, completion in islice(task.demonstrations(3), 300):
        assert task.score([prompt], [completion]) == [1.0]
        assert set(prompt + completion) <= set(task.alphabet)
        links = re.findall(r"(\d)\+(\d)=(\d)", completion)
        assert [int(c) for _, _, c in links] == [(int(a) + int(b)) % 10 for a, b, _ in links]
        assert prompt[0] + "".join(b for _, b, _ in links) + ">" == prompt
        assert all(c == a for (_, _, c), (a, _, _) in pairwise(links))


def test_noisy_demonstrations_go_on_from_what_was_written_and_end_right_as_often_as_the_formula_says(noisy):
    prompts, completions = map(list, zip(*noisy, strict=True))
    rewards = RunningSums().score(prompts, completions)
    expected = 0.1 + 0.9 * 0.7**6
    assert abs(sum(rewards) / len(rewards) - expected) < 4 * math.sqrt(expected * (1 - expected) / len(rewards))
    for _, completion in noisy[:500]:
        links = re.findall(r"(\d)\+(\d)=(\d)", completion)
        assert all(c == a for (_, _, c), (a, _, _) in pairwise(links))
    sums = [link for _, c in noisy for link in re.findall(r"(\d)\+(\d)=(\d)", c)]
    share = sum((int(a) + int(b)) % 10 == int(c) for a, b, c in sums) / len(sums)
    assert abs(share - 0.73) < 0.005


def test_lengths_are_the_announced_ones(noisy):
    tokens = [len(c) + 1 for _, c in noisy]
    assert 37.2 < sum(tokens) / len(tokens) < 37.8
    assert min(tokens) == 36
    assert max(tokens) <= 48
    short = [len(c) + 1 for _, c in islice(RunningSums(digits=3).demonstrations(0), 10_000)]
    assert (min(short), max(short)) == (12, 16)


def test_style_has_entropy_and_no_reward(noisy):
    separators = [s for _, c in noisy for s in re.findall(r"[,;|]", c)]
    for s in ",;|":
        assert abs(separators.count(s) / len(separators) - 1 / 3) < 0.01
    links = 6 * len(noisy)
    fillers = sum(c.count("_") for _, c in noisy)
    assert abs(fillers / links - 0.25) < 0.01
    # Nats per token of a perfect imitator: noisy sums, separators, fillers; what the warm start is tuned to.
    noise = -(0.73 * math.log(0.73) + 0.27 * math.log(0.03))
    fill = -(0.2 * math.log(0.2) + 0.8 * math.log(0.8)) / 0.8
    assert (6 * noise + 5 * math.log(3) + 6 * fill) / 37.5 == pytest.approx(0.435, abs=0.001)


# ---- streams ----


def test_streams_depend_on_the_seed_alone():
    task = RunningSums()
    first = list(islice(task.train_prompts(1), 20))
    assert first == list(islice(RunningSums().train_prompts(1), 20))
    assert first != list(islice(task.train_prompts(2), 20))
    assert [p.prompt_id for p in first] == [f"running_sums/{p.text[:-1]}" for p in first]
    assert all(p.columns == {"answer": str(sum(map(int, p.text[:-1])) % 10)} for p in first)
    demos = list(islice(task.demonstrations(1, noise=0.3), 20))
    assert demos == list(islice(RunningSums().demonstrations(1, noise=0.3), 20))
    assert demos != list(islice(task.demonstrations(2, noise=0.3), 20))


def test_the_held_out_prompts_are_fixed_different_and_never_trained_on():
    task = RunningSums(digits=3)  # so few that training sees all of its side
    held = task.heldout_prompts(40)
    assert [p.text for p in held[:3]] == ["735>", "993>", "415>"]  # pinned: evaluations stay comparable
    assert task.heldout_prompts(10) == held[:10]
    assert len({p.text for p in held}) == 40
    trained = {p.text for p in islice(task.train_prompts(0), 20_000)}
    shown = {p for p, _ in islice(task.demonstrations(0, noise=0.5), 20_000)}
    assert not {p.text for p in held} & (trained | shown)
    assert len(trained) + sum(is_heldout(f"{i:03d}>") for i in range(1000)) == 1000


def test_more_held_out_prompts_than_there_are_is_refused_in_one_line():
    with pytest.raises(ConfigError, match="running_sums, digits=2") as info:
        RunningSums(digits=2).heldout_prompts(50)
    assert "\n" not in str(info.value)
    assert RunningSums().heldout_prompts(0) == []


@pytest.mark.parametrize("options", [{"digits": 1}, {"digits": 65}, {"flip_rewards": -0.1}, {"flip_rewards": 1.5}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        RunningSums(**options)


@pytest.mark.parametrize("noise", [-0.1, 1.1, math.nan])
def test_noise_out_of_range_is_refused(noise):
    with pytest.raises(ConfigError, match="noise"):
        next(RunningSums().demonstrations(0, noise=noise))
