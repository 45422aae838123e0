"""Filters such as `--where "reward > 0.5 and tool == 'lookup'"` choose the trajectories of a query.

A filter is a Python expression. Its values reach the database only as bound parameters, and its field names come from a
fixed table.
"""

from replay.questions.filters.expression_to_sql import SplitCondition, WrongFilter, condition, conditions
from replay.questions.filters.fields import FIELDS, Field, FieldKind

__all__ = ["FIELDS", "Field", "FieldKind", "SplitCondition", "WrongFilter", "condition", "conditions"]
