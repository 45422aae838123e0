"""The address that agents know as their model's: three providers' protocols in front of sessions that are recorded."""

from importlib.util import find_spec

from agentloop.errors import UserError

_EXTRA = ("starlette", "uvicorn", "openai", "anthropic")


def check_installed() -> None:
    """Raises UserError where a package of the extra is absent: most are imported only once an agent asks."""
    missing = next((name for name in _EXTRA if find_spec(name) is None), None)
    if missing is not None:
        raise UserError(f"gateway must have {missing} installed, got none. pip install 'agentloop-replay[gateway]'")
