"""Learner: the algorithm box of docs/algorithm.md on a Batch, built on VarianceControl."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vcpo import core
from vcpo.batch import Batch
from vcpo.errors import ConfigError
from vcpo.forward import forward_hidden, forward_logits
from vcpo.learner.micro_batches import micro_batches
from vcpo.learner.variance_control import VarianceControl
from vcpo.metrics import UpdateReport
from vcpo.score_norms import chunked_token_logprobs


class Learner:
    """Holds the policy that is trained, its optimizer and its schedule; one `update` per optimizer batch.

    A loss that is linear in per-trajectory coefficients ("reinforce") goes through VarianceControl.backward, where groups
    may be cut; every other one gets advantages and must find each group whole when the baseline is optimal.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        variance_control: VarianceControl,
        *,
        schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
        max_tokens_per_micro_batch: int = 8192,
        loss: str = "reinforce",
        loss_options: Mapping[str, Any] | None = None,
        chunk_vocabulary: bool = False,
    ) -> None:
        """chunk_vocabulary: never hold the logits of a micro-batch whole (`score_norms.chunked_token_logprobs`): less
        memory where the vocabulary is large, about a third more time; not with score_norms="logit"."""
        if loss not in core.policy_losses:
            raise ConfigError(f"loss must be one of {', '.join(core.policy_losses)}, got {loss!r}")
        if max_tokens_per_micro_batch < 1:
            raise ConfigError(f"max_tokens_per_micro_batch must be at least 1, got {max_tokens_per_micro_batch}")
        self.model = model
        self.optimizer = optimizer
        self.variance_control = variance_control
        self.schedule = schedule
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self._loss = core.policy_losses[loss]
        self._loss_options = dict(loss_options or {})
        self.chunk_vocabulary = chunk_vocabulary
        if chunk_vocabulary and variance_control.needs_score_sq:
            raise ConfigError('chunk_vocabulary does not go with score_norms="logit", which is made of the logits')
        self._chunks_agree = False
        self._linear = bool(getattr(self._loss, "linear_in_coefficients", False))
        if self._linear and self._loss_options:
            raise ConfigError(
                f"loss {loss!r} takes its weights from variance_control (weight_treatment, cap), not from loss_options"
            )

    @property
    def policy_version(self) -> int:
        """Optimizer steps taken so far; a skipped step does not count."""
        return self.variance_control.policy_version

    def update(self, batch: Batch) -> UpdateReport:
        """One optimizer step on one batch: weights -> score norms -> baseline -> loss -> scaled step."""
        begin = time.perf_counter()
        vc = self.variance_control
        if any(float(group["lr"]) == 0.0 for group in self.optimizer.param_groups):
            warnings.warn(
                "the base learning rate is 0: this step changes nothing; check lr and lr_schedule", stacklevel=2
            )
        self.model.train()
        vc.check_score_norms(batch)
        lengths = batch.attention_mask.bool().sum(1)
        parts = micro_batches(lengths, batch.group_ids, max_tokens=self.max_tokens_per_micro_batch)
        with vc.batch(batch.rewards, batch.group_ids, batch.action_lengths, policy_lags=batch.policy_lags):
            for part in parts:
                rows = torch.tensor(part, device=batch.input_ids.device)
                self._backward(batch.rows(rows), rows)
        report = vc.step()
        if self.schedule is not None:
            self._advance_schedule()
        return replace(report, learner_s=time.perf_counter() - begin)

    def _backward(self, micro: Batch, rows: Tensor) -> None:
        vc = self.variance_control
        logprobs, score_sq = self._logprobs(micro)
        sampler, mask = micro.sampler_logprobs, micro.action_mask
        if self._linear:
            vc.backward(logprobs, sampler, mask, rows=rows, score_sq=score_sq)
            return
        advantages = vc.advantages(logprobs, sampler, mask, rows=rows, score_sq=score_sq)
        loss, _ = self._loss(
            logprobs,
            sampler,
            advantages,
            mask,
            aggregation=vc.aggregation,
            normalizer=vc.normalizer,
            **self._loss_options,
        )
        loss.backward()

    def _logprobs(self, micro: Batch) -> tuple[Tensor, Tensor | None]:
        vc, ids, temperature = self.variance_control, micro.input_ids, micro.temperature
        if self.chunk_vocabulary:
            self._check_chunks(micro)
            known = torch.where(micro.attention_mask.bool(), ids, 0)
            with vc.forward():
                hidden, head = forward_hidden(self.model, ids, micro.attention_mask)
                return chunked_token_logprobs(hidden, head, known, temperature=temperature), None
        with vc.forward():
            logits = forward_logits(self.model, ids, micro.attention_mask)
        if vc.needs_score_sq:
            return core.token_logprobs(logits, ids, temperature=temperature, with_score_sq=True)
        return core.token_logprobs(logits, ids, temperature=temperature), None

    @torch.no_grad()
    def _check_chunks(self, micro: Batch) -> None:
        """Once: what a model does to its logits behind the head would be left out in silence."""
        if self._chunks_agree:
            return
        one = micro.rows([0])
        ids = torch.where(one.attention_mask.bool(), one.input_ids, 0)
        training = self.model.training
        self.model.eval()
        hidden, head = forward_hidden(self.model, ids, one.attention_mask)
        found = chunked_token_logprobs(hidden, head, ids, temperature=one.temperature)
        logits = forward_logits(self.model, ids, one.attention_mask)
        self.model.train(training)
        true = core.token_logprobs(logits, ids, temperature=one.temperature)
        error = float(core.masked_fill(found - true, one.action_mask).abs().max())
        if not error < (0.1 if logits.dtype in (torch.bfloat16, torch.float16) else 1e-3):
            raise ConfigError(
                f"chunk_vocabulary: log-probs from the hidden states are {error:.1e} off the model's own; "
                "it does more to its logits than one linear head, set chunk_vocabulary to false"
            )
        self._chunks_agree = True

    def _advance_schedule(self) -> None:
        with warnings.catch_warnings():
            # A skipped first step makes torch believe the calls are in the wrong order; here that is meant.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
            assert self.schedule is not None
            self.schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model's weights: optimizer, schedule, variance control."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict() if self.schedule is not None else None,
            "variance_control": self.variance_control.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.optimizer.load_state_dict(state["optimizer"])
        if self.schedule is not None and state["schedule"] is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.variance_control.load_state_dict(state["variance_control"])
