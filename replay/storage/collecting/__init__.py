"""What there is before a trajectory is in the buffer for good: episodes that workers are to collect, who collects them,
and what is kept and never drawn.

Begin at `ticket_records`; `leases` gives a ticket to a worker, `fresh_groups` takes whole groups back to the learner.
"""
