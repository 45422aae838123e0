"""Group Policy Gradient: REINFORCE's objective, divided by the share of trajectories with a signal.

A group of equal rewards has no gradient but counts in the denominators; the division makes up for that. The share is
counted over the stream's trajectories of the whole optimizer step, so it does not depend on the micro-batches.
"""

from agentloop.algorithms.declarations import Objective
from agentloop.algorithms.objective_input import ObjectiveInput, PolicyLoss, unclipped


def gpg(inputs: ObjectiveInput) -> PolicyLoss:
    return unclipped(-inputs.advantages * inputs.log_probs / inputs.signal_share[:, None].to(inputs.log_probs.dtype))


GPG = Objective(
    name="gpg",
    paper="arXiv 2504.02546",
    formula="-A l / (share of the stream's trajectories of the optimizer step with an advantage other than 0)",
    function=gpg,
    has_ratio=False,
    bounded=False,
)
