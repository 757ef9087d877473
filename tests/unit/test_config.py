from __future__ import annotations

import inspect
import json
import tomllib

import pytest
from pydantic import ValidationError

from vcpo import config as cfg
from vcpo.config import ALIASES, RunConfig, config_warnings, load_config, make_config, to_json, to_toml
from vcpo.errors import ConfigError

LEAST = '[policy]\npath = "models/tiny"\n[task]\nname = "running_sums"\n'


@pytest.fixture
def recipe(tmp_path):
    def write(text: str = "", top: str = ""):
        path = tmp_path / "my-run.toml"
        path.write_text(top + LEAST + text)
        return path

    return write


def error_of(path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    assert "pydantic" not in text.lower()
    return text


# ---- reading ----


def test_defaults_and_the_run_dir_after_the_file(recipe):
    config = load_config(recipe())
    assert config.run_dir == "runs/my-run"
    assert (config.mode, config.steps, config.rollout.groups_per_batch, config.rollout.num_generations) == (
        "async",
        60,
        16,
        8,
    )
    assert (config.rollout.max_policy_lag, config.learner.lr, config.learner.betas) == (4, 2e-3, (0.9, 0.999))
    assert (config.variance_control.cap, config.variance_control.max_grad_norm) == (8.0, 1.0)


def test_a_config_is_frozen(recipe):
    with pytest.raises(ValidationError):
        load_config(recipe()).rollout.max_policy_lag = 3


@pytest.mark.parametrize(
    ("word", "read", "value"),
    [
        ("learner.lr=1e-3", lambda c: c.learner.lr, 1e-3),
        ("learner.lr=.5", lambda c: c.learner.lr, 0.5),
        ("learner.lr=1", lambda c: c.learner.lr, 1.0),
        ("seed = 7", lambda c: c.seed, 7),
        ("mode=sync", lambda c: c.mode, "sync"),
        ('mode="sync"', lambda c: c.mode, "sync"),
        ("learner.betas=[0.5, 0.9]", lambda c: c.learner.betas, (0.5, 0.9)),
        ("rollout.sampler_logprobs=true", lambda c: c.rollout.sampler_logprobs, True),
        ("variance_control.max_grad_norm=off", lambda c: c.variance_control.max_grad_norm, "off"),
        ("variance_control.reference=auto", lambda c: c.variance_control.reference, "auto"),
        ("task.options.digits=5", lambda c: c.task.options, {"digits": 5}),
        ("run_dir=a=b", lambda c: c.run_dir, "a=b"),
    ],
)
def test_overrides_are_read_as_toml_and_else_as_text(recipe, word, read, value):
    assert read(load_config(recipe(), [word])) == value


def test_overrides_leave_their_neighbours_alone_and_the_last_one_counts(recipe):
    path = recipe("[task.options]\ndigits = 5\nflip_seed = 1\n[rollout]\nnum_samplers = 2\n")
    config = load_config(path, ["task.options.digits=6", "rollout.temperature=0.5", "seed=1", "seed=2"])
    assert config.task.options == {"digits": 6, "flip_seed": 1}
    assert (config.rollout.num_samplers, config.rollout.temperature, config.seed) == (2, 0.5, 2)


def test_the_resolved_config_reads_back_to_an_equal_one(recipe, tmp_path):
    text = '[learner]\neps = 1e-8\n[warm_start]\ncache_dir = "a \\"b\\"\\\\c\\u0007"\n[task.options]\n"odd key" = [1, "x"]\n'
    config = load_config(recipe(text), ["variance_control.max_grad_norm=running_median"])
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "config.toml") == config
    assert RunConfig.model_validate_json(to_json(config)) == config
    assert json.loads(to_json(config))["mode"] == "async"


def test_dicts_serve_as_well_as_files():
    config = make_config({"policy": {"path": "x"}, "task": {"name": "t"}, "rollout": {"group_size": 3}})
    assert config.rollout.num_generations == 3
    with pytest.raises(ConfigError, match=r"^config: the section \[task\] is missing$"):
        make_config({"policy": {"path": "x"}})


# ---- mistakes: one line each, that says where, what, and what would be right ----


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("learner.leraning_rate=1", "unknown key 'leraning_rate' in [learner]; there are lr, "),
        ("learner.lr_shedule=constant", "unknown key 'lr_shedule' in [learner]; did you mean lr_schedule?"),
        ("rolout.temperature=1", "unknown key 'rolout' at the top level; did you mean rollout?"),
        ("max_policy_lag=1", "unknown key 'max_policy_lag' at the top level; did you mean rollout.max_policy_lag?"),
        ("rollout.cap=1", "unknown key 'cap' in [rollout]; did you mean variance_control.cap?"),
        ("learner.lr=abc", 'learner.lr = "abc" is not right, it must be a number >= 0'),
        ("learner.lr=nan", "learner.lr = nan is not right, it must be a number >= 0"),
        ("learner.lr=inf", "learner.lr = inf is not right, it must be a number >= 0"),
        ("learner.lr=-1", "learner.lr = -1 is not right, it must be a number >= 0"),
        ("learner.lr=true", "learner.lr = true is not right, it must be a number >= 0"),
        ("learner.lr.x=1", "learner.lr = {x = 1} is not right, it must be a number >= 0"),
        ("seed=1.5", "seed = 1.5 is not right, it must be a whole number >= 0"),
        ("steps=0", "steps = 0 is not right, it must be a whole number >= 1"),
        ("rollout.groups_per_batch=0", "rollout.groups_per_batch = 0 is not right, it must be a whole number >= 1"),
        ("rollout.max_policy_lag=-1", "rollout.max_policy_lag = -1 is not right, it must be a whole number >= 0"),
        ("rollout.temperature=0", "rollout.temperature = 0 is not right, it must be a number > 0"),
        ("rollout.partial_rollouts=no", 'rollout.partial_rollouts = "no" is not right, it must be true or false'),
        ("policy.path=3", "policy.path = 3 is not right, it must be a text in quotes"),
        ("task.options=3", "task.options = 3 is not right, it must be a table"),
        ("learner=3", "learner = 3 is not right, it must be a table, [learner]"),
        ("mode=asink", 'mode = "asink" is not right, it must be "async", "sync" or "replay"; did you mean "async"?'),
        ("learner.loss=grpo", 'learner.loss = "grpo" is not right, it must be "reinforce" or "ppo_clip"'),
        ("warm_start.noise=2", "warm_start.noise = 2 is not right, it must be a number >= 0 and <= 1"),
        (
            "learner.betas=[0.9, 1]",
            "learner.betas = [0.9, 1] is not right, it must be a list of 2, each a number >= 0 and < 1",
        ),
        (
            "learner.betas=[0.9]",
            "learner.betas = [0.9] is not right, it must be a list of 2, each a number >= 0 and < 1",
        ),
        (
            "variance_control.reference=2",
            'variance_control.reference = 2 is not right, it must be a number > 0 and <= 1 or "auto"',
        ),
        (
            "variance_control.max_grad_norm=of",
            'variance_control.max_grad_norm = "of" is not right, it must be a number > 0, "running_median" or "off"; '
            'did you mean "off"?',
        ),
    ],
)
def test_a_bad_value_is_told_in_one_line(recipe, word, said):
    text = error_of(recipe(), word)
    assert text.startswith("command line: " + said)
    assert text == "command line: " + said or said.endswith(", ")


def test_a_mistake_in_the_file_names_the_file(recipe):
    path = recipe("[learner]\nlr = 'fast'\n")
    assert error_of(path) == f'{path}: learner.lr = "fast" is not right, it must be a number >= 0'


def test_unknown_keys_come_first_and_the_others_are_counted(recipe):
    text = error_of(recipe(), "seed=-1", "steps=0", "learner.epss=1")
    assert text == "command line: unknown key 'epss' in [learner]; did you mean eps? (and 2 more)"


@pytest.mark.parametrize("word", ["seed", "=3", "learner.=3", ".lr=3", "a..b=3", ""])
def test_an_override_without_key_and_value_is_explained(recipe, word):
    assert error_of(recipe(), word) == f"{word!r} is not KEY=VALUE, for example learner.lr=1e-3 or seed=1"


def test_an_override_inside_a_value_is_explained(recipe):
    assert error_of(recipe(), "seed=1", "seed.x=2") == "seed.x: seed is a value, it has nothing inside"


def test_files_that_cannot_be_read(tmp_path):
    assert error_of(tmp_path / "none.toml") == f"cannot read {tmp_path / 'none.toml'}: No such file or directory"
    assert error_of(tmp_path) == f"cannot read {tmp_path}: Is a directory"
    (tmp_path / "broken.toml").write_text("seed = \n")
    assert error_of(tmp_path / "broken.toml").startswith(f"{tmp_path / 'broken.toml'} is not valid TOML: ")
    assert "line 1" in error_of(tmp_path / "broken.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert error_of(tmp_path / "binary.toml") == f"cannot read {tmp_path / 'binary.toml'}: it is not UTF-8 text"


# ---- other trainers' words ----


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_aliases_are_understood_in_file_and_on_the_command_line(recipe, alias):
    section, name = ALIASES[alias].split(".")
    assert getattr(getattr(load_config(recipe(f"[rollout]\n{alias} = 3\n")), section), name) == 3
    assert getattr(getattr(load_config(recipe(), [f"rollout.{alias}=3"]), section), name) == 3
    if alias != "n":
        assert getattr(getattr(load_config(recipe(), [f"{alias}=3"]), section), name) == 3


def test_an_alias_on_the_command_line_wins_over_the_name_in_the_file_and_the_reverse(recipe):
    assert load_config(recipe("[rollout]\nmax_policy_lag = 2\n"), ["max_staleness=7"]).rollout.max_policy_lag == 7
    assert (
        load_config(recipe("[rollout]\nmax_staleness = 2\n"), ["rollout.max_policy_lag=7"]).rollout.max_policy_lag == 7
    )


def test_an_alias_beside_the_name_is_refused(recipe):
    path = recipe("[rollout]\nmax_policy_lag = 2\nmax_staleness = 3\n")
    assert error_of(path) == f"{path}: rollout.max_staleness and rollout.max_policy_lag mean the same: keep one of them"


@pytest.mark.parametrize("word", ["staleness_threshold=0.5", "rollout.staleness_threshold=0.5"])
def test_a_staleness_threshold_is_refused_with_the_reason(recipe, word):
    text = error_of(recipe(), word)
    assert text.startswith("command line: ")
    assert "staleness_threshold is not accepted: it is a fraction of a batch in verl, not a number of versions" in text
    assert "rollout.max_policy_lag" in text


# ---- what must go together ----


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rollout.sampler_logprobs=false"], "rollout.sampler_logprobs = false with max_policy_lag = 4: "),
        (
            ["mode=replay", "rollout.sampler_logprobs=false"],
            "rollout.sampler_logprobs = false with max_policy_lag = 4: ",
        ),
        (["rollout.partial_rollouts=true"], "rollout.partial_rollouts = true is not available yet"),
        (["rollout.n=1"], "rollout.num_generations = 1: the baseline of a group compares its trajectories"),
        (["policy.architecture.model_type=llama"], "[policy] needs exactly one of path and architecture, both are set"),
        (
            ["learner.chunk_vocabulary=true", "variance_control.score_norms=logit"],
            'learner.chunk_vocabulary = true does not go with variance_control.score_norms = "logit"',
        ),
        (
            ["variance_control.step_control=closed_loop"],
            'variance_control.step_control = "closed_loop" is not available yet',
        ),
        (
            ["variance_control.reference=auto", "variance_control.step_control=none"],
            'variance_control.reference = "auto" needs step_control = "ess"',
        ),
        (
            ["variance_control.weights=estimator", "variance_control.weight_treatment=token_truncate"],
            'variance_control.weights = "estimator" needs one factor per trajectory',
        ),
        (
            ["variance_control.baseline_scope=batch"],
            'variance_control.baseline_scope = "batch" goes with scale_rewards',
        ),
        (
            ["variance_control.aggregation=seq_mean_token_sum_norm"],
            'variance_control.aggregation = "seq_mean_token_sum_norm" needs constant_length',
        ),
        (
            ["learner.loss=ppo_clip", "learner.loss_options.cap=2"],
            "learner.loss_options.cap: set variance_control.cap instead",
        ),
        (["learner.loss_options.clip_low=.1"], 'learner.loss_options: the loss "reinforce" takes none'),
    ],
)
def test_settings_that_do_not_go_together_are_refused(recipe, words, said):
    assert f": {said}" in error_of(recipe(), *words)


def test_case_09_lag_without_sampler_logprobs_is_refused_and_lag_0_is_not(recipe):
    with pytest.raises(ConfigError, match="old trajectories cannot be weighted without the log-probs recorded"):
        load_config(recipe(), ["rollout.sampler_logprobs=false", "rollout.max_policy_lag=1"])
    assert not load_config(
        recipe(), ["rollout.sampler_logprobs=false", "rollout.max_policy_lag=0"]
    ).rollout.sampler_logprobs
    assert not load_config(recipe(), ["rollout.sampler_logprobs=false", "mode=sync"]).rollout.sampler_logprobs


def test_a_policy_needs_a_path_or_an_architecture_with_type_and_tokenizer(tmp_path):
    task = {"task": {"name": "running_sums"}}
    for policy, said in [
        ({}, "needs exactly one of path and architecture, neither is set"),
        ({"architecture": {}, "tokenizer": "characters"}, "needs model_type"),
        ({"architecture": {"model_type": "llama"}}, "policy.tokenizer is missing"),
    ]:
        with pytest.raises(ConfigError, match=said):
            make_config({"policy": policy, **task})


def test_sync_mode_has_lag_0_whatever_the_bound_says(recipe):
    config = load_config(recipe(), ["mode=sync"])
    assert (config.rollout.max_policy_lag, config.lag_bound) == (4, 0)
    assert load_config(recipe()).lag_bound == 4


def test_settings_that_are_probably_not_meant_are_warned_of(recipe):
    assert config_warnings(load_config(recipe())) == []
    for words, said in [
        (["learner.lr=0"], "learner.lr is 0"),
        (["learner.lr_warmup_steps=60"], "60 steps never reach lr"),
        (["mode=replay", "rollout.max_policy_lag=60"], "steps is not above max_policy_lag"),
        (["rollout.max_policy_lag=0"], "take turns"),
    ]:
        (warning,) = config_warnings(load_config(recipe(), words))
        assert said in warning


# ---- the config and the code it configures say the same ----


def test_every_option_is_described():
    def check(model):
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, cfg.sections.Section):
                assert field.annotation.__doc__, name
                check(field.annotation)
            else:
                assert len(field.description or "") > 10, f"{model.__name__}.{name}"

    check(RunConfig)


def test_variance_control_has_the_arguments_of_the_class_with_its_defaults():
    from vcpo.learner.variance_control import VarianceControl

    arguments = dict(inspect.signature(VarianceControl).parameters)
    for given_by_the_run in ("model", "optimizer", "process_group"):
        arguments.pop(given_by_the_run)
    fields = cfg.VarianceControlConfig.model_fields
    assert set(fields) == set(arguments)
    assert {n: f.default for n, f in fields.items()} == {n: a.default for n, a in arguments.items()}


def test_names_to_choose_from_are_those_of_the_code():
    from vcpo import core, score_norms
    from vcpo.learner import optimizer, settings

    def choices(section, name):
        return set(cfg.reading.literals(section.model_fields[name].annotation))

    assert choices(cfg.LearnerConfig, "loss") == set(core.policy_losses) - {"grpo"}
    assert choices(cfg.LearnerConfig, "lr_schedule") == set(optimizer.SCHEDULES)
    assert choices(cfg.VarianceControlConfig, "weight_treatment") == set(core.weight_treatments)
    assert choices(cfg.VarianceControlConfig, "aggregation") == set(core.aggregations)
    assert choices(cfg.VarianceControlConfig, "baseline") == set(settings.BASELINES)
    assert choices(cfg.VarianceControlConfig, "step_control") >= set(settings.STEP_CONTROLS)
    assert all(hasattr(score_norms, n) for n in choices(cfg.VarianceControlConfig, "score_norms") - {"auto"})


def test_the_toml_writer_writes_toml():
    tree = {"a": True, "b": 1e-8, "c": '\x7f\u00e9\n"', "t": {"x y": [1, 2.5, "z"], "deep": {"k": {}}}, "none": None}
    assert tomllib.loads(cfg.reading.to_toml(tree)) == {k: v for k, v in tree.items() if k != "none"}
