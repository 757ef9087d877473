from __future__ import annotations

import dataclasses

import pytest

import vcpo
from vcpo.metrics import METRICS, UpdateReport


def a_report(**changes):
    numbers = {"policy_version": 3, "step": 4, "n_trajectories": 8, "n_groups": 2, "n_tokens": 90}
    numbers |= {"ess": 4.0, "ess_ratio": 0.5, "lr_scale": 0.7, "lr": 1e-3, "lr_effective": 7e-4}
    return UpdateReport(**(numbers | changes))


def test_every_field_of_a_report_is_in_the_list_of_metrics():
    assert [f.name for f in dataclasses.fields(UpdateReport) if f.name not in METRICS] == []
    assert set(a_report().to_dict()) == {f.name for f in dataclasses.fields(UpdateReport)}


def test_metrics_are_listed_under_their_own_name_with_unit_and_meaning():
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.unit
        assert len(metric.meaning) > 10
        assert metric.goes_up_is in ("good", "bad", "neutral")


def test_a_report_is_frozen_and_what_was_not_measured_is_none():
    report = a_report()
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.ess = 1.0
    assert report.score_norm_mean is None
    assert report.to_dict()["ess_ratio"] == 0.5
    assert vcpo.UpdateReport is UpdateReport
