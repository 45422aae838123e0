"""SAPO: a soft gate f(r) = (4 / tau) sigmoid(tau (r - 1)) in place of a clip.

The gradient is that of f itself, -A 4 s (1 - s) r with s the sigmoid. It is -A at r = 1 and fades on both sides. With
f as a weight of log-probs it would grow with r.
"""

from agentloop.algorithms.declarations import AboveZero, Objective
from agentloop.algorithms.objective_input import ObjectiveInput, PolicyLoss, exact_sigmoid, unclipped


def sapo(inputs: ObjectiveInput, *, tau_positive: AboveZero = 1.0, tau_negative: AboveZero = 1.05) -> PolicyLoss:
    a = inputs.advantages
    tau = a.new_full(a.shape, tau_negative).masked_fill(a > 0, tau_positive)
    return unclipped(-a * 4 / tau * exact_sigmoid(tau * (inputs.log_ratios.exp() - 1)))


SAPO = Objective(
    name="sapo",
    paper="arXiv 2511.20347",
    formula="-A (4 / tau) sigmoid(tau (r - 1)); tau is `tau_positive` where A > 0, else `tau_negative`",
    function=sapo,
)
