"""An advantage and an objective of one's own, as docs/add-an-algorithm.md shows them."""


def above_the_median(members):
    """1 above the median reward of the group, -1 below it."""
    middle = sorted(member.reward for member in members)[len(members) // 2]
    return [float(member.reward > middle) - float(member.reward < middle) for member in members]


def tempered(inputs, *, power):
    """-A s^power, s the geometric mean of the trajectory's ratios."""
    ratios = inputs.trajectory_mean(inputs.log_ratios).exp()
    return -inputs.advantages * ratios**power
