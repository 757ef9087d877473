"""What a run measures: the report of one update, the one list of metric names, and where rows go. No torch."""

from __future__ import annotations

from vcpo.metrics.jsonl import JsonlWriter, MetricSink, read_jsonl
from vcpo.metrics.names import METRICS, Metric
from vcpo.metrics.picture import plot_run
from vcpo.metrics.report import UpdateReport

__all__ = ["METRICS", "JsonlWriter", "Metric", "MetricSink", "UpdateReport", "plot_run", "read_jsonl"]
