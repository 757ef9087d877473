"""Every error vcpo raises on purpose: one line that says what is wrong, where, and what would be right.

Each is also a standard-library exception, so a caller who does not know vcpo can catch it by the usual name.
"""

from __future__ import annotations


class VcpoError(Exception):
    """Base of all errors below; the command line prints it as one line and exits 1, without a traceback."""


class ConfigError(VcpoError, ValueError):
    """A setting is unknown, of the wrong type, out of range, or does not go with another one."""


class RolloutError(VcpoError, RuntimeError):
    """Trajectories could not be produced: a sampler died or went silent more often than it may be restarted."""


class RewardError(VcpoError, RuntimeError):
    """A reward function raised, hung, or returned something that is not one number or None per completion."""


class ScoreNormError(VcpoError, RuntimeError):
    """Score norms cannot be computed exactly for this model or loss; names the parameter or module."""


class BatchError(VcpoError, ValueError):
    """Rows of an optimizer batch are missing, came twice, or do not have the shape that was announced."""


class WeightSyncError(VcpoError, RuntimeError):
    """Published weights are missing, torn, or belong to another model."""


class RunStateError(VcpoError, RuntimeError):
    """A checkpoint cannot be written or read."""
