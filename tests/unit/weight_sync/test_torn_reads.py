"""A reader that copies while the learner publishes never sees two versions mixed."""

from __future__ import annotations

import threading

import pytest
import torch

from vcpo.errors import WeightSyncError
from vcpo.weight_sync import make_publisher, open_reader


class Interrupted:
    """A buffer that lets something happen in the middle of every copy of a slot."""

    def __init__(self, inner, what):
        self.inner, self.what = inner, what

    def __getitem__(self, at):
        length = at.stop - at.start
        first = bytes(self.inner[at.start : at.start + length // 2])
        self.what()
        return first + bytes(self.inner[at.start + length // 2 : at.stop])


def test_a_slot_that_was_written_during_the_copy_is_copied_again(tmp_path):
    big = torch.zeros(1000)
    publisher = make_publisher("shared_memory", tmp_path, {"w": big})
    reader = open_reader(publisher.address())
    publisher.publish({"w": big + 1}, 1)
    versions = iter([2, 3])

    def publish_twice_once():
        for version in versions:  # the second one comes back to the slot that is being copied
            publisher.publish({"w": big + version}, version)

    reader._bytes = Interrupted(reader._bytes, publish_twice_once)
    named, version = reader.load()
    assert version == 3
    assert torch.equal(named["w"], big + 3)


def test_one_new_version_during_the_copy_leaves_the_copied_slot_alone(tmp_path):
    big = torch.zeros(1000)
    publisher = make_publisher("shared_memory", tmp_path, {"w": big})
    reader = open_reader(publisher.address())
    publisher.publish({"w": big + 1}, 1)
    versions = iter([2])
    reader._bytes = Interrupted(reader._bytes, lambda: [publisher.publish({"w": big + v}, v) for v in versions])
    named, version = reader.load()
    assert version == 1
    assert torch.equal(named["w"], big + 1)


def test_a_writer_that_died_in_the_middle_leaves_the_last_version_readable(tmp_path):
    publisher = make_publisher("shared_memory", tmp_path, {"w": torch.zeros(10)})
    reader = open_reader(publisher.address())
    publisher.publish({"w": torch.ones(10)}, 1)

    class Dying:
        def copy_(self, _):
            raise KeyboardInterrupt

    idle = 1 - publisher._words[20]
    publisher._slots[idle]["w"] = Dying()
    with pytest.raises(KeyboardInterrupt):
        publisher.publish({"w": torch.full((10,), 2.0)}, 2)
    assert reader.newest() == 1
    assert torch.equal(reader.load()[0]["w"], torch.ones(10))


def test_reading_gives_up_in_bounded_time(tmp_path):
    publisher = make_publisher("shared_memory", tmp_path, {"w": torch.zeros(10)})
    reader = open_reader(publisher.address())
    publisher.publish({"w": torch.ones(10)}, 1)
    publisher._words[16 + publisher._words[20]] += 1  # for ever being written
    with pytest.raises(WeightSyncError, match=r"overwritten while being read for 0\.05 s"):
        reader.load(timeout_s=0.05)


@pytest.mark.parametrize("kind", ["shared_memory", "safetensors"])
def test_a_thread_that_publishes_as_fast_as_it_can(kind, tmp_path):
    size = 50_000
    publisher = make_publisher(kind, tmp_path, {"a": torch.zeros(size), "b": torch.zeros(size)})
    publisher.publish({"a": torch.zeros(size), "b": torch.zeros(size)}, 0)
    reader = open_reader(publisher.address())
    stop = threading.Event()

    def publish():
        version = 0
        while not stop.is_set():
            version += 1
            publisher.publish(
                {"a": torch.full((size,), float(version)), "b": torch.full((size,), float(version))}, version
            )

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    try:
        last = -1
        for _ in range(150):
            least = reader.newest()
            named, version = reader.load()
            assert set(named["a"].unique().tolist()) == set(named["b"].unique().tolist()) == {float(version)}
            assert version >= least
            assert version >= last
            last = version
    finally:
        stop.set()
        thread.join()
