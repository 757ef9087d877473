"""A fixed grammar for arithmetic that a model wrote: checked before any other code may read it.

    sum      = product (("+" | "-") product)*
    product  = factor (("*" | "/") factor)*
    factor   = "-"? (number | "(" sum ")")
    number   = one to six ASCII digits, no leading zero

Spaces may stand between symbols. There is no power, no name, no dot: the work that a text can cause is bounded by its
length.
"""

from __future__ import annotations

import re

MAX_LENGTH = 200
"""Characters; longer texts are refused unread. It also bounds how deep brackets can nest."""
_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")


def numbers_of(text: str) -> list[int] | None:
    """The numbers of an expression in the order written, or None if the text is not one by the grammar above."""
    if len(text) > MAX_LENGTH:
        return None
    numbers: list[int] = []
    end = _sum(text, _skip(text, 0), numbers)
    return numbers if end == len(text) else None


# Each rule takes the place where it starts and gives the place after it and the spaces that follow, or -1.


def _sum(text: str, at: int, numbers: list[int]) -> int:
    at = _product(text, at, numbers)
    while at >= 0 and text[at : at + 1] in ("+", "-"):
        at = _product(text, _skip(text, at + 1), numbers)
    return at


def _product(text: str, at: int, numbers: list[int]) -> int:
    at = _factor(text, at, numbers)
    while at >= 0 and text[at : at + 1] in ("*", "/"):
        at = _factor(text, _skip(text, at + 1), numbers)
    return at


def _factor(text: str, at: int, numbers: list[int]) -> int:
    if text[at : at + 1] == "-":
        at = _skip(text, at + 1)
    if text[at : at + 1] == "(":
        at = _sum(text, _skip(text, at + 1), numbers)
        return _skip(text, at + 1) if at >= 0 and text[at : at + 1] == ")" else -1
    number = _NUMBER.match(text, at)
    if number is None or text[number.end() : number.end() + 1].isdigit():
        return -1
    numbers.append(int(number[0]))
    return _skip(text, number.end())


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] == " ":
        at += 1
    return at
