"""The one list of metric names: unit, meaning, and whether a rise is good news."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GoesUpIs = Literal["good", "bad", "neutral"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One column of a run's metrics."""

    name: str
    unit: str
    """`1` for a pure number, `count`, `nat`, `s`, `token/s`, `version`, `text`, ..."""
    meaning: str
    goes_up_is: GoesUpIs = "neutral"


_STEP = (
    Metric("step", "count", "optimizer step, from 1; skipped steps count"),
    Metric("policy_version", "version", "version of the weights after the step; a skipped step does not raise it"),
    Metric("skipped", "text", "why no step was taken; null when one was", "bad"),
)
_REWARD = (
    Metric("loss", "1", "value of the training loss; its size says little, its gradient is what is used"),
    Metric("reward_mean", "reward", "mean over the scorable trajectories of the batch", "good"),
    Metric("reward_std", "reward", "population standard deviation over the scorable trajectories of the batch"),
    Metric("advantage_abs_mean", "1", "mean size of the advantages, after scaling"),
)
_COUNTS = (
    Metric("n_trajectories", "count", "trajectories in the optimizer batch, quarantined and empty ones too"),
    Metric("n_groups", "count", "groups in the optimizer batch"),
    Metric("n_tokens", "count", "action tokens in the optimizer batch"),
    Metric("quarantined", "count", "trajectories whose log weight is NaN or +inf: weight 0, still counted in B", "bad"),
    Metric("unscorable", "count", "trajectories without a finite reward: coefficient 0", "bad"),
    Metric("empty", "count", "trajectories without action tokens: no weight", "bad"),
    Metric("zero_variance_groups", "count", "groups whose rewards are all equal: no gradient from them"),
)
_ESS = (
    Metric("ess", "trajectories", "effective sample size: how many equally weighted trajectories the batch is worth"),
    Metric("ess_ratio", "1", "ess / number of trajectories, raw weights, in [0, 1]", "good"),
    Metric("ess_ratio_truncated", "1", "the same after truncating the weights at the cap: hides outliers", "good"),
    Metric("ess_ratio_informative", "1", "ess_ratio over the trajectories that carry gradient", "good"),
    Metric("ess_ratio_token", "1", "ess_ratio of single-token weights: stays high while a policy collapses", "good"),
)
_WEIGHTS = (
    Metric("log_weight_mean", "nat", "mean log weight of a trajectory; minus the sequence KL in expectation"),
    Metric("log_weight_std", "nat", "standard deviation of the log weights", "bad"),
    Metric("log_weight_max", "nat", "largest log weight", "bad"),
    Metric("log_ratio_abs_mean", "nat", "mean size of the per-token log ratio, learner minus sampler", "bad"),
    Metric("weight_mean", "1", "mean raw weight; far from 1 means mass has left the batch"),
    Metric("truncated_share", "1", "share of trajectories whose weight was truncated or masked", "bad"),
    Metric("kl_k1", "nat/token", "plain estimate of the per-token KL from learner to sampler; can be negative", "bad"),
    Metric("kl_k3", "nat/token", "non-negative estimate of the same KL", "bad"),
)
_GRADIENT = (
    Metric("score_norm_mean", "1", "mean score norm: size of grad log pi of a whole trajectory"),
    Metric("score_norm_max", "1", "largest score norm of the batch"),
    Metric("score_bias", "1", "size of the mean score that the baseline's formula neglects", "bad"),
    Metric("grad_norm", "1", "norm of the assembled gradient before clipping"),
    Metric("grad_clip", "1", "clipping threshold in force at this step; null when clipping is off"),
    Metric("grad_clipped", "count", "1 when the gradient was clipped at this step"),
)
_STEP_SIZE = (
    Metric("lr_scale", "1", "factor in [0, 1] that the effective sample size puts on the step"),
    Metric("lr", "1", "base learning rate of the schedule; never touched by the scaling"),
    Metric("lr_effective", "1", "lr times lr_scale: the size of the step really taken"),
    Metric("reference", "1", "ess_ratio at which a full step is taken"),
    Metric("learner_s", "s", "time of the update: forward, backward, step", "bad"),
)

_ROLLOUT = (
    Metric(
        "reward_current", "reward", "mean of the batch sampled just before the update: the current policy's", "good"
    ),
    Metric(
        "eval_reward", "reward", "mean on the held-out prompts with the policy after this step; step 0: before", "good"
    ),
    Metric("completion_length_mean", "token", "mean number of action tokens of a trajectory"),
)
_LAG = (
    Metric("policy_lag_median", "version", "median over the trajectories: learner's version minus the oldest token's"),
    Metric("policy_lag_max", "version", "largest of the batch; never above max_policy_lag", "bad"),
    Metric("policy_lag_histogram", "count", "lag -> trajectories"),
    Metric(
        "policy_lag_in_flight_mean", "version", "mean part of the lag that arose while the group was sampled", "bad"
    ),
    Metric("policy_lag_in_flight_histogram", "count", "that part -> trajectories"),
    Metric("policy_lag_in_queue_mean", "version", "mean part of the lag that arose while the group was waiting", "bad"),
    Metric("policy_lag_in_queue_histogram", "count", "that part -> trajectories"),
)
_TIME = (
    Metric("wall_s", "s", "since the first dispatch"),
    Metric("rollout_s", "s", "time since the last step in which samplers had work in flight"),
    Metric("score_s", "s", "time since the last step in the reward function"),
    Metric("batch_wait_s", "s", "the learner waited because too few groups were ready", "bad"),
    Metric("bound_wait_s", "s", "the learner waited for slow groups that the lag bound forbids to leave behind", "bad"),
    Metric("publish_s", "s", "handing the new weights to the samplers", "bad"),
    Metric("tokens", "token", "action tokens trained since the run began"),
    Metric("tokens_per_s", "token/s", "action tokens trained per second since the last step", "good"),
)
_GROUPS = (
    Metric("groups_dispatched", "count", "groups given to the samplers since the run began"),
    Metric("groups_trained", "count", "groups trained since the run began"),
    Metric("groups_dropped", "count", "groups given up since the run began", "bad"),
    Metric("groups_dropped_by_reason", "count", "reason -> groups given up"),
    Metric("groups_queued", "count", "groups that wait for the learner now"),
    Metric("groups_in_flight", "count", "groups at the samplers now"),
    Metric("sampler_restarts", "count", "samplers that died or went silent and were started again", "bad"),
)
_FILE = (Metric("nonfinite", "text", "metric -> nan, inf or -inf, where the row holds null for one of these"),)

_ALL = (
    *_STEP,
    *_REWARD,
    *_COUNTS,
    *_ESS,
    *_WEIGHTS,
    *_GRADIENT,
    *_STEP_SIZE,
    *_ROLLOUT,
    *_LAG,
    *_TIME,
    *_GROUPS,
    *_FILE,
)

METRICS: dict[str, Metric] = {m.name: m for m in _ALL}
"""Every key that may stand in a row of `metrics.jsonl`."""
