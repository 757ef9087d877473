from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from vcpo.cli.main import app
from vcpo.config import load_config
from vcpo.tasks import make_task

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


def test_there_are_recipes():
    assert {"quickstart", "quickstart-sync", "countdown"} <= {r.stem for r in RECIPES}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.stem)
def test_every_recipe_passes_a_dry_run(recipe, tmp_path):
    result = CliRunner().invoke(app, ["train", str(recipe), "--dry-run", "--run-dir", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert "warning" not in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.stem)
def test_prompt_and_longest_answer_fit_the_context_of_the_policy(recipe):
    config = load_config(recipe)
    context = (config.policy.architecture or {})["max_position_embeddings"]
    task = make_task(config.task.name, **config.task.options)
    heldout = task.heldout_prompts(config.evaluation.prompts)  # so many must exist
    assert max(len(p.text) for p in heldout) + config.rollout.max_new_tokens <= context


def test_the_synchronous_twin_differs_in_the_mode_only():
    here = RECIPES[0].parent
    one, other = (load_config(here / f"{name}.toml").model_dump() for name in ("quickstart", "quickstart-sync"))
    assert one.pop("mode") != other.pop("mode")
    one["rollout"].pop("max_policy_lag"), other["rollout"].pop("max_policy_lag")
    one.pop("run_dir"), other.pop("run_dir")
    assert one == other
