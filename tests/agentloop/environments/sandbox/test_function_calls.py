"""A function of a policy's code is called many times in one start, and judged by what it returns."""

from __future__ import annotations

from typing import Any

import pytest

from agentloop.environments.sandbox import PythonSandbox, Returned, SandboxLimits, call_function


def called(code: str, *arguments: Any, limits: SandboxLimits | None = None) -> tuple[Returned, ...]:
    return call_function(PythonSandbox(limits=limits), code, "f", [[argument] for argument in arguments])


def test_each_call_has_what_the_function_returned() -> None:
    assert called("def f(x): return x[::-1]", "ab", [1, 2]) == (Returned("ba"), Returned([2, 1]))
    assert called("f = lambda x: {'n': x, 'half': x / 2, 'none': None}", 3) == (
        Returned({"n": 3, "half": 1.5, "none": None}),
    )


def test_call_that_raises_costs_itself_alone() -> None:
    assert called("def f(x): return 1 // x", 1, 0, -1) == (
        Returned(1),
        Returned(None, "ZeroDivisionError: integer division or modulo by zero"),
        Returned(-1),
    )


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("def f(x) return x", "SyntaxError: expected ':' (answer.py, line 1)"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def g(x): return x", "KeyError: 'f'"),
        ("", "KeyError: 'f'"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("f = 3", "TypeError: 'int' object is not callable"),
        ("def f(x): return {1, 2}", "TypeError: Object of type set is not JSON serializable"),
        ("def f(x): return f(x)", "RecursionError: maximum recursion depth exceeded"),
        ("def f(x): __import__('os')._exit(0)", "it ended early"),
        ("def f(x): __import__('os').kill(__import__('os').getpid(), 11)", "[exit code 139]"),
    ],
)
def test_code_that_gives_no_value_gives_an_error(code: str, error: str) -> None:
    assert called(code, 1, 2) == (Returned(None, error),) * 2


def test_calls_before_one_that_hangs_are_kept() -> None:
    code = "def f(x):\n    while x == 2: pass\n    return x"
    found = called(code, 1, 2, 3, limits=SandboxLimits(seconds=1.0))
    assert found == (Returned(1), *[Returned(None, "[stopped: it took longer than 1 s]")] * 2)


def test_what_the_code_prints_is_no_answer() -> None:
    code = (
        "import sys\nprint('[7, null]')\ndef f(x):\n    print('[7, null]')\n    sys.stderr.write('noise')\n    return x"
    )
    assert called(code, 1, 2) == (Returned(1), Returned(2))


def test_value_equals_another_of_its_type_alone() -> None:
    one = Returned(1)
    assert [one.equals(value) for value in (1, 1.0, True, "1", None)] == [True, False, False, False, False]
    assert Returned({"a": 1, "b": 2}).equals({"b": 2, "a": 1})
    assert not Returned(None, "ValueError: x").equals(None)
    assert Returned(None).equals(None)
