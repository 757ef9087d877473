"""JSON messages over a socket, without ever waiting."""

from __future__ import annotations

import socket
import time

import pytest

from vcpo.rollout.channel import ChannelClosed, JsonChannel, wait_for


@pytest.fixture
def pair():
    a, b = (JsonChannel(s) for s in socket.socketpair())
    yield a, b
    a.close()
    b.close()


def test_messages_arrive_whole_and_in_order(pair):
    a, b = pair
    assert b.receive() == []
    sent = [{"type": "x", "n": i, "logprobs": [-0.1, float("nan")][: i % 2], "text": "é" * i} for i in range(20)]
    for message in sent:
        a.send(message)
    assert b.receive() == sent
    assert not b.closed


def test_a_message_larger_than_the_socket_never_blocks_the_sender(pair):
    a, b = pair
    message = {"type": "big", "data": "x" * 5_000_000}
    a.send(message)
    a.send({"type": "next"})
    assert a.has_unsent
    got = []
    while len(got) < 2:
        got += b.receive()
        a.flush()
    assert got == [message, {"type": "next"}]
    assert not a.has_unsent


def test_what_was_sent_before_the_end_is_still_received(pair):
    a, b = pair
    a.send({"type": "error"})
    a.close()
    assert b.receive() == [{"type": "error"}]
    assert b.closed
    with pytest.raises(ChannelClosed):
        b.send({"type": "too late"})


def test_half_a_message_at_the_end_is_no_message(pair):
    a, b = pair
    a._sock.send(b"\x00\x00\x00\x09{")
    a.close()
    assert b.receive() == []
    assert b.closed


def test_waiting_ends_with_news_or_in_time(pair):
    a, b = pair
    began = time.monotonic()
    wait_for([a, b], 0.05)
    assert time.monotonic() - began >= 0.04
    a.send({"type": "x"})
    b.wait(60.0)
    b.receive()
    a.close()
    b.wait(60.0)
    assert b.receive() == []
    wait_for([a, b], 0.0)  # a closed channel is passed over


def test_flush_within_gives_up(pair):
    a, _ = pair
    a.send({"data": "x" * 5_000_000})
    a.flush_within(0.05)
    assert a.has_unsent
