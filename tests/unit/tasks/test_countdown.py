"""Countdown: prompts from reasoning_gym, answers judged by its rules, hostile answers bounded."""

from __future__ import annotations

import sys
from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.errors import ConfigError
from vcpo.tasks import Countdown
from vcpo.tasks.scoring import Scorer
from vcpo.types import Prompt, Trajectory, TrajectoryGroup

TASK = Countdown()


def reward(completion, numbers=(3, 5, 7), target=1):
    return TASK.score(["3 5 7=1>"], [completion], numbers=[list(numbers)], target=[target])[0]


@pytest.mark.parametrize("completion", ["3+5-7", "5 + 3 - 7", "(3+5)-7", "-(7-5)+3", "3-(7-5)"])
def test_all_numbers_once_and_the_target_earn_one(completion):
    assert reward(completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    ["", "1", "3+5", "3+5-7+0", "3+5+7", "3*5-2*7", "35-7", "7-5-1", "3+5-7=1", "3+5-7$", "3/(5-5)*7", "1.0", "3+5-07"],
)
def test_anything_else_earns_nothing(completion):
    assert reward(completion) == 0.0


def test_fractions_on_the_way_are_allowed_and_division_by_zero_is_not():
    assert reward("5/3*6", (3, 5, 6), 10) == 1.0
    assert reward("7/(5-5)", (5, 5, 7), 1) == 0.0


@pytest.mark.parametrize(
    "completion",
    [
        "9**9**9**9",
        "9^9^9^9",
        "999999*999999*999999",
        "9" * 100_000,
        "(" * 100_000,
        "9*" * 50_000 + "9",
        "factorial(999999)",
        "().__class__",
    ],
)
def test_case_23_hostile_answers_earn_nothing_without_being_evaluated(completion, monkeypatch):
    def must_not_be_called(*_):
        raise AssertionError("reasoning_gym saw a hostile answer")

    numbers = [9] * min(12, max(completion.count("9"), 3))
    problems = type("Problems", (), {"score_answer": must_not_be_called})()
    task = Countdown()
    task.__dict__["_problems"] = problems
    assert task.score(["9 9 9=9>"], [completion], numbers=[numbers], target=[9]) == [0.0]


@given(st.permutations(["3", "5", "7"]), st.sampled_from("+-*/"), st.sampled_from("+-*/"), st.integers(1, 120))
def test_the_judgement_is_exact_arithmetic(order, one, two, target):
    a, b, c = order
    for text in (f"{a}{one}{b}{two}{c}", f"({a}{one}{b}){two}{c}", f"{a}{one}({b}{two}{c})"):
        try:
            value = exact(text)
        except ZeroDivisionError:
            value = None
        assert reward(text, target=target) == float(value == target)


def exact(text: str) -> Fraction:
    """Only for texts made in this file."""
    return eval("".join(f"F({c})" if c.isdigit() else c for c in text), {"F": Fraction})


def test_a_scorer_gives_the_columns():
    prompt = next(TASK.train_prompts(0))
    texts = [prompt.columns["solution"], "9**9**9**9"]
    made = tuple(Trajectory(i, (1,), (0.0,), (0,), "stop", c) for i, c in enumerate(texts))
    scored = Scorer(TASK, timeout_s=20).score_group(TrajectoryGroup(0, prompt, (1,), made))
    assert [t.reward for t in scored.trajectories] == [1.0, 0.0]


def test_prompts_are_compact_and_solvable():
    for prompt in islice(TASK.train_prompts(0), 100):
        numbers, target = prompt.columns["numbers"], prompt.columns["target"]
        assert prompt.text == f"{' '.join(map(str, numbers))}={target}>"
        assert prompt.prompt_id == f"countdown/{prompt.text[:-1]}"
        assert len(numbers) == 3
        assert max(numbers) <= 12
        assert 1 <= target <= 99
        assert reward(prompt.columns["solution"], numbers, target) == 1.0


def test_demonstrations_are_solutions_over_the_alphabet_and_noise_spoils_them():
    columns = {p.text: p.columns for p in islice(TASK.train_prompts(4), 300)}

    def share_right(noise):
        rows = list(islice(TASK.demonstrations(4, noise=noise), 300))
        assert all(set(p + c) <= set(TASK.alphabet) for p, c in rows)
        assert all(c == "".join(c.split()) for _, c in rows)
        return sum(reward(c, columns[p]["numbers"], columns[p]["target"]) for p, c in rows) / 300

    assert share_right(0.0) == 1.0
    assert 0.1 < share_right(0.3) < 0.35


def test_demonstrations_go_on_from_their_pool(monkeypatch):
    monkeypatch.setattr("vcpo.tasks.countdown._POOL", 5)
    rows = list(islice(TASK.demonstrations(0), 60))
    assert {p for p, _ in rows} == {p for p, _ in rows[:5]}


def test_the_question_style_is_the_generators_own_text():
    task = Countdown(prompt_style="question", min_numbers=4, max_numbers=5, max_value=30)
    for prompt in islice(task.train_prompts(0), 30):
        assert "using all" in prompt.text.lower()
        assert ", ".join(map(str, prompt.columns["numbers"])) in prompt.text
        assert set(prompt.text + prompt.columns["solution"]) <= set(task.alphabet)


def test_streams_depend_on_the_seed_alone():
    first = list(islice(TASK.train_prompts(1), 10))
    assert first == list(islice(Countdown().train_prompts(1), 10))
    assert first != list(islice(TASK.train_prompts(2), 10))
    assert not {p.text for p in first} & {p.text for p in islice(TASK.train_prompts(2), 10)}


def test_held_out_problems_are_fixed_different_and_never_trained_on_in_any_order():
    task = Countdown(max_value=9, max_target=30, operators="+-")
    held = task.heldout_prompts(8)
    assert held == Countdown(max_value=9, max_target=30, operators="+-").heldout_prompts(8)
    assert held[:3] == task.heldout_prompts(3)

    def problem(p: Prompt):
        return (*sorted(p.columns["numbers"]), p.columns["target"])

    assert len({problem(p) for p in held}) == 8
    assert not {problem(p) for p in held} & {problem(p) for p in islice(task.train_prompts(0), 2000)}


def test_options_with_no_problem_are_refused_in_one_line():
    with pytest.raises(ConfigError, match="no problem with these options") as info:
        next(Countdown(operators="*", max_target=1, max_value=999_999).train_prompts(0))
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    "options",
    [
        {"min_numbers": 1},
        {"min_numbers": 4},
        {"max_numbers": 13},
        {"max_value": 0},
        {"max_target": 0},
        {"max_target": 10**7},
        {"operators": ""},
        {"operators": "+^"},
        {"prompt_style": "long"},
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Countdown(**options)


def test_without_reasoning_gym_the_way_to_install_it_is_said_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r'pip install "vcpo\[tasks\]"') as info:
        next(Countdown().train_prompts(0))
    assert "\n" not in str(info.value)
