"""JSON messages over a socket, neither side ever waiting for the other: 4 bytes of length, then the JSON text."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("!I")
_CHUNK = 1 << 18


class ChannelClosed(Exception):
    """The other side is gone: nothing sent now would arrive."""


class JsonChannel:
    """One end of a connected socket. `send` keeps what the other side is not ready to take, later calls pass it on."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._unsent = bytearray()
        self._unread = bytearray()
        self.closed = False
        """True once the other side closed and everything it had sent was received."""

    def fileno(self) -> int:
        """For select; -1 after `close`."""
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something left to do."""
        return bool(self._unsent)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, or as much of it as goes now. Raises ChannelClosed when the other side is gone."""
        data = json.dumps(message, separators=(",", ":")).encode()
        self._unsent += _LENGTH.pack(len(data)) + data
        self.flush()

    def flush(self) -> None:
        """Pass on what is unsent, as far as it goes now. Raises ChannelClosed when the other side is gone."""
        try:
            while self._unsent:
                sent = self._sock.send(memoryview(self._unsent)[:_CHUNK])
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            raise ChannelClosed from None

    def flush_within(self, timeout_s: float) -> None:
        """Pass on everything that is unsent, or give up after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        self.flush()
        while self._unsent and (left := deadline - time.monotonic()) > 0:
            wait_for([self], left, read=False)
            self.flush()

    def receive(self) -> list[dict[str, Any]]:
        """All messages that have arrived whole; never waits. Sets `closed` at the end of the stream."""
        try:
            while data := self._sock.recv(_CHUNK):
                self._unread += data
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        return self._messages()

    def wait(self, timeout_s: float) -> None:
        """Return when something arrived or can be passed on, or after `timeout_s` seconds."""
        wait_for([self], timeout_s)

    def close(self) -> None:
        """Close this end; the other side sees the end of the stream."""
        self._sock.close()
        self.closed = True

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        at = 0
        while len(self._unread) - at >= _LENGTH.size:
            end = at + _LENGTH.size + _LENGTH.unpack_from(self._unread, at)[0]
            if end > len(self._unread):
                break
            messages.append(json.loads(self._unread[at + _LENGTH.size : end]))
            at = end
        del self._unread[:at]
        return messages


def wait_for(channels: Sequence[JsonChannel], timeout_s: float, *, read: bool = True) -> None:
    """Return when something arrived on one of the channels (if `read`) or can be passed on, or after `timeout_s`."""
    # Not select.select, which refuses file numbers from 1024 on.
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            events = (selectors.EVENT_READ if read else 0) | (selectors.EVENT_WRITE if channel.has_unsent else 0)
            with contextlib.suppress(ValueError, KeyError, OSError):  # closed by another thread meanwhile
                selector.register(channel, events)
        selector.select(max(0.0, timeout_s))
