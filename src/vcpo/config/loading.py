"""From a recipe and KEY=VALUE words to a RunConfig; other trainers' words are translated or refused on the way."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vcpo.config import reading
from vcpo.config.sections import RunConfig
from vcpo.errors import ConfigError

ALIASES: dict[str, str] = {
    "max_staleness": "rollout.max_policy_lag",
    "max_off_policy_steps": "rollout.max_policy_lag",
    "max_steps_off_policy": "rollout.max_policy_lag",
    "max_head_offpolicyness": "rollout.max_policy_lag",
    "group_size": "rollout.num_generations",
    "n_samples_per_prompt": "rollout.num_generations",
    "n": "rollout.num_generations",
}
"""Words of other trainers -> ours; read inside [rollout], and all but `n` at the top level too."""

REFUSED: dict[str, str] = {
    "staleness_threshold": "it is a fraction of a batch in verl, not a number of versions; set rollout.max_policy_lag, "
    "the most versions that a trained token may be behind the learner",
}
"""Words of other trainers that mean something else: never translated, always explained."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A recipe with KEY=VALUE words laid over it, checked; ConfigError tells the first mistake in one line."""
    path = Path(path)
    tree = _translated(reading.read_toml(path), str(path))
    words: reading.Tree = {}
    for word in overrides:
        keys, value = reading.parse_override(word)
        reading.set_path(words, keys, value)
    words = _translated(words, "command line")
    overridden = list(_lay_over(tree, words))
    tree.setdefault("run_dir", f"runs/{path.stem}")
    return reading.validate(RunConfig, tree, source=str(path), overridden=overridden)


def make_config(tree: Mapping[str, Any], *, source: str = "config") -> RunConfig:
    """The same from nested dicts instead of a file."""
    return reading.validate(RunConfig, _translated(json.loads(json.dumps(tree)), source), source=source)


def to_toml(config: RunConfig) -> str:
    """The resolved config as TOML that `load_config` reads back to an equal one."""
    return reading.to_toml(config.model_dump(mode="json"))


def to_json(config: RunConfig) -> str:
    """The resolved config as JSON."""
    return config.model_dump_json(indent=2)


def _translated(tree: reading.Tree, where: str) -> reading.Tree:
    """The tree with other trainers' words replaced by ours (`ALIASES`) and misleading ones refused (`REFUSED`)."""
    rollout = tree.get("rollout")
    for table, label in ((tree, ""), (rollout if isinstance(rollout, dict) else {}, "rollout.")):
        for name in [k for k in table if k in REFUSED]:
            raise ConfigError(f"{where}: {label}{name} is not accepted: {REFUSED[name]}")
        for name in [k for k in table if k in ALIASES and (label or k != "n")]:
            keys = ALIASES[name].split(".")
            there = tree.get(keys[0], {})
            if isinstance(there, dict) and keys[1] in there:
                raise ConfigError(f"{where}: {label}{name} and {ALIASES[name]} mean the same: keep one of them")
            reading.set_path(tree, keys, table.pop(name))
    return tree


def _lay_over(tree: reading.Tree, over: reading.Tree, prefix: str = "") -> Iterator[str]:
    """Write every value of `over` into `tree`, tables merged; yields the dotted names written."""
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            yield from _lay_over(tree[key], value, f"{prefix}{key}.")
        else:
            tree[key] = value
            yield f"{prefix}{key}"
            if isinstance(value, dict):
                yield from (f"{prefix}{key}.{inner}" for inner in value)
