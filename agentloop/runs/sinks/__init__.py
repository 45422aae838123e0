"""Where numbers go besides the database."""

from agentloop.runs.sinks.configured import open_sinks
from agentloop.runs.sinks.metric_sinks import MetricSink, MetricSinks
from agentloop.runs.sinks.metrics_file import MetricsFile

__all__ = ["MetricSink", "MetricSinks", "MetricsFile", "open_sinks"]
