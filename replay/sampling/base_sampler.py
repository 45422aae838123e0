"""The base class of samplers, and the rows that a sampler weighs. A user's sampler is a subclass of `Sampler`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, ClassVar, get_type_hints

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from context.wording import suggest
from replay.errors import sentence_for_validation_error
from replay.mixing.request import DrawRequest

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Rows:
    """Some rows of the buffer as columns. Every column is an array [N], and the columns are aligned."""

    own: Flags
    """True where the drawing run collected the row."""
    iteration: Integers
    """The iteration that collected the row, as the row's own run counts iterations."""
    policy_version: Integers
    """The oldest policy version among the row's tokens."""
    success: Flags
    reward: Floats
    advantage: Floats
    """The advantage within the group that the row was collected with."""
    num_action_tokens: Integers
    mean_entropy: Floats
    """Mean entropy when the row was sampled, in nats per action token. NaN where it is unknown."""
    group: Integers
    """Rows with equal numbers are of one group. The numbers themselves mean nothing."""
    task: Integers
    """Rows with equal numbers are of one task. The numbers themselves mean nothing."""
    group_size: Integers
    group_success_rate: Floats
    group_reward_std: Floats
    """Population standard deviation of the group's rewards when the group was collected."""

    def __init__(self, columns: Mapping[str, npt.NDArray[Any]], chosen: slice | npt.NDArray[np.intp], now: DrawRequest):
        self._columns = columns
        self._chosen = chosen
        self.now = now

    def __len__(self) -> int:
        return len(self.own)

    def __getattr__(self, name: str) -> npt.NDArray[Any]:
        if name not in Rows.__annotations__:
            raise AttributeError(f"rows must have the column that is read, got {name}.")
        chosen: npt.NDArray[Any] = self._columns[name][self._chosen]
        return chosen

    @property
    def staleness(self) -> Floats:
        """The drawing policy's version minus the row's. NaN for rows of other runs, whose staleness is unknown."""
        return np.where(self.own, float(self.now.policy_version) - self.policy_version, np.nan)


_MADE_UP = {
    **{name: np.array([True, False]) for name in ("own", "success")},
    **{name: np.array([1, 1]) for name in ("iteration", "policy_version")},
    **{name: np.array([0, 0]) for name in ("group", "task")},
    **{name: np.array([0.5, 0.5]) for name in ("group_success_rate", "group_reward_std")},
    "reward": np.array([1.0, 0.0]),
    "advantage": np.array([1.0, -1.0]),
    "num_action_tokens": np.array([3, 4]),
    "mean_entropy": np.array([0.5, np.nan]),
    "group_size": np.array([2, 2]),
}


def _checked_options(declared: type, given: Mapping[str, Any], *, sampler: str) -> Any:
    """Make an instance of the options class. Raises ValueError for an unknown name or a value that is not allowed."""
    kinds = _model(declared).model_fields
    unknown = next((name for name in given if name not in kinds), None)
    if unknown is not None:
        raise ValueError(
            f"replay.sampler_options must hold options of {sampler}, got {unknown!r}. {suggest(str(unknown), kinds)}"
        )
    try:
        _model(declared).model_validate(dict(given))
        return declared(**given)
    except ValidationError as error:
        raise ValueError(sentence_for_validation_error(error, "replay.sampler_options")) from None
    except ValueError as error:
        raise ValueError(f"replay.sampler_options.{error}") from None


@cache
def _model(declared: type) -> type[BaseModel]:
    kinds = get_type_hints(declared, include_extras=True)
    columns: dict[str, Any] = {
        field.name: (kinds[field.name], ... if field.default is field.default_factory is MISSING else None)
        for field in fields(declared)
    }
    config = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True, protected_namespaces=())
    return create_model(declared.__name__, __config__=config, **columns)


@dataclass(frozen=True)
class NoOptions:
    """The options class of a sampler without options."""


class Sampler(ABC):
    """A sampler gives each row a weight. A row of weight 0 is never drawn. The random state is in the checkpoint."""

    name: ClassVar[str] = ""
    """The name of a built-in sampler. Other samplers go by the name of their class."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Columns that weighing needs. A row with NaN in one of them weighs 0 and is counted as unknown."""
    Options: ClassVar[type] = NoOptions
    """A frozen dataclass of `replay.sampler_options`. Field types and __post_init__ check the values."""

    def __init__(self, seed: int, options: Mapping[str, Any] | None = None) -> None:
        self.options: Any = _checked_options(self.Options, options or {}, sampler=self.title)
        self._bits = np.random.PCG64(seed)
        self.random = np.random.Generator(self._bits)

    @property
    def title(self) -> str:
        return self.name or type(self).__name__

    @abstractmethod
    def weights(self, rows: Rows) -> Floats:
        """Return the weights [N] of the rows, each finite and >= 0."""

    def correction(self, probability: float, rows: int) -> float:
        """Return the weight of a drawn row's loss, up to a factor common to the draw.

        `probability` is the row's share of the weight of all `rows` that could be drawn.
        """
        return 1.0

    def weigh(self, rows: Rows) -> tuple[Floats, Flags]:
        """Return checked weights, and a mask of the rows whose weight is unknown."""
        unknown = np.zeros(len(rows), np.bool_)
        for name in self.needs:
            unknown |= np.isnan(getattr(rows, name))
        with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
            found = np.asarray(self.weights(rows))
        if found.shape != (len(rows),) or found.dtype.kind not in "fiub":
            raise ValueError(
                f"weights of sampler {self.title} must be one number per row ({len(rows)}), got shape {found.shape} "
                f"of type {found.dtype}. Return a NumPy array."
            )
        weights = np.where(unknown, 0.0, found)
        wrong = ~(np.isfinite(weights) & (weights >= 0.0))
        if wrong.any():
            raise ValueError(
                f"weights of sampler {self.title} must be finite and >= 0, got {float(weights[wrong][0])}. "
                "Give 0 to rows that must not be drawn, and name columns that may be unknown in `needs`."
            )
        return weights, unknown

    def try_out(self) -> None:
        """Weigh two made-up rows, and no rows, so that a mistake shows before a run begins."""
        for size in (2, 0):
            self.weigh(Rows(_MADE_UP, slice(0, size), DrawRequest("", iteration=2, policy_version=1)))

    def state(self) -> dict[str, Any]:
        """Return the random state as plain JSON values, for the checkpoint."""
        return {"name": self.title, "random": self._bits.state}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if state["name"] != self.title:
            raise ValueError(
                f"replay.sampler must be the sampler that saved the state ({state['name']}), got {self.title}. "
                f"Set replay.sampler: {state['name']}, or start a new run."
            )
        self._bits.state = state["random"]
