"""Everything before a trajectory is in the buffer for good: episodes that workers collect, their tickets and leases,
and rows that are never drawn.

Begin at `ticket_records`; `leases` gives a ticket to a worker, `fresh_groups` takes whole groups back to the learner.
"""
