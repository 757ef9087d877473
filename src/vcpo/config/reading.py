"""From TOML text and KEY=VALUE words to a checked pydantic model, with every mistake told in one line. No torch."""

from __future__ import annotations

import difflib
import json
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from vcpo.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)
Tree = dict[str, Any]

_TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text in quotes"}


def read_toml(path: Path) -> Tree:
    """The tables of a TOML file; ConfigError names the file, and the line where its text is broken."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {path}: it is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def parse_override(word: str) -> tuple[tuple[str, ...], Any]:
    """`"learner.lr=1e-3"` -> (("learner", "lr"), 0.001); a value that is no TOML is taken as plain text."""
    key, equals, text = word.partition("=")
    keys = tuple(part.strip() for part in key.split("."))
    if not equals or not all(keys):
        raise ConfigError(f"{word!r} is not KEY=VALUE, for example learner.lr=1e-3 or seed=1")
    return keys, _toml_value(text.strip())


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        pass
    try:
        return float(text)  # ".5" and "1." are numbers to most people, though not to TOML
    except ValueError:
        return text


def set_path(tree: Tree, keys: Sequence[str], value: Any) -> None:
    """Write `value` at `keys`, making tables on the way; ConfigError where a key on the way holds no table."""
    for at, key in enumerate(keys[:-1]):
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{'.'.join(keys)}: {'.'.join(keys[: at + 1])} is a value, it has nothing inside")
    tree[keys[-1]] = value


def validate(model: type[Model], tree: Mapping[str, Any], *, source: str, overridden: Iterable[str] = ()) -> Model:
    """The checked model, or a ConfigError of one line for the first mistake (unknown keys before bad values).

    `source` names where the values come from; keys in `overridden` (dotted) came from the command line instead.
    """
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        found = error.errors(include_url=False)
    found.sort(key=lambda e: e["type"] != "extra_forbidden")
    names = set(overridden)
    lines = list(
        dict.fromkeys(_one_line(model, e, tree, lambda key: "command line" if key in names else source) for e in found)
    )
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    raise ConfigError(lines[0] + more)


def _one_line(model: type[BaseModel], error: Any, tree: Mapping[str, Any], came_from: Callable[[str], str]) -> str:
    keys, owner, field = _resolve(model, [str(part) for part in error["loc"]])
    dotted = ".".join(keys)
    where = came_from(dotted)
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key {keys[-1]!r} {_in_section(keys)}{nearest_key(model, owner, keys)}"
    if error["type"] == "missing" and len(keys) == len(error["loc"]):  # else an item of a list is missing
        return (
            f"{where}: {f'the section [{dotted}]' if field is not None and _is_section(field) else dotted} is missing"
        )
    if error["type"] == "value_error":  # a rule between settings; its text begins with the name of one of them
        text = str(error["ctx"]["error"])
        return f"{came_from(text.split(' ')[0])}: {text}"
    if field is None:
        return f"{where}: {dotted or 'the file'}: {error['msg']}"
    value = reduce(lambda table, key: table[key], keys, tree)  # the whole value, where only an item of it is wrong
    right = "a table, [" + dotted + "]" if _is_section(field) else expectation(field)
    return f"{where}: {dotted} = {_show(value)} is not right, it must be {right}{_nearest_choice(field, value)}"


def _resolve(model: type[BaseModel], loc: list[str]) -> tuple[list[str], type[BaseModel], FieldInfo | None]:
    """The part of an error's location that names keys, the model that owns the last one, and its field."""
    owner, keys, field = model, [], None
    for part in loc:
        keys.append(part)
        field = owner.model_fields.get(part)
        if field is None or not _is_section(field):
            break  # what follows are branches of a union or places inside a list
        owner = typing.cast(type[BaseModel], field.annotation)
    return keys, owner, field


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _in_section(keys: Sequence[str]) -> str:
    return f"in [{'.'.join(keys[:-1])}]" if len(keys) > 1 else "at the top level"


def nearest_key(model: type[BaseModel], owner: type[BaseModel], keys: Sequence[str]) -> str:
    """What the writer of an unknown key may have meant: a suggestion, or the list of what exists there."""
    name, here = keys[-1], list(owner.model_fields)
    elsewhere = [".".join(path) for path in _all_keys(model) if path[-1] == name]
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere)}?"
    close = difflib.get_close_matches(name, here, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    leaves = {path[-1]: ".".join(path) for path in _all_keys(model)}
    close = difflib.get_close_matches(name, leaves, n=1, cutoff=0.75)
    return f"; did you mean {leaves[close[0]]}?" if close else f"; there are {', '.join(here)}"


def _all_keys(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, field in model.model_fields.items():
        found.append((*prefix, name))
        if _is_section(field):
            found += _all_keys(typing.cast(type[BaseModel], field.annotation), (*prefix, name))
    return found


def expectation(field: FieldInfo) -> str:
    """What a field takes, in words: `a whole number >= 1`, `"lr" or "gradient"`."""
    return _describe(field.annotation, _bounds(field.metadata))


def _describe(annotation: Any, bounds: str) -> str:
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *metadata = typing.get_args(annotation)
        return _describe(inner, _bounds(metadata) or bounds)
    choices = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return _either([_show(c) for c in choices])
    if origin in (typing.Union, types.UnionType):
        words = [_show(w) for w in literals(annotation)]
        others = [c for c in choices if c is not type(None) and typing.get_origin(c) is not typing.Literal]
        return _either([_describe(c, bounds) for c in others] + words)
    if origin is tuple:
        return f"a list of {len(choices)}, each {_describe(choices[0], bounds)}"
    if origin in (dict, Mapping) or annotation is dict:
        return "a table"
    return _TYPE_WORDS.get(annotation, str(annotation)) + bounds


def _bounds(metadata: Iterable[Any]) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    flat = [m for outer in metadata for m in (outer.metadata if isinstance(outer, FieldInfo) else [outer])]
    parts = [f"{sign} {getattr(m, name):g}" for m in flat for name, sign in signs.items() if hasattr(m, name)]
    return " " + " and ".join(parts) if parts else ""


def _either(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"


def _nearest_choice(field: FieldInfo, value: Any) -> str:
    if not isinstance(value, str):
        return ""
    choices = [c for c in literals(field.annotation) if isinstance(c, str)]
    close = difflib.get_close_matches(value, choices, n=1, cutoff=0.6)
    return f"; did you mean {_show(close[0])}?" if close else ""


def literals(annotation: Any) -> list[Any]:
    """The fixed values that a field takes, those inside a union too."""
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [c for part in typing.get_args(annotation) for c in literals(part)]


def _show(value: Any) -> str:
    """A value as TOML would write it, shortened."""
    text = toml_value(value)
    return text if len(text) <= 60 else text[:57] + "..."


def to_toml(tree: Mapping[str, Any], prefix: str = "") -> str:
    """A nested dict as TOML text: plain values first, then one table for each section. None is left out."""
    plain = {k: v for k, v in tree.items() if not isinstance(v, Mapping) and v is not None}
    lines = [f"{_toml_key(k)} = {toml_value(v)}" for k, v in plain.items()]
    for key, table in tree.items():
        if isinstance(table, Mapping):
            name = f"{prefix}{_toml_key(key)}"
            lines += ["", f"[{name}]", to_toml(table, prefix=f"{name}.").rstrip("\n")]
    return "\n".join(lines).strip("\n") + "\n"


def _toml_key(key: str) -> str:
    plain = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if plain else toml_value(key)


def toml_value(value: Any) -> str:
    """One value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(k)} = {toml_value(v)}" for k, v in value.items() if v is not None) + "}"
    return repr(value)
