"""`--where "reward > 0.5 and tool == 'lookup'"`: which trajectories a query is about.

A filter is a Python expression. Whatever it holds, it reaches the database as bound parameters only; names of fields
come from a fixed table.
"""

from replay.questions.filters.expression_to_sql import SplitCondition, WrongFilter, condition, conditions
from replay.questions.filters.fields import FIELDS, Field, FieldKind

__all__ = ["FIELDS", "Field", "FieldKind", "SplitCondition", "WrongFilter", "condition", "conditions"]
