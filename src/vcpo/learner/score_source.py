"""Where a batch's score norms come from: the method asked for, checked once, and what takes its place where it fails."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vcpo import score_norms as norms
from vcpo.batch import Batch
from vcpo.core.masking import masked_sum
from vcpo.distributed import ProcessGroup, is_sharded
from vcpo.errors import BatchError, ConfigError, ScoreNormError

COSTS = {
    "two_pass": "the same numbers, about 0.6 of a step more",
    "loop": "the same numbers, one more backward per trajectory",
}
"""What a fallback costs, for its warning."""


class ScoreSource:
    """Score norms of the rows that come through VarianceControl, by one method of `vcpo.score_norms`.

    "exact" and "two_pass" rest on taps on the model's layers. Both are held against plain autograd before their first
    result is used; one that fails is replaced by the next of exact -> two_pass -> loop, with a warning.
    """

    def __init__(self, model: nn.Module, name: str, process_group: ProcessGroup | None = None) -> None:
        self.model = model
        self._group = process_group
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._sharded = any(is_sharded(p) for p in self._parameters.values())
        self.method = _for_sharded(name) if self._sharded else norms.resolve(name)
        """loop, two_pass, exact, logit or length: what is in use now."""
        self._taps: norms.Taps | None = None
        self._checked: set[str] = set()

    @property
    def taps_model(self) -> bool:
        """Whether the forward must run under `armed`."""
        return self.method in ("exact", "two_pass")

    @contextmanager
    def armed(self, segments: Tensor | None) -> Iterator[None]:
        """The hooks stay on until `release`: checkpointing repeats forwards inside the backward."""
        try:
            if self._taps is None:
                self._taps = norms.Taps(self.model)
        except ScoreNormError as error:
            if self._sharded:
                raise
            self._fall_back(str(error), to="loop")
            yield
            return
        self._taps.arm(segments)
        try:
            yield
        finally:
            self._taps.mute()

    def release(self) -> None:
        """Take the hooks off the model and forget the forward."""
        if self._taps is not None:
            self._taps.release()

    def of_rows(self, learner_logprobs: Tensor, action_mask: Tensor, score_sq: Tensor | None) -> Tensor:
        """[m] fp64, detached; leaves .grad and the graph alone."""
        if self.method == "length":
            return norms.length_norms(action_mask)
        if self.method == "logit":
            if score_sq is None:
                raise BatchError("score_norms=logit needs score_sq: token_logprobs(..., with_score_sq=True) gives it")
            return norms.logit_norms(score_sq, action_mask)
        sums = masked_sum(learner_logprobs, action_mask)
        if self.method != "loop":
            try:
                taps = self._recorded()
                squares = taps.squared_norms(sums)
                self._check_in_graph("two_pass", taps, sums, squares, action_mask)
                return norms.norms_from_squares(squares).detach()
            except ScoreNormError as error:
                if self._sharded:
                    raise
                self._fall_back(str(error), to="loop")
        return _row_norms(sums, list(self._parameters.values()))

    def single_pass_ready(self, learner_logprobs: Tensor, action_mask: Tensor) -> bool:
        """Whether norms and gradient can come from one backward now; checks that once, and falls back where they differ."""
        if self.method != "exact":
            return False
        taps = self._recorded()
        if "exact" in self._checked:
            return True
        sums = masked_sum(learner_logprobs, action_mask)
        try:
            self._check_in_graph("exact", taps, sums, taps.squared_norms(sums), action_mask)
        except ScoreNormError as error:
            self._fall_back(str(error), to="two_pass")
            return False
        return True

    def single_pass(
        self, learner_logprobs: Tensor, action_mask: Tensor, shares: Sequence[norms.Share]
    ) -> norms.SinglePass:
        """Norms and gradient in one backward, which uses up the graph: see `Taps.single_pass`."""
        return self._recorded().single_pass(masked_sum(learner_logprobs, action_mask), shares)

    def check(self, batch: Batch) -> None:
        """The start-up self-check on a batch of its own: norms of one ragged trajectory alone, and the assembled gradient.

        Unlike the check in the graph it sees a forward that mixes trajectories. At most two trajectories are run.
        """
        if self._sharded:  # ranks would need the same number of forwards; the check in the graph is theirs together
            return
        while self.method in ("exact", "two_pass") and f"{self.method} alone" not in self._checked:
            try:
                found = norms.self_check(self.model, _two_rows(batch), self.method)
                _raise_unless_ok(found)
            except ScoreNormError as error:
                self._fall_back(str(error), to="two_pass" if self.method == "exact" else "loop")
            else:
                self._checked.add(f"{self.method} alone")

    def _recorded(self) -> norms.Taps:
        if self._taps is None:
            raise BatchError(f"score_norms={self.method} needs the model's forward inside `with vc.forward():`")
        return self._taps

    def _check_in_graph(
        self, method: str, taps: norms.Taps, sums: Tensor, squares: dict[str, Tensor], mask: Tensor
    ) -> None:
        """Once, on the first micro-batch with actions; ScoreNormError names the parameter."""
        if method in self._checked:
            return
        if self._sharded:
            found = norms.check_sharded(taps, sums, squares, mask.bool().any(1), self._group)
            if found is not None:
                _raise_unless_ok(found)
                self._checked.add(method)
            return
        lengths = mask.bool().sum(1)
        if not bool(lengths.any()):
            return
        # A ragged row and not the first one, where there is a choice: padding and row order are what goes wrong.
        order = sorted(
            range(len(lengths)), key=lambda i: (int(lengths[i]) > 0, i > 0, int(lengths[i]) < int(lengths.max()))
        )
        _raise_unless_ok(norms.check_in_graph(taps, sums, squares, order[-1], method))
        self._checked.add(method)

    def _fall_back(self, why: str, *, to: str) -> None:
        warnings.warn(
            f"score_norms={self.method} cannot be used ({why}); using {to}: {COSTS[to]}. logit or length cost next to nothing",
            stacklevel=5,
        )
        self.method = to


def _for_sharded(name: str) -> str:
    """What of the methods works where parameters live in pieces (FSDP2): ordinary backwards, taps, and the proxies."""
    if name == "loop":
        raise ConfigError('score_norms="loop" does not work with sharded parameters (FSDP2): use two_pass')
    if name == "exact":
        warnings.warn(
            f"score_norms=exact writes gradients itself, which sharded parameters (FSDP2) do not allow; using two_pass: "
            f"{COSTS['two_pass']}",
            stacklevel=4,
        )
    return "two_pass" if name in ("auto", "exact") else norms.resolve(name)


def _raise_unless_ok(found: norms.SelfCheckResult) -> None:
    if not found.ok:
        raise ScoreNormError(
            f"{found.parameter}: {found.what} is off by {found.relative_error:.1e} from plain autograd"
        )


def _two_rows(batch: Batch) -> Batch:
    """A ragged trajectory that has actions, behind another one: padding and row order are what goes wrong."""
    lengths, used = batch.action_lengths.tolist(), batch.attention_mask.bool().sum(1).tolist()
    with_actions = [i for i in range(len(batch)) if lengths[i] > 0]
    if not with_actions:
        raise ScoreNormError("the self-check needs a trajectory with action tokens; this batch has none")
    longest = max(range(len(batch)), key=lambda i: used[i])
    ragged = min(with_actions, key=lambda i: (i == longest, used[i]))
    rows = [longest, ragged] if longest != ragged else [ragged]
    return batch.rows(torch.tensor(rows, device=batch.input_ids.device))


def _row_norms(sums: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """The oracle inside a graph that is already there: one backward per row of `sums` [m] -> [m] fp64."""
    norms_found = torch.zeros(len(sums), dtype=torch.float64, device=sums.device)
    for i, row in enumerate(sums):
        try:
            gradients = torch.autograd.grad(row, parameters, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" not in str(error) and "checkpoint" not in str(error).lower():
                raise
            raise ScoreNormError(
                "reentrant gradient checkpointing allows no exact score norms: use use_reentrant=False, or logit or length"
            ) from error
        squares = [g.double().square().sum() for g in gradients if g is not None]
        norms_found[i] = torch.stack(squares).sum().sqrt() if squares else 0.0
    return norms_found
