"""VarianceControl: the step size and the baseline of VCPO inside any torch training loop (arXiv 2602.17616).

    with vc.batch(rewards, group_ids, action_lengths):
        for rows in micro_batches:
            with vc.forward():
                logits = model(ids[rows], attention_mask=am[rows]).logits
            lp, score_sq = token_logprobs(logits, ids[rows], temperature=T, with_score_sq=True)
            vc.backward(lp, sampler_lp[rows], mask[rows], rows=rows, score_sq=score_sq)
    report = vc.step()

The algebra. With c_i = factor_i (R_i - b), the gradient sum_i c_i grad L_i is linear in b, so a group whose members come
in different micro-batches or ranks sends its part that does not need b to `.grad` at once and keeps
S = sum_i factor_i grad L_i until its last member came; then `.grad` receives the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.parallel
from torch import Tensor

from vcpo import core
from vcpo import score_norms as norms
from vcpo.batch import Batch
from vcpo.core.masking import masked_sum
from vcpo.distributed import (
    ProcessGroup,
    check_micro_batch,
    check_sharding,
    gather_rows,
    sum_gradients,
    sum_over_ranks_not_mean,
)
from vcpo.errors import BatchError, ConfigError
from vcpo.learner.assembly import Assembly
from vcpo.learner.baseline_rule import BaselineRule
from vcpo.learner.clipping import GradientClip, global_norm, scale_gradients
from vcpo.learner.open_batch import COLUMNS, OpenBatch, announce
from vcpo.learner.reference import Reference
from vcpo.learner.scaled_lr import scaled_lr
from vcpo.learner.score_source import ScoreSource
from vcpo.learner.settings import check_settings
from vcpo.learner.update_report import StepOutcome, make_report, row_figures
from vcpo.metrics import UpdateReport

Rows = Tensor | Sequence[int]


class VarianceControl:
    """Scales the learning rate by the effective sample size and subtracts the minimum-variance baseline.

    One optimizer batch at a time: announce it with `batch`, hand in every row once through `backward` (or `advantages`
    with a loss of your own), then `step`. Rows may come in any number of micro-batches, in any order, and a group may be
    cut by a micro-batch or a rank: the result is the same (law 4). Gradients are cleared when a batch opens.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        score_norms: str = "auto",
        baseline: str = "optimal",
        weights: str = "paper",
        weight_treatment: str = "sequence_truncate",
        cap: float = 8.0,
        step_control: str = "ess",
        reference: float | str = 1.0,
        rule: Literal["sqrt", "linear"] = "sqrt",
        apply: Literal["lr", "gradient"] = "lr",
        scale_rewards: str = "group",
        std_eps: float = 0.0,
        aggregation: str = "seq_mean_token_mean",
        max_grad_norm: float | Literal["running_median"] | None = 1.0,
        baseline_scope: Literal["group", "batch"] = "group",
        constant_length: int | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        """Args:
        model: the policy being trained, not wrapped in DDP (gradients are summed over ranks here, once a step).
        score_norms: how ||grad log pi(trajectory)|| is found: auto, exact, two_pass, logit, length, loop.
        baseline: optimal (arXiv 2602.17616), group_mean (GRPO), leave_one_out (RLOO), length_weighted (OPO).
        weights: what the optimal baseline weighs by: paper (w), estimator (w^ / L), reference (w w^).
        weight_treatment, cap: what multiplies each token's term: a name of `vcpo.core.weight_treatments`.
        step_control: ess (lr_scale = min(1, ess_ratio / reference)^p) or none.
        reference: ess_ratio that counts as on-policy, in (0, 1], or auto (needs `policy_lags` in `batch`).
        rule: p = 1/2 (sqrt, for Adam) or 1 (linear, for SGD).
        apply: scale the lr for the step, or the clipped gradient before the optimizer's moments.
        scale_rewards, std_eps: divide advantages by the group's or batch's population std + std_eps, or not (none).
        aggregation: how token terms are averaged: a name of `vcpo.core.aggregations`; always over the optimizer batch.
        max_grad_norm: clip the global norm: a number, running_median, or None.
        baseline_scope: one baseline per group, or one for the whole batch (then scale_rewards is batch or none).
        constant_length: tokens; the divisor of aggregation seq_mean_token_sum_norm.
        process_group: data-parallel ranks; None is torch's default group when one is initialised.

        A model under FSDP2 (`fully_shard` over the data-parallel ranks) is told to sum gradients instead of averaging them.
        There every rank runs the same number of micro-batches, and with baseline="optimal" every group is whole in one of
        them; else BatchError on every rank. FSDP1, tensor parallelism and a mesh of other ranks are refused.

        Raises ConfigError (a ValueError) when an argument is unknown or two do not go together.
        """
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise ConfigError(
                "pass the model inside DDP (ddp.module): VarianceControl sums gradients over ranks itself"
            )
        check_settings(
            baseline=baseline,
            weights=weights,
            weight_treatment=weight_treatment,
            step_control=step_control,
            rule=rule,
            apply=apply,
            scale_rewards=scale_rewards,
            aggregation=aggregation,
            baseline_scope=baseline_scope,
            constant_length=constant_length,
        )
        self.model = model
        self.optimizer = optimizer
        check_sharding(model, process_group)
        sum_over_ranks_not_mean(model)
        self._scores = ScoreSource(model, score_norms, process_group)
        self.weight_treatment = weight_treatment
        self.cap = float(cap)
        self._rule = BaselineRule(baseline, weights, self.cap, by_length=aggregation == "seq_mean_token_mean")
        self.step_control = step_control
        self.scaling_rule = rule
        self.apply = apply
        self.scale_rewards = scale_rewards
        self.std_eps = std_eps
        self.aggregation = aggregation
        self.baseline_scope = baseline_scope
        self.constant_length = constant_length
        self.process_group = process_group
        self._clip = GradientClip(max_grad_norm)
        self._reference = Reference(reference)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._open: OpenBatch | None = None
        self._assembly = Assembly(self._rule, model)
        self._steps = 0
        self._version = 0

    # ------------------------------------------------------------------ the batch

    @property
    def needs_score_sq(self) -> bool:
        """Whether `backward` wants `score_sq` (the second result of token_logprobs)."""
        return self._rule.optimal and self._scores.method == "logit"

    @property
    def score_norms(self) -> str:
        """The method in use: exact gives way to two_pass and loop where its self-check fails."""
        return self._scores.method

    def check_score_norms(self, batch: Batch) -> None:
        """The start-up self-check on a batch, before the first update: norms and assembled gradient against plain autograd.

        One ragged trajectory runs alone, so that a forward which mixes trajectories is found too. A method that fails
        gives way to the next of exact, two_pass, loop, with a warning that names the parameter. Does nothing where no
        score norm is needed, and nothing the second time. `backward` checks what it can see by itself.
        """
        if self._rule.optimal:
            self._scores.check(batch)

    @property
    def normalizer(self) -> float:
        """What a loss of your own should divide by: tokens of the optimizer batch for token_mean, else its trajectories."""
        known = self._the_open().known
        return float(known.tokens if self.aggregation == "token_mean" else known.size)

    @contextmanager
    def batch(
        self, rewards: Tensor, group_ids: Tensor, action_lengths: Tensor, policy_lags: Tensor | None = None
    ) -> Iterator[None]:
        """Announce this rank's whole optimizer batch: [n] rewards (NaN: unscorable), [n] group ids, [n] action tokens.

        policy_lags: [n] versions between the learner and the row's oldest token; needed by reference="auto".
        Clears gradients. If the block raises, the batch is forgotten and gradients are cleared again. Collective over ranks.
        """
        if self._open is not None:
            raise BatchError("a batch is already open: call vc.step() before announcing the next one")
        if self._reference.needs_lags and policy_lags is None:
            raise BatchError('reference="auto" needs policy_lags in vc.batch: it calibrates on trajectories at lag 0')
        for name, value in (("group_ids", group_ids), ("action_lengths", action_lengths), ("policy_lags", policy_lags)):
            if value is not None and value.shape != rewards.shape:
                raise BatchError(
                    f"{name} must have the shape of rewards {tuple(rewards.shape)}, got {tuple(value.shape)}"
                )
        known, offset = announce(
            rewards.detach(),
            group_ids,
            action_lengths,
            policy_lags,
            scope=self.baseline_scope,
            scale_rewards=self.scale_rewards,
            std_eps=self.std_eps,
            aggregation=self.aggregation,
            constant_length=self.constant_length,
            process_group=self.process_group,
        )
        if known.size == 0:
            raise BatchError("an optimizer batch needs at least one trajectory on some rank")
        fixed = (
            None
            if self._rule.optimal
            else self._rule.per_row(known.rewards, known.baseline_ids, known.lengths, known.lengths)
        )
        opened = OpenBatch(known, offset, len(rewards), fixed)
        self._agree(opened)
        self._open = opened
        self._assembly = Assembly(self._rule, self.model)
        self.optimizer.zero_grad(set_to_none=True)
        try:
            yield
        except BaseException:
            self._forget()
            raise

    def forward(self, segments: Tensor | None = None) -> AbstractContextManager[Any]:
        """Run the model's forward inside this block: it arms the taps where the score norms need them.

        segments: [1, total] int64 where trajectories are packed end to end in one row: for each token its position
        among the `rows` given to `backward`, -1 for padding. Without it every row of the forward is one trajectory.
        """
        self._the_open()
        if not self._rule.optimal or not self._scores.taps_model:
            return nullcontext()
        return self._scores.armed(segments)

    def backward(
        self,
        learner_logprobs: Tensor,
        sampler_logprobs: Tensor,
        action_mask: Tensor,
        *,
        rows: Rows,
        score_sq: Tensor | None = None,
        extra_loss: Tensor | None = None,
    ) -> None:
        """Take in one micro-batch: its score norms, weights and baselines, and its share of the gradient.

        learner_logprobs [m, s] with graph; sampler_logprobs, action_mask [m, s]; rows [m]: which rows of the announced
        batch these are. extra_loss: a scalar added as it is (KL, entropy), divided by you. Values at masked positions
        never matter. BatchError when a row came twice, is out of range, or has another number of actions than announced.
        """
        open_batch = self._the_open()
        at, treated = self._take_in(open_batch, rows, learner_logprobs, sampler_logprobs, action_mask)
        self._agree(open_batch, at)
        if self._one_backward(learner_logprobs, action_mask, treated, extra_loss):
            self._backward_once(open_batch, at, learner_logprobs, action_mask, treated)
        else:
            self._record_norms(open_batch, at, learner_logprobs, action_mask, score_sq)
            self._backward_after_norms(open_batch, at, learner_logprobs, action_mask, treated, extra_loss)
        self._scores.release()

    def _one_backward(
        self, learner_logprobs: Tensor, action_mask: Tensor, treated: Tensor, extra_loss: Tensor | None
    ) -> bool:
        """Whether the loss is sum_i c_i L_i, one factor per trajectory, and norms can come from its own backward."""
        linear = extra_loss is None and treated.shape[1] == 1 and learner_logprobs.requires_grad
        return self._rule.optimal and linear and self._scores.single_pass_ready(learner_logprobs, action_mask)

    def _backward_once(
        self, open_batch: OpenBatch, at: Tensor, learner_logprobs: Tensor, action_mask: Tensor, treated: Tensor
    ) -> None:
        plan = self._assembly.plan(open_batch, at, treated[:, 0])
        found = self._scores.single_pass(learner_logprobs, action_mask, list(plan.shares.values()))
        weighted = treated[:, 0] * masked_sum(learner_logprobs.detach(), action_mask)
        score_norm = norms.norms_from_squares(found.squares)
        open_batch.record(at, {"score_norm": score_norm, "weighted_logprob": weighted})
        self._assembly.settle(open_batch, at, plan, found)

    def _backward_after_norms(
        self,
        open_batch: OpenBatch,
        at: Tensor,
        learner_logprobs: Tensor,
        action_mask: Tensor,
        treated: Tensor,
        extra_loss: Tensor | None,
    ) -> None:
        sums = masked_sum(treated * core.masked_fill(learner_logprobs, action_mask), action_mask)
        open_batch.record(at, {"weighted_logprob": sums.detach()})
        coefficients, releases = self._assembly.coefficients(open_batch, at, sums)
        loss = -(coefficients.to(sums.dtype) * sums).sum()
        if extra_loss is not None:
            open_batch.extra_loss += float(extra_loss.detach())
            loss = loss + extra_loss
        loss.backward()
        self._assembly.release(releases)

    def advantages(
        self,
        learner_logprobs: Tensor,
        sampler_logprobs: Tensor,
        action_mask: Tensor,
        *,
        rows: Rows,
        score_sq: Tensor | None = None,
    ) -> Tensor:
        """(R - b) / std for one micro-batch, [m], detached, for a loss of your own; 0 where nothing can be learnt.

        You call backward on your loss (divide by `vc.normalizer`); `step` then scales, clips and steps as usual. With
        baseline="optimal" each group must come whole in one micro-batch: BatchError otherwise.
        """
        open_batch = self._the_open()
        at, _ = self._take_in(open_batch, rows, learner_logprobs, sampler_logprobs, action_mask)
        self._agree(open_batch, at)
        self._record_norms(open_batch, at, learner_logprobs, action_mask, score_sq)
        if self._rule.optimal and bool(self._assembly.cut(open_batch, at).any()):
            raise BatchError(
                'with a loss of your own and baseline="optimal" every group must be whole in one micro-batch; '
                "use larger micro-batches, vc.backward, or another baseline"
            )
        with torch.no_grad():
            local = open_batch.local
            advantage = (local("rewards")[at] - self._assembly.baseline_of(open_batch, at)) / local("scales")[at]
            dead = (local("factors")[at] == 0) | core.quarantined(open_batch.recorded("log_weight")[at])
            advantage = torch.where(dead, 0.0, advantage)
            open_batch.record(at, {"weighted_logprob": masked_sum(learner_logprobs.detach(), action_mask)})
        return advantage.to(learner_logprobs.dtype)

    # ------------------------------------------------------------------ the step

    def step(self) -> UpdateReport:
        """Close the batch: finish groups that span ranks, sum gradients over ranks, clip, scale, step, restore the lr.

        Raises BatchError when an announced row never came. A step whose ess_ratio is 0, or whose gradient is not a
        number, is skipped: `report.skipped` says why, and the version does not rise. Collective over ranks.
        """
        open_batch = self._the_open()
        missing = open_batch.missing()
        if missing:
            self._forget()
            raise BatchError(
                f"rows of the optimizer batch never came: {missing[:8]} of {open_batch.size}; call vc.backward for every row"
            )
        table, _ = gather_rows(open_batch.table, self.process_group)
        self._assembly.finish(open_batch, table)
        sum_gradients(self._parameters, self.process_group)
        outcome = self._take_step(open_batch, table)
        known = open_batch.known
        baseline = open_batch.fixed_baseline
        if baseline is None:
            baseline = self._rule.per_row(known.rewards, known.baseline_ids, known.lengths, table)
        report = make_report(open_batch, table, baseline, outcome, cap=self.cap)
        self._open = None
        return report

    def _take_step(self, open_batch: OpenBatch, table: Tensor) -> StepOutcome:
        log_weights = table[:, COLUMNS.index("log_weight")]
        moments = core.WeightMoments.from_log_weights(log_weights)
        self._observe_reference(open_batch, log_weights)
        reference = self._reference.value
        ratio = float(moments.ess_ratio)
        scale = core.lr_scale(ratio, reference=reference, rule=self.scaling_rule) if self.step_control == "ess" else 1.0
        grad_norm = global_norm(self._parameters)
        bound = self._clip.bound()
        skipped = _why_skip(open_batch.known.tokens, ratio, grad_norm)
        clipped = False
        if skipped is None:
            self._clip.observe(grad_norm)
            clipped = bound is not None and grad_norm > bound
            if clipped and bound is not None:
                scale_gradients(self._parameters, bound / grad_norm)
            if self.apply == "gradient":
                scale_gradients(self._parameters, scale)
            with scaled_lr(self.optimizer, scale if self.apply == "lr" else 1.0):
                self.optimizer.step()
            self._version += 1
        self.optimizer.zero_grad(set_to_none=True)
        self._steps += 1
        return StepOutcome(
            policy_version=self._version,
            step=self._steps,
            skipped=skipped,
            moments=moments,
            lr_scale=0.0 if skipped else scale,
            lr=float(self.optimizer.param_groups[0]["lr"]),
            scales_lr=self.apply == "lr",
            grad_norm=grad_norm,
            grad_clip=bound,
            grad_clipped=clipped,
            reference=reference,
        )

    # ------------------------------------------------------------------ state

    @property
    def policy_version(self) -> int:
        """Steps taken; a skipped step does not count."""
        return self._version

    def state_dict(self) -> dict[str, Any]:
        """Everything that outlives a step, as plain JSON values. BatchError while a batch is open."""
        if self._open is not None:
            raise BatchError("call vc.step() before state_dict(): an open batch cannot be saved")
        return {
            "format": 1,
            "steps": self._steps,
            "policy_version": self._version,
            "clip": self._clip.state_dict(),
            "reference": self._reference.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        if state.get("format") != 1:
            raise ConfigError(f"VarianceControl state has format {state.get('format')!r}; this version reads format 1")
        self._steps = state["steps"]
        self._version = state["policy_version"]
        self._clip.load_state_dict(state["clip"])
        self._reference.load_state_dict(state["reference"])

    # ------------------------------------------------------------------ inside

    def _the_open(self) -> OpenBatch:
        if self._open is None:
            raise BatchError(
                "no batch is open: announce it first with `with vc.batch(rewards, group_ids, action_lengths):`"
            )
        return self._open

    def _forget(self) -> None:
        self._open = None
        self._scores.release()
        self.optimizer.zero_grad(set_to_none=True)

    def _agree(self, open_batch: OpenBatch, at: Tensor | None = None) -> None:
        """With sharded parameters ranks go in step: refuse on all of them what one could not go on with."""
        if self._assembly.sharded:
            cut = at is not None and self._rule.optimal and bool(self._assembly.cut(open_batch, at).any())
            left = len(open_batch.missing())
            check_micro_batch(left, cut=cut, device=open_batch.table.device, group=self.process_group)

    def _take_in(
        self, open_batch: OpenBatch, rows: Rows, learner: Tensor, sampler: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Check the rows and record their figures; also what multiplies their tokens, [m, s] or [m, 1]."""
        at = open_batch.enter(rows, len(learner))
        lengths, announced = mask.bool().sum(1), open_batch.local("lengths")[at]
        if not bool((lengths == announced).all()):
            raise BatchError(
                f"action_mask has {lengths.tolist()} actions per row, but vc.batch announced {announced.tolist()}"
            )
        figures = row_figures(learner.detach(), sampler, mask)
        treated = core.weight_treatments[self.weight_treatment](learner.detach(), sampler, mask, cap=self.cap)
        # lw = -inf is weight 0 at every level: such a row has no part in the gradient of any treatment.
        treated = torch.where(figures["log_weight"].isneginf()[:, None], 0.0, treated)
        open_batch.record(at, {**figures, "treated_weight": treated.amax(1)})
        return at, treated

    def _record_norms(
        self, open_batch: OpenBatch, at: Tensor, learner: Tensor, mask: Tensor, score_sq: Tensor | None
    ) -> None:
        if self._rule.optimal:
            open_batch.record(at, {"score_norm": self._scores.of_rows(learner, mask, score_sq)})

    def _observe_reference(self, open_batch: OpenBatch, log_weights: Tensor) -> None:
        if not self._reference.needs_lags:
            return
        fresh = open_batch.known.policy_lags == 0
        if bool(fresh.any()):
            moments = core.WeightMoments.from_log_weights(log_weights[fresh])
            self._reference.observe(
                float(moments.log_m1), float(moments.log_m2), int(fresh.sum()), open_batch.known.size
            )


def _why_skip(tokens: int, ess_ratio: float, grad_norm: float) -> str | None:
    if tokens == 0:
        return "the batch has no action token"
    if not ess_ratio > 0:
        return "ess_ratio is 0: no trajectory carries weight"
    if not grad_norm < float("inf"):
        return f"grad_norm is {grad_norm}: the gradient is not a number"
    return None
