"""A sampler in a process of its own: `python -m vcpo.rollout.sampler_process FD`, started by ProcessSamplerPool.

FD is one end of a socket. The first message from the coordinator says what to load; then, until that socket closes,
requests come in and events go out:

    in   {"type": "init", ...}  {"type": "submit", "requests": [...]}  {"type": "abort", "group_ids": [...]}
    out  {"type": "ready"}  {"type": "heartbeat"}  {"type": "started", "groups": [[id, version], ...]}
         {"type": "completed", "result": {...}}  {"type": "aborted", "request": {...}}
         {"type": "error", "traceback": "..."} last of all, when it ends by itself

A heartbeat is sent only between decode steps: one that hangs inside a step falls silent, and the coordinator notices.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vcpo.errors import ConfigError
from vcpo.rollout.channel import ChannelClosed, JsonChannel
from vcpo.rollout.requests import GroupRequest, SamplingParams

if TYPE_CHECKING:
    from vcpo.rollout.engine import EmbeddedEngine
    from vcpo.weight_sync import WeightReader

_INIT_TIMEOUT_S = 60.0


class _Ended(Exception):
    """The coordinator closed the socket."""


def main(argv: list[str] | None = None) -> int:
    """Run one sampler until its coordinator is gone; exit status 0 then, 1 after an error (which was reported)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to handle: it ends its samplers
    fd = int((sys.argv[1:] if argv is None else argv)[0])
    channel = JsonChannel(socket.socket(fileno=fd))
    try:
        serve(channel)
    except (_Ended, ChannelClosed):
        return 0
    except BaseException:
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        try:
            channel.send({"type": "error", "traceback": text})
            channel.flush_within(5.0)
        except ChannelClosed:
            pass
        return 1
    return 0


def serve(channel: JsonChannel) -> None:
    """Load what the first message says, then sample until the socket closes."""
    inbox = _receive_init(channel)
    init = inbox.pop(0)
    _end_with_parent(init["parent_pid"])
    engine, reader = _load(init)
    channel.send({"type": "ready", "policy_version": engine.policy_version})
    last_sent = time.monotonic()
    while True:
        for message in inbox:
            _handle(message, engine, channel)
        if engine.num_active:
            # After the requests were read and before they are worked on: weights published before a request was sent
            # are in use for all of it (what makes a lag bound of 0 the synchronous loop).
            _use_newest(engine, reader)
            results = engine.step()
            if started := engine.started():
                channel.send({"type": "started", "groups": started})
                last_sent = time.monotonic()
            for result in results:
                channel.send({"type": "completed", "result": result.to_json()})
                last_sent = time.monotonic()
        if time.monotonic() - last_sent >= init["heartbeat_s"] and not channel.has_unsent:
            channel.send({"type": "heartbeat"})
            last_sent = time.monotonic()
        channel.flush()
        if not engine.num_active:
            channel.wait(init["heartbeat_s"])
        inbox = _receive(channel)


def _load(init: Mapping[str, Any]) -> tuple[EmbeddedEngine, WeightReader]:
    if not os.path.isdir(init["model_dir"]):
        raise ConfigError(f"the model folder {init['model_dir']} does not exist")
    import torch
    from transformers import AutoModelForCausalLM

    from vcpo.rollout.engine import EmbeddedEngine
    from vcpo.weight_sync import open_reader

    torch.set_num_threads(init["threads"])
    torch.manual_seed(init["seed"])
    model = AutoModelForCausalLM.from_pretrained(
        init["model_dir"],
        dtype="auto",
        attn_implementation="sdpa",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,  # other formats are unpickled
    )
    params = SamplingParams.from_json(init["params"])
    pad_token_id = model.config.get_text_config(decoder=True).pad_token_id or 0  # any id: padding is masked
    engine = EmbeddedEngine(model, params, pad_token_id=pad_token_id, policy_version=init["policy_version"])
    reader = open_reader(init["weight_address"])
    _use_newest(engine, reader)
    return engine, reader


def _use_newest(engine: EmbeddedEngine, reader: WeightReader) -> None:
    newest = reader.newest()
    if newest is not None and newest > engine.policy_version:
        engine.load_weights(*reader.load())


def _handle(message: Mapping[str, Any], engine: EmbeddedEngine, channel: JsonChannel) -> None:
    if message["type"] == "submit":
        engine.submit([GroupRequest.from_json(r) for r in message["requests"]])
    elif message["type"] == "abort":
        for request in engine.abort(message["group_ids"]):
            channel.send({"type": "aborted", "request": request.to_json()})
    else:
        raise ValueError(f"unknown message {message['type']!r}: the coordinator is of another version")


def _receive_init(channel: JsonChannel) -> list[dict[str, Any]]:
    deadline = time.monotonic() + _INIT_TIMEOUT_S
    while time.monotonic() < deadline:
        if inbox := _receive(channel):
            return inbox
        channel.wait(deadline - time.monotonic())
    raise TimeoutError(f"no first message from the coordinator within {_INIT_TIMEOUT_S:g} s")


def _receive(channel: JsonChannel) -> list[dict[str, Any]]:
    messages = channel.receive()
    if channel.closed:
        raise _Ended
    return messages


def _end_with_parent(parent_pid: int) -> None:
    """Exit soon after the coordinator is gone, even from inside a step that hangs and never looks at the socket."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(1.0)
        time.sleep(2.0)  # the main thread's chance to end in order
        os._exit(0)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
