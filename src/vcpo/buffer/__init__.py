"""Between samplers and learner: the queue that bounds the policy lag and loses no group. No torch.

A group moves through states, and every move is counted::

    dispatched -> in_flight -> queued -> taken (in training) -> trained
                          \\          \\
                           +----------+--> dropped (with a reason)

`lag_rule` is the arithmetic of the bound, `ledger` knows where every group is, `RolloutBuffer` joins the two for one
rollout thread and one learner.
"""

from __future__ import annotations

from vcpo.buffer.lag_rule import LAG_BOUND
from vcpo.buffer.ledger import BufferCounts, TakenBatch
from vcpo.buffer.rollout_buffer import OnBound, RolloutBuffer

__all__ = ["LAG_BOUND", "BufferCounts", "OnBound", "RolloutBuffer", "TakenBatch"]
