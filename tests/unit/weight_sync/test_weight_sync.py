"""Both kinds of weight sync keep the same promises."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch

from vcpo.errors import ConfigError, WeightSyncError
from vcpo.weight_sync import WEIGHT_SYNCS, make_publisher, open_reader, weights_fingerprint

KINDS = sorted(WEIGHT_SYNCS)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def test_a_reader_gets_the_newest_complete_weights_with_their_version(kind, tmp_path, weights):
    publisher = make_publisher(kind, tmp_path, weights(0))
    reader = open_reader(json.loads(json.dumps(publisher.address())))
    assert reader.newest() is None
    with pytest.raises(WeightSyncError, match="no weights have been published"):
        reader.load()
    for version in (0, 1, 5):
        publisher.publish(weights(version + 0.5), version)
        assert reader.newest() == version
        named, got = reader.load()
        assert got == version
        expected = weights(version + 0.5)
        del expected["head"]  # tied: its storage was published once
        assert set(named) == set(expected)
        for name, tensor in expected.items():
            assert named[name].dtype == tensor.dtype
            assert torch.equal(named[name], tensor)
    reader.close()
    publisher.close()


def test_what_was_loaded_does_not_change_with_later_versions(kind, tmp_path, weights):
    publisher = make_publisher(kind, tmp_path, weights(0))
    reader = open_reader(publisher.address())
    publisher.publish(weights(1), 1)
    named, _ = reader.load()
    for version in range(2, 6):
        publisher.publish(weights(version), version)
    assert torch.equal(named["embedding"], torch.ones(5, 3))


def test_what_was_published_does_not_change_with_the_learners_tensors(kind, tmp_path, weights):
    publisher = make_publisher(kind, tmp_path, weights(0))
    mine = weights(1)
    publisher.publish(mine, 1)
    mine["embedding"].zero_()
    assert torch.equal(open_reader(publisher.address()).load()[0]["embedding"], torch.ones(5, 3))


def test_versions_may_only_grow(kind, tmp_path, weights):
    publisher = make_publisher(kind, tmp_path, weights(0))
    publisher.publish(weights(1), 3)
    for version in (3, 2):
        with pytest.raises(WeightSyncError, match=f"versions may only grow: 3 is published, got {version}"):
            publisher.publish(weights(2), version)
    assert torch.equal(open_reader(publisher.address()).load()[0]["embedding"], torch.ones(5, 3))


def test_other_weights_are_refused_by_name_before_anything_is_written(kind, tmp_path, weights):
    publisher = make_publisher(kind, tmp_path, weights(0))
    publisher.publish(weights(1), 1)
    good = weights(2)
    for bad, message in [
        ({k: v for k, v in good.items() if k != "half"}, "weights lack 'half'"),
        (
            {**good, "half": torch.zeros(8, dtype=torch.bfloat16)},
            r"'half' is \[8\] torch.bfloat16, .* for \[7\] bfloat16",
        ),
        ({**good, "double": torch.zeros(2, 2)}, r"'double' is \[2, 2\] torch.float32, .* float64"),
        ({**good, "extra": torch.zeros(2)}, "weights have 'extra', which was not there"),
        ({**good, "head": torch.zeros(5, 3)}, "weights have 'head', which was not there"),
    ]:
        with pytest.raises(WeightSyncError, match=message):
            publisher.publish(bad, 2)
    reader = open_reader(publisher.address())
    assert reader.newest() == 1
    assert torch.equal(reader.load()[0]["half"], torch.ones(7, dtype=torch.bfloat16))


def test_a_reader_for_another_model_is_refused(kind, tmp_path, weights):
    publisher = make_publisher(kind, tmp_path, weights(0))
    publisher.publish(weights(1), 1)
    address = {**publisher.address(), "fingerprint": weights_fingerprint({"other": torch.zeros(2)})}
    with pytest.raises(WeightSyncError, match="belong to another model"):
        open_reader(address).load()


def test_files_are_private_and_gone_after_close(kind, tmp_path, weights):
    umask = os.umask(0)
    try:
        publisher = make_publisher(kind, tmp_path / "deep" / "er", weights(0))
        publisher.publish(weights(1), 1)
    finally:
        os.umask(umask)
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert files
    assert {stat.S_IMODE(p.stat().st_mode) for p in files} == {0o600}
    publisher.close()
    publisher.close()
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_what_a_crashed_run_left_behind_is_swept_and_other_files_are_not(kind, tmp_path, weights):
    crashed = make_publisher(kind, tmp_path, weights(0))
    crashed.publish(weights(1), 9)
    left_behind = list(tmp_path.iterdir())
    assert left_behind
    (tmp_path / "metrics.jsonl").write_text("{}")
    publisher = make_publisher(kind, tmp_path, weights(0))
    reader = open_reader(publisher.address())
    assert reader.newest() is None, "weights of the crashed run must not be taken for this run's"
    publisher.publish(weights(2), 0)
    assert reader.load()[1] == 0
    assert (tmp_path / "metrics.jsonl").exists()
    weight_files = [p for p in left_behind if p.name.startswith("weights-")]
    assert weight_files
    assert not any(p.exists() for p in weight_files)


def test_a_file_that_others_could_have_written_is_refused(kind, tmp_path, weights):
    publisher = make_publisher(kind, tmp_path, weights(0))
    publisher.publish(weights(1), 1)
    for path in tmp_path.iterdir():
        path.chmod(0o666)
    with pytest.raises(WeightSyncError, match="must be a file of this user with mode 0600"):
        open_reader(publisher.address()).load()


def test_a_link_in_place_of_a_file_is_refused(kind, tmp_path, weights):
    publisher = make_publisher(kind, tmp_path, weights(0))
    publisher.publish(weights(1), 1)
    for path in list(tmp_path.iterdir()):
        moved = path.rename(tmp_path / f"moved-{path.name}")
        path.symlink_to(moved)
    with pytest.raises(WeightSyncError, match="cannot open the weights"):
        open_reader(publisher.address()).load()


def test_unknown_kinds_and_empty_weights(tmp_path, weights):
    with pytest.raises(ConfigError, match=r"must be one of shared_memory, safetensors, got 'shared' ?.*"):
        make_publisher("shared", tmp_path, weights(0))
    with pytest.raises(ConfigError, match="did you mean 'safetensors'"):
        make_publisher("safetensor", tmp_path, weights(0))
    with pytest.raises(WeightSyncError, match="needs the key 'kind'"):
        open_reader({})
    with pytest.raises(WeightSyncError, match="empty set of weights"):
        make_publisher("shared_memory", tmp_path, {})


def test_the_fingerprint_knows_names_shapes_dtypes_and_nothing_else(weights):
    base = weights_fingerprint(weights(0))
    assert weights_fingerprint(weights(1)) == base
    untied = weights(0)
    del untied["head"]
    assert weights_fingerprint(untied) == base
    assert weights_fingerprint(dict(reversed(untied.items()))) == base
    assert weights_fingerprint({**untied, "half": torch.zeros(7)}) != base
    assert weights_fingerprint({**untied, "double": torch.zeros(4, dtype=torch.float64)}) != base


def test_safetensors_keeps_two_versions_and_retries_when_its_file_was_replaced(tmp_path, weights, monkeypatch):
    publisher = make_publisher("safetensors", tmp_path, weights(0))
    reader = open_reader(publisher.address())
    for version in range(5):
        publisher.publish(weights(version), version)
        assert len(list(tmp_path.glob("*.safetensors"))) == min(2, version + 1)
    pointer, calls = reader._pointer, []

    def slow_pointer():
        named = pointer()
        if not calls:  # the reader has read the name; now the learner publishes twice
            publisher.publish(weights(5), 5)
            publisher.publish(weights(6), 6)
        calls.append(named)
        return named

    monkeypatch.setattr(reader, "_pointer", slow_pointer)
    named, version = reader.load()
    assert (version, len(calls)) == (6, 2)
    assert torch.equal(named["embedding"], torch.full((5, 3), 6.0))


@pytest.mark.parametrize("name", ["../weights-1.safetensors", "/etc/weights-1.safetensors", "model.bin"])
def test_a_pointer_that_leads_elsewhere_is_refused(name, tmp_path, weights):
    publisher = make_publisher("safetensors", tmp_path, weights(0))
    publisher.publish(weights(1), 1)
    (tmp_path / "newest-weights.json").write_text(json.dumps({"file": name, "policy_version": 2}))
    with pytest.raises(WeightSyncError, match="is not a weight file of that folder"):
        open_reader(publisher.address()).load()


def test_a_full_disk_is_an_error_when_the_run_starts(tmp_path, weights, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightSyncError, match=r"cannot reserve .* No space left on device"):
        make_publisher("shared_memory", tmp_path, weights(0))
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_something_else_is_refused(tmp_path):
    path: Path = tmp_path / "weights-x.shm"
    path.write_bytes(b"x" * 5000)
    path.chmod(0o600)
    with pytest.raises(WeightSyncError, match="is not a file of published weights"):
        open_reader({"kind": "shared_memory", "path": str(path), "fingerprint": "0"})
    path.write_bytes(b"")
    with pytest.raises(WeightSyncError, match="is empty"):
        open_reader({"kind": "shared_memory", "path": str(path), "fingerprint": "0"})
    path.unlink()
    with pytest.raises(WeightSyncError, match="there are no weights at"):
        open_reader({"kind": "shared_memory", "path": str(path), "fingerprint": "0"})
