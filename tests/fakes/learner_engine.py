"""An engine without a server, that makes on request the mistakes that real ones make without a word."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from agentloop.engines.publish.engine_control import LIKELIEST, EngineControl, EngineRefused, Scored
from tests.fakes.engine_sampling import load, next_log_probs, plain_log_probs

FIRST = "default"


class LearnerEngine(EngineControl):
    """Started with the weights in `folder`; it computes with transformers."""

    def __init__(self, folder: Path) -> None:
        super().__init__("http://fake", model="tiny")
        self._first = folder
        self.head_stays_old = self.before_temperature = self.gives_nan = False
        self.has_tokenizer = True
        self.is_healthy = True
        self.calls: list[str] = []
        self.restart()

    def restart(self) -> None:
        """As after a crash: its first weights, and no adapters."""
        self._model: Any = load(self._first)
        self._label = FIRST
        self._adapters: dict[str, Any] = {}

    def healthy(self) -> bool:
        return self.is_healthy

    def label(self) -> str:
        return self._label

    def name_weights(self, label: str) -> None:
        self._label = label

    def reload(self, folder: Path, label: str) -> None:
        self.calls.append(f"reload {label}")
        old, self._model, self._label = self._model, load(folder), label
        if self.head_stays_old:
            self._model.lm_head.weight.data.copy_(old.lm_head.weight.data)

    def adapters(self) -> list[str]:
        return list(self._adapters)

    def load_adapter(self, name: str, folder: Path) -> None:
        if name in self._adapters:
            raise EngineRefused(f"{name} has been loaded", status=400)
        model: Any = load(self._first)
        model.load_adapter(str(folder))
        self._adapters[name] = model

    def unload_adapter(self, name: str) -> None:
        del self._adapters[name]

    def tokenize(self, text: str) -> list[int] | None:
        if not self.has_tokenizer:
            return None
        ids: list[int] = AutoTokenizer.from_pretrained(self._first).encode(text, add_special_tokens=False)
        return ids

    def number_type(self) -> str:
        return "float32"

    def scored(self, row: Sequence[int], *, temperature: float, model: str, whole: bool = True) -> Scored:
        chosen = self._adapters.get(model, self._model)
        if max(row) >= chosen.config.vocab_size:
            raise EngineRefused(f"token id {max(row)} is out of vocabulary", status=400)
        if whole and model in self._adapters:
            raise EngineRefused("it ends when it scores a prompt with an adapter while others sample", status=500)
        given = plain_log_probs(chosen, row[:1], row[1:]) if whole else ()
        found = next_log_probs(chosen, row, 1.0 if self.before_temperature else temperature, LIKELIEST)
        if self.gives_nan:
            found[next(iter(found))] = math.nan
        return Scored(tuple(given), found, model, self._label)
