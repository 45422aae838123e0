"""Who wrote a token. The author says whether the token was sampled, is trained, and is shown again.

The author table is the single source of every mask. It is stored with the run, so that masks replay exactly.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

DISCARD_SUFFIX = "(discard)"
_DISCARD_BIT = 0x80


@dataclass(frozen=True)
class Author:
    name: str
    action: bool
    """True: its tokens were sampled, or written in the policy's place (`response_mask`)."""
    trained: bool
    """True: its tokens carry loss (`loss_mask`); needs `action`."""
    shown: bool = True
    """False: its messages are kept, and left out of every prompt."""
    behavior: bool | None = None
    """True: the policy that sampled its tokens is known, and so are their log-probs; needs `action`. False with
    `action`: a demonstrator, who speaks in the policy's place. None: the value of `action`."""

    def __post_init__(self) -> None:
        if self.behavior is None:
            object.__setattr__(self, "behavior", self.action)
        for field in ("trained", "behavior"):
            if getattr(self, field) and not self.action:
                raise ValueError(
                    f"authors.{self.name} must be an action author for {field}=True, got action=False. "
                    f"Set action=True, or {field}=False."
                )
        if self.name.endswith(DISCARD_SUFFIX):
            raise ValueError(f"authors.{self.name} must not end in {DISCARD_SUFFIX!r}: every author has that form.")


INITIALIZATION = "initialization"
USER = "user"
ENV = "env"
MEMORY = "memory"
LLM = "llm"
LLM_DO_NOT_TRAIN = "llm(do_not_train)"
TEMPLATE = "template"
DEMONSTRATION = "demonstration"
"""Tokens that a demonstrator wrote in the policy's place."""
HISTORY = "history"
"""Replies of earlier segments, the policy's or another's in its place, that a later segment shows again."""


def discarded(name: str) -> str:
    """The author's name for tokens that are hidden from later prompts."""
    return name if name.endswith(DISCARD_SUFFIX) else name + DISCARD_SUFFIX


class AuthorTable:
    """Author names and their one-byte codes.

    The code of an author is its position; the high bit marks the `(discard)` form, which is hidden from later
    prompts, stored, and never trained.
    """

    def __init__(self, authors: Iterable[Author]) -> None:
        self.authors = tuple(authors)
        if len(self.authors) > _DISCARD_BIT:
            raise ValueError(f"authors must be at most {_DISCARD_BIT}, got {len(self.authors)}.")
        self._code = {author.name: code for code, author in enumerate(self.authors)}
        if len(self._code) != len(self.authors):
            raise ValueError("authors must have distinct names. Rename one of them.")
        codes = np.arange(256)
        self._known = codes & ~_DISCARD_BIT < len(self.authors)
        self._action = self._flags("action")
        self._trained = self._flags("trained") & (codes < _DISCARD_BIT)
        self._behavior = self._flags("behavior")

    def _flags(self, field: str) -> npt.NDArray[np.bool_]:
        """[256] One field of each code's author. False: the code has no author."""
        flags = np.zeros(_DISCARD_BIT, bool)
        flags[: len(self.authors)] = [getattr(author, field) for author in self.authors]
        return np.tile(flags, 2)

    def code(self, name: str) -> int:
        """The byte stored for `name`, with or without the `(discard)` suffix."""
        base = name.removesuffix(DISCARD_SUFFIX)
        if base not in self._code:
            raise ValueError(f"author must be one of {', '.join(self._code)}, got {name!r}.")
        return self._code[base] | (_DISCARD_BIT if base != name else 0)

    def name(self, code: int) -> str:
        """The name behind a stored byte."""
        if not 0 <= code <= 255 or not self._known[code]:
            raise ValueError(f"author code must be known to the run's author table, got {code}.")
        base = self.authors[code & ~_DISCARD_BIT].name
        return base + DISCARD_SUFFIX if code & _DISCARD_BIT else base

    def author(self, name: str) -> Author:
        """The row of `name`. The `(discard)` form of an author is neither trained nor shown."""
        row = self.authors[self.code(name) & ~_DISCARD_BIT]
        return replace(row, trained=False, shown=False) if name.endswith(DISCARD_SUFFIX) else row

    def is_action(self, codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        return self._action[codes]

    def is_trained(self, codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        return self._trained[codes]

    def has_behavior(self, codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """True = the token's log-prob is known from when it was sampled."""
        return self._behavior[codes]

    def is_known(self, codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        return self._known[codes]

    def to_json(self) -> str:
        return json.dumps([asdict(author) for author in self.authors], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(Author(**row) for row in json.loads(text))

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def default_authors() -> AuthorTable:
    """The built-in authors: `llm` and `demonstration` are trained. Codes never change; new authors come last."""
    silent = (INITIALIZATION, USER, ENV, MEMORY)
    return AuthorTable(
        [
            *(Author(name, action=False, trained=False) for name in silent),
            Author(LLM, action=True, trained=True),
            Author(LLM_DO_NOT_TRAIN, action=True, trained=False),
            Author(TEMPLATE, action=False, trained=False),
            Author(DEMONSTRATION, action=True, trained=True, behavior=False),
            Author(HISTORY, action=False, trained=False),
        ]
    )
