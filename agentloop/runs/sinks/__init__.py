"""Where numbers go besides the database."""

from agentloop.runs.sinks.configured import open_sinks
from agentloop.runs.sinks.metric_sinks import MetricsFile, MetricSink, MetricSinks

__all__ = ["MetricSink", "MetricSinks", "MetricsFile", "open_sinks"]
