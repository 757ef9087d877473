"""RolloutBuffer: the ledger and the lag rule behind one lock, for one rollout thread and one learner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from vcpo.buffer.lag_rule import LAG_BOUND, LagRule
from vcpo.buffer.ledger import BufferCounts, Entry, Ledger, TakenBatch
from vcpo.errors import RolloutError
from vcpo.types import TrajectoryGroup

OnBound = Literal["wait", "drop"]
Missing = Literal["batch", "bound"]


class RolloutBuffer:
    """A thread-safe queue of groups that knows versions, admits no more than the lag bound allows, and conserves.

    The rollout side calls `dispatched`, `started`, `completed`, `drop`; the learner calls `take_batch`, then
    `mark_trained` once the new weights are published. `on_bound` says what happens when a batch is ready but slow
    groups would be left behind too long: "wait" for them, or "drop" the oldest, counted. `total_groups`, when given, is
    how many groups the run will train: admission stops there, so that a run ends with nothing left over.
    """

    def __init__(
        self,
        groups_per_batch: int,
        max_policy_lag: int,
        on_bound: OnBound = "wait",
        clock: Callable[[], float] = time.monotonic,
        *,
        total_groups: int | None = None,
    ) -> None:
        if on_bound not in ("wait", "drop"):
            raise ValueError(f"on_bound must be 'wait' or 'drop', got {on_bound!r}")
        self.rule = LagRule(groups_per_batch, max_policy_lag)
        self.on_bound: OnBound = on_bound
        self.total_groups = total_groups
        self._clock = clock
        self._changed = threading.Condition()
        self._ledger = Ledger()
        self._published: int | None = None
        self._aborts: list[int] = []
        self._prompts_ended, self._closed = False, False
        self._failure: BaseException | None = None
        self._last_move = clock()
        self._waiting_for: Missing | None = None
        self._waiting_since = self._last_move
        self._waited: dict[Missing, float] = {"batch": 0.0, "bound": 0.0}

    # ---- the rollout side ----

    def published(self, policy_version: int) -> None:
        """Samplers can have this version from now on; nothing is admitted before the first one."""
        with self._changed:
            if self._published is not None and policy_version < self._published:
                raise ValueError(f"published version fell from {self._published} to {policy_version}; it may only rise")
            self._published = policy_version
            self._moved()

    def admissible(self) -> int:
        """How many groups may be dispatched now."""
        with self._changed:
            if self._published is None or self._prompts_ended or self._over:
                return 0
            outstanding, taken = self._ledger.outstanding, self._ledger.count("taken")
            room = self.rule.limit(training=taken > 0) - outstanding
            if self.total_groups is not None:
                room = min(room, self.total_groups - self._ledger.trained - taken - outstanding)
            return max(room, 0)

    def wait_admissible(self, timeout_s: float) -> int:
        """`admissible()`, waiting up to `timeout_s` seconds for it to be positive."""
        with self._changed:
            self._changed.wait_for(lambda: self.admissible() > 0 or self._over, timeout_s)
            return self.admissible()

    def dispatched(self, group_ids: Sequence[int]) -> None:
        """These groups go to a sampler now. A group counts at the version published now, until `started`."""
        with self._changed:
            if len(group_ids) > (room := self.admissible()):
                raise ValueError(f"{len(group_ids)} groups dispatched but only {room} are admissible")
            assert self._published is not None
            for group_id in group_ids:
                self._ledger.dispatch(group_id, self._published)
            self._moved()

    def started(self, group_id: int, policy_version: int) -> None:
        """A sampler sampled the group's first tokens with this version.

        A sampler takes the newest weights before it starts a group, so this moves the version upwards from that of the
        dispatch, which only loosens the rule. Should one have used older weights, the truth counts.
        """
        self._restamp(group_id, policy_version, started=True)

    def redispatched(self, group_id: int, policy_version: int | None = None) -> None:
        """A group lost with its sampler starts afresh, with this version or a newer one: still the same group.

        None: not known yet; it counts at its old version, the careful choice, until `started` comes again.
        """
        self._restamp(group_id, policy_version, started=False)

    def completed(self, group: TrajectoryGroup) -> bool:
        """Queue a scored group. False, and nothing happens, when it has left meanwhile (aborted by the lag rule)."""
        with self._changed:
            entry = self._ledger.in_flight(group.group_id)
            if entry is None:
                return False
            entry.version, entry.started, entry.group = group.oldest_version, True, group
            self._ledger.move(entry, "queued")
            self._moved()
            return True

    def drop(self, group_id: int, reason: str) -> bool:
        """Give up a group in flight or queued, and count why. False when it had left already."""
        with self._changed:
            entry = self._ledger.find(group_id)
            if entry is None:
                return False
            if entry.state == "taken":
                raise ValueError(f"group {group_id} is being trained and cannot be dropped")
            self._ledger.drop(entry, reason)
            self._moved()
            return True

    def pop_aborts(self) -> list[int]:
        """Groups that the lag rule gave up while in flight: their samplers may stop. Each id comes once."""
        with self._changed:
            aborts, self._aborts = self._aborts, []
            return aborts

    def end_of_prompts(self) -> None:
        """No more groups will be dispatched: the last batch may be short, then there is none."""
        with self._changed:
            self._prompts_ended = True
            self._moved()

    def fail(self, error: BaseException) -> None:
        """The rollout side died of this: the learner gets it instead of its next batch. The first one stays."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._moved()

    def close(self) -> None:
        """The learner is done: admit nothing more, wake whoever waits for admission."""
        with self._changed:
            self._closed = True
            self._moved()

    # ---- the learner ----

    def take_batch(self, policy_version: int, timeout_s: float) -> TakenBatch | None:
        """The next batch for the learner at this version; waits for it. None: nothing more will come.

        Raises what was given to `fail`; RolloutError when nothing at all moved for `timeout_s` seconds.
        """
        with self._changed:
            began = self._clock()
            while True:
                batch = self.try_take(policy_version)
                if batch is not None or self.exhausted:
                    return batch
                still = self._clock() - max(began, self._last_move)
                if still >= timeout_s:
                    raise RolloutError(self._stall_message(timeout_s))
                self._changed.wait(min(timeout_s - still, 1.0))

    def try_take(self, policy_version: int) -> TakenBatch | None:
        """`take_batch` without waiting. Time until the next call counts as waiting for what is missing now."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if self._ledger.count("taken"):
                raise ValueError("a batch is in training: call mark_trained before taking the next")
            if policy_version != self._published:
                raise ValueError(f"the learner is at version {policy_version} but {self._published} is published")
            missing = self._missing(policy_version)
            self._account_wait(missing)
            return None if missing is not None or self.exhausted else self._take(policy_version)

    def mark_trained(self, policy_version: int) -> None:
        """The batch taken is trained, and the weights of this version are published (a skipped step: the old ones)."""
        with self._changed:
            for entry in self._ledger.entries("taken"):
                self._ledger.train(entry)
            self.published(policy_version)

    @property
    def exhausted(self) -> bool:
        """True when nothing is outstanding and nothing more will come."""
        with self._changed:
            return self._complete and not self._ledger.outstanding

    # ---- both ----

    def counts(self) -> BufferCounts:
        """Where every group is, at one moment."""
        with self._changed:
            return self._ledger.counts()

    def check(self) -> None:
        """Assert that no group was lost or counted twice, and that no more is outstanding than was admitted."""
        with self._changed:
            self._ledger.check()
            limit = self.rule.limit(training=self._ledger.count("taken") > 0)
            assert self._ledger.outstanding <= limit, f"more than {limit} outstanding: {self._ledger.counts()}"

    # ---- under the lock ----

    @property
    def _complete(self) -> bool:
        """No further group will be dispatched: the prompts have ended, or all groups of the run are on their way."""
        sent = self._ledger.trained + self._ledger.count("taken") + self._ledger.outstanding
        return self._prompts_ended or (self.total_groups is not None and sent >= self.total_groups)

    @property
    def _over(self) -> bool:
        return self._closed or self._failure is not None

    def _moved(self) -> None:
        self._last_move = self._clock()
        self._changed.notify_all()

    def _restamp(self, group_id: int, version: int | None, *, started: bool) -> None:
        with self._changed:
            entry = self._ledger.in_flight(group_id)
            if entry is not None:
                entry.version, entry.started = entry.version if version is None else version, started
                self._moved()

    def _missing(self, version: int) -> Missing | None:
        """What keeps the batch of update `version` from being taken; in "drop" mode it gives up what would."""
        queued = self._ledger.entries("queued")
        if self.on_bound == "drop":
            self._give_up([e for e in queued if e.version < version - self.rule.max_policy_lag])
            queued = self._ledger.entries("queued")
        last = self._complete and not self._ledger.count("in_flight")
        if len(queued) < self.rule.groups_per_batch and not last:
            return "batch"
        batch = {e.group_id for e in self.rule.oldest(queued)}
        staying = [e for e in self._ledger.entries("in_flight", "queued") if e.group_id not in batch]
        late = self.rule.too_late(staying, version)
        if late and self.on_bound == "wait":
            self._assert_waiting_helps(version)
            return "bound"
        self._give_up(late)
        return None

    def _give_up(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.state == "in_flight":
                self._aborts.append(entry.group_id)
            self._ledger.drop(entry, LAG_BOUND)

    def _take(self, version: int) -> TakenBatch:
        batch = self.rule.oldest(self._ledger.entries("queued"))
        groups: list[TrajectoryGroup] = []
        for entry in sorted(batch, key=lambda e: e.group_id):
            if entry.version < version - self.rule.max_policy_lag:
                raise RolloutError(self._bound_message(entry, version))
            assert entry.group is not None
            self._ledger.move(entry, "taken")
            groups.append(entry.group)
        batch_wait_s, bound_wait_s = self._waited["batch"], self._waited["bound"]
        self._waited = {"batch": 0.0, "bound": 0.0}
        self._moved()
        return TakenBatch(tuple(groups), batch_wait_s, bound_wait_s)

    def _assert_waiting_helps(self, version: int) -> None:
        """Were everything in flight complete, this batch could be taken; else a sampler used too old weights."""
        known = [e for e in self._ledger.entries("in_flight", "queued") if e.started]
        beyond = self.rule.too_late(known, version - 1)
        if beyond:
            raise RolloutError(self._bound_message(beyond[0], version))

    def _bound_message(self, entry: Entry, version: int) -> str:
        return (
            f"group {entry.group_id} started at version {entry.version} and can no longer be trained within "
            f"max_policy_lag = {self.rule.max_policy_lag} of version {version}: a sampler must take the newest "
            "published weights before it starts a group"
        )

    def _account_wait(self, missing: Missing | None) -> None:
        now = self._clock()
        if self._waiting_for is not None:
            self._waited[self._waiting_for] += now - self._waiting_since
        self._waiting_for, self._waiting_since = missing, now

    def _stall_message(self, timeout_s: float) -> str:
        c = self.counts()
        return (
            f"no group started, completed or was dropped for {timeout_s:g} s while the learner waited for a batch of "
            f"{self.rule.groups_per_batch} ({c.queued} queued, {c.in_flight} in flight): the samplers are silent"
        )
