"""`--where "reward>0.5 and staleness<8 and tool='lookup'"`: which trajectories a question is about.

`parsed` reads the text into a tree, `condition` makes that an SQL condition over the table `trajectories`. Whatever
the text holds, it reaches the database as bound parameters only; names of fields come from a fixed table.
"""

from replay.queries.filters.condition import Parts, condition, conditions
from replay.queries.filters.fields import FIELDS, Field
from replay.queries.filters.grammar import WrongFilter, parsed

__all__ = ["FIELDS", "Field", "Parts", "WrongFilter", "condition", "conditions", "parsed"]
