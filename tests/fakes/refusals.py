"""What a call says that is refused."""

from collections.abc import Callable
from typing import Any

import pytest

from agentloop.errors import UserError


def refusal_of(call: Callable[..., object], *args: Any, **named: Any) -> str:
    with pytest.raises(UserError) as refused:
        call(*args, **named)
    assert "\n" not in str(refused.value)
    return str(refused.value)
