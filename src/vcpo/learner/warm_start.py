"""Supervised warm start: a policy that can already do a little, trained on demonstrations and kept in a cache.

RL with a random policy sees no reward at all; a pretrained model is the usual start, and this is the small one's.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vcpo.errors import ConfigError
from vcpo.policy import Policy, forward_logits, save_policy, seeded

FORMAT_VERSION = 1
"""Counts up when the training below changes what it computes: older cache entries are then not used."""
LR_SCHEDULES = ("cosine", "constant")
_MANIFEST = "warm_start.json"
_KEY_DEMONSTRATIONS = 256
_STALE_S = 86_400

Demonstrations = Iterator[tuple[str, str]]
Report = Callable[[int, float], None]


def supervised_warm_start(
    policy: Policy,
    demonstrations: Demonstrations,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    seed: int,
    lr_schedule: str = "cosine",
    report: Report | None = None,
) -> float:
    """Train `policy` in place on (prompt, completion) texts and return the mean loss of the last tenth of the steps.

    loss = -mean log pi(token) in nats over completion tokens, EOS included; AdamW(0.9, 0.99), no weight decay, gradient
    norm clipped at 1, learning rate warmed up over a twentieth of the steps, then `lr_schedule`: "cosine" down to 0, or
    "constant". `seed` decides dropout; torch's generators and the model's mode are left as found. `report(step, loss)`
    is called once per step.
    Raises ConfigError for numbers out of range or when the demonstrations run out.
    """
    _check_numbers(steps=steps, batch_size=batch_size, lr=lr)
    if lr_schedule not in LR_SCHEDULES:
        raise ConfigError(f"lr_schedule of a warm start must be one of {', '.join(LR_SCHEDULES)}, got {lr_schedule!r}")
    model = policy.model
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    losses: list[float] = []
    training = model.training
    model.train()
    try:
        with seeded(seed, device):
            for step in range(steps):
                texts = list(islice(demonstrations, batch_size))
                if len(texts) < batch_size:
                    raise ConfigError(f"the demonstrations ran out at step {step} of {steps}: give an endless iterator")
                ids, targets = _batch(policy, texts)
                for group in optimizer.param_groups:
                    group["lr"] = lr * _schedule(step, steps, lr_schedule)
                loss = _loss(policy, ids.to(device), targets.to(device))
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.item())
                if report is not None:
                    report(step, losses[-1])
    finally:
        model.train(training)
        model.zero_grad(set_to_none=True)
    tail = losses[-max(1, steps // 10) :]
    return sum(tail) / len(tail)


def cached_warm_start(
    make_policy: Callable[[], Policy],
    demonstrations: Callable[[], Demonstrations],
    *,
    key: Mapping[str, Any],
    cache_dir: str | os.PathLike[str],
    steps: int,
    batch_size: int,
    lr: float,
    seed: int,
    lr_schedule: str = "cosine",
    report: Report | None = None,
) -> Path:
    """A Hugging Face folder with the warm-started policy: taken from `cache_dir` if it is there whole, else trained.

    The entry's name hashes everything that decides the result: the starting weights, the tokenizer, the first 256
    demonstrations, `key` (JSON: the task's name and options, noise, the demonstrations' seed), the numbers of the
    training, threads and library versions. An entry appears by one rename; a damaged one is made again.
    """
    _check_numbers(steps=steps, batch_size=batch_size, lr=lr)
    policy = make_policy()
    numbers = {"steps": steps, "batch_size": batch_size, "lr": lr, "seed": seed, "lr_schedule": lr_schedule}
    digest = _digest(policy, demonstrations(), {**numbers, "key": dict(key)})
    folder = Path(cache_dir) / f"warm-start-{digest}"
    if _is_whole(folder):
        return folder
    try:
        Path(cache_dir).mkdir(parents=True, exist_ok=True)
        _sweep(Path(cache_dir))
        making = Path(tempfile.mkdtemp(prefix=".making-", dir=cache_dir))
    except OSError as exc:
        raise ConfigError(
            f"warm start cache {str(cache_dir)!r} cannot be written ({exc}): choose another cache_dir"
        ) from exc
    try:
        loss = supervised_warm_start(policy, demonstrations(), **numbers, report=report)
        save_policy(policy, making)
        manifest = {"key": dict(key), **numbers, "final_loss": loss, "files": _file_hashes(making)}
        (making / _MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True, default=str))
        _move_into_place(making, folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


def _check_numbers(*, steps: int, batch_size: int, lr: float) -> None:
    if steps < 1 or batch_size < 1:
        raise ConfigError(
            f"a warm start needs at least 1 step and 1 demonstration per step, got {steps} and {batch_size}"
        )
    if not (lr > 0 and math.isfinite(lr)):
        raise ConfigError(f"the learning rate of a warm start must be a positive number, got {lr}")


def _schedule(step: int, steps: int, kind: str) -> float:
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _batch(policy: Policy, texts: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """[n, s] token ids padded on the right, and [n, s - 1] next tokens to learn, -100 where there is none."""
    prompts = policy.tokenizer([p for p, _ in texts])["input_ids"]
    answers = policy.tokenizer([c for _, c in texts], add_special_tokens=False)["input_ids"]
    rows = [[*p, *a, policy.eos_token_id] for p, a in zip(prompts, answers, strict=True)]
    pads = [max(map(len, rows)) - len(row) for row in rows]
    ids = [row + [policy.pad_token_id] * pad for row, pad in zip(rows, pads, strict=True)]
    # The first answer token is predicted at the last prompt token, hence the - 1.
    targets = [
        [-100] * (len(p) - 1) + row[len(p) :] + [-100] * pad for p, row, pad in zip(prompts, rows, pads, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(targets)


def _loss(policy: Policy, ids: Tensor, targets: Tensor) -> Tensor:
    # Padding is on the right and attention looks left, so no mask is needed, and without one it runs much faster.
    logits = forward_logits(policy.model, ids, torch.ones_like(ids))[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)


def _digest(policy: Policy, demonstrations: Demonstrations, settings: Mapping[str, Any]) -> str:
    import transformers

    content = hashlib.sha256()
    for name, value in sorted(policy.model.state_dict().items()):
        content.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        content.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    config = {
        k: v for k, v in policy.model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")
    }
    versions = (FORMAT_VERSION, torch.__version__, transformers.__version__, torch.get_num_threads())
    ids = (sorted(policy.tokenizer.get_vocab().items()), policy.pad_token_id, policy.eos_token_id)
    shown = list(islice(demonstrations, _KEY_DEMONSTRATIONS))
    for part in (config, versions, ids, shown, dict(settings)):
        content.update(json.dumps(part, sort_keys=True, default=str).encode())
    return content.hexdigest()[:24]


def _file_hashes(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != _MANIFEST)
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def _is_whole(folder: Path) -> bool:
    try:
        files = json.loads((folder / _MANIFEST).read_text())["files"]
        return "config.json" in files and files == _file_hashes(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _move_into_place(making: Path, folder: Path) -> None:
    if folder.exists() and not _is_whole(folder):
        os.replace(folder, making.with_name(making.name + "-torn"))
        shutil.rmtree(making.with_name(making.name + "-torn"), ignore_errors=True)
    try:
        os.rename(making, folder)
    except OSError:
        if not _is_whole(folder):  # else another process was faster, with the same result
            raise


def _sweep(cache_dir: Path) -> None:
    """Remove what processes that died in the middle left behind; a day is longer than any warm start."""
    for left in cache_dir.glob(".making-*"):
        if time.time() - left.stat().st_mtime > _STALE_S:
            shutil.rmtree(left, ignore_errors=True)
