"""The grammar of arithmetic that a model may have written."""

from __future__ import annotations

import ast
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.tasks.expressions import MAX_LENGTH, numbers_of


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("7", [7]),
        ("3+5-7", [3, 5, 7]),
        (" 3 * ( 5 - 7 ) ", [3, 5, 7]),
        ("-(3/5)--7", [3, 5, 7]),
        ("((10))*0", [10, 0]),
        ("999999/1", [999999, 1]),
    ],
)
def test_arithmetic_is_read(text, numbers):
    assert numbers_of(text) == numbers


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "9**9**9**9",
        "9^9",
        "3//5",
        "3 5",
        "3+",
        "*3",
        "+3",
        "--3",
        "(3",
        "3)",
        "()",
        "2(3)",
        "(2)(3)",
        "03",
        "1_0",
        "1.5",
        "1e9",
        "0x1f",
        "1234567",
        "3+5=8",
        "3\n+5",
        "3\t+5",
        "\u0663+5",
        "3\u00b2",
        "3\u0663",
        "3\u00d75",
        "x",
        "factorial(9)",
        "9!",
        "__import__('os').system('true')",
        "1" + "+1" * MAX_LENGTH,
        "(" * 100_000,
        "9" * 1_000_000,
    ],
)
def test_everything_else_is_refused(text):
    assert numbers_of(text) is None


def test_the_deepest_nesting_that_fits_is_no_trouble():
    depth = MAX_LENGTH // 2 - 1
    assert numbers_of("(" * depth + "7" + ")" * depth) == [7]


@given(st.text(alphabet="0123456789+-*/() ._xe", max_size=24))
def test_what_is_read_is_python_arithmetic_of_the_same_numbers(text):
    numbers = numbers_of(text)
    if numbers is not None:
        assert not re.search(r"[._xe]|\*\*|//", text)
        tree = ast.parse(text.strip(), mode="eval")
        assert sorted(n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)) == sorted(numbers)
        allowed = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.USub)
        assert all(isinstance(n, allowed) and not isinstance(n, ast.Pow | ast.FloorDiv) for n in ast.walk(tree))


def grammar(depth: int) -> st.SearchStrategy[str]:
    number = st.integers(0, 999_999).map(str)
    if depth == 0:
        return number
    inner = grammar(depth - 1)
    pair = st.tuples(inner, st.sampled_from(["+", "-", "*", "/", " + ", " * "]), inner).map("".join)
    return st.one_of(number, pair, inner.map("({})".format), inner.map("-({})".format))


@given(grammar(3).filter(lambda text: len(text) <= MAX_LENGTH))
def test_everything_the_grammar_makes_is_read(text):
    assert numbers_of(text) == [int(n) for n in re.findall(r"\d+", text)]
