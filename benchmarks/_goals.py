"""A goal is a text such as `<= 3.5`, so that what is printed is what is compared."""

from collections.abc import Mapping


def verdict(name: str, value: float, goals: Mapping[str, str]) -> str:
    """What to print after a figure; nothing where there is no goal."""
    sign, _, bound = goals.get(name, "").partition(" ")
    met = sign != "" and (value <= float(bound) if sign == "<=" else value >= float(bound))
    return f"goal {goals[name]:<8} {'PASS' if met else 'miss'}" if name in goals else ""
