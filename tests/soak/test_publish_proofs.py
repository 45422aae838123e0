"""Hundreds of publishes to an engine in bfloat16: none that is right is refused, and what is refused is in a table.

`MODEL=FOLDER` takes another policy than the small one that is trained here, `PUBLISHES=N` other numbers of publishes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentloop.config import ModelSection
from agentloop.engines.publish.engine_control import EngineControl
from agentloop.engines.publish.proof import Proof, ProofFailed, prove, publish
from agentloop.engines.publish.published_policy import PublishedPolicy
from agentloop.models.loading import LoadedModel, load_model
from agentloop.training.policies.engine_publisher import Prober
from tests.fakes.engine_server import serving
from tests.fakes.published_policies import TEXT, prober, published, tiny_learner

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]
MODEL = os.environ.get("MODEL")
PUBLISHES = int(os.environ.get("PUBLISHES", "100"))
REPLIES, TOKENS, EVERY = 16, 48, 4
"""Of every fourth publish engines are asked that something is wrong with."""
OLD = ("1 version old", "2 versions old", "5 versions old")
WARMER = "temperature x 1.1"
FAULTS = (*OLD, WARMER)


@dataclass
class Row:
    """One learning rate of the table."""

    rate: float
    moved: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    refused: int = 0
    found: dict[str, list[tuple[float, bool]]] = field(default_factory=lambda: {name: [] for name in FAULTS})
    """Of each fault: the standard error that the publish had, and whether it was refused."""


def small_policy(folder: Path) -> LoadedModel:
    """It knows its texts: most of what it says is likely."""
    learner = tiny_learner(folder)
    model: Any = learner.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    random = torch.Generator().manual_seed(0)
    for _ in range(150):
        optimizer.zero_grad()
        for number in torch.randint(0, len(TEXT), (8,), generator=random).tolist():
            ids = torch.tensor([learner.tokenizer.encode(TEXT[number])])
            (model(ids, labels=ids).loss / 8).backward()
        optimizer.step()
    return learner


def log_probs(model: Any, row: list[int]) -> Tensor:
    scores: Tensor = torch.log_softmax(model(torch.tensor([row])).logits[0, :-1].float(), -1)
    return scores.gather(1, torch.tensor(row[1:])[:, None])[:, 0]


@torch.no_grad()
def replies(learner: LoadedModel, seed: int) -> list[list[int]]:
    model: Any = learner.model
    torch.manual_seed(seed)
    prompts = [learner.tokenizer.encode(TEXT[number])[:4] for number in range(REPLIES)]
    made = [
        model.generate(torch.tensor([ids]), do_sample=True, top_k=0, max_new_tokens=TOKENS, pad_token_id=0)
        for ids in prompts
    ]
    return [row[0].tolist() for row in made]


def learn(learner: LoadedModel, optimizer: torch.optim.Optimizer, rows: list[list[int]], seed: int) -> None:
    """A policy gradient with advantages by chance, normed as a trainer does."""
    model: Any = learner.model
    advantages = torch.randn(len(rows), generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    for row, advantage in zip(rows, (advantages - advantages.mean()) / advantages.std(), strict=True):
        (-advantage * log_probs(model, row).mean() / len(rows)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def faulty(right: Any, older: deque[Any]) -> Iterator[tuple[str, Any]]:
    """Engines that something is wrong with; `older` are those of the versions before, the newest first."""
    for name, age in zip(OLD, (1, 2, 5), strict=True):
        if len(older) >= age:
            yield name, older[age - 1]
    yield WARMER, right


def proved(control: EngineControl, policy: PublishedPolicy) -> bool:
    with suppress(ProofFailed):
        prove(control, policy)
        return True
    return False


def measure(folder: Path, learner: LoadedModel, rate: float) -> Row:
    row, older = Row(rate), deque[Any](maxlen=5)
    probes: Prober = prober(learner, number_type="bfloat16", temperature=0.7)
    optimizer = torch.optim.AdamW(learner.model.parameters(), lr=rate)
    published(folder / "000000", learner, probes=probes)
    with (
        serving(folder / "000000", number_type="bfloat16", max_model_len=4096) as server,
        EngineControl(server.address, model="tiny") as control,
    ):
        publish(control, folder / "000000")
        engine, said = server.models, replies(learner, 0)
        for version in range(1, PUBLISHES + 1):
            older.appendleft(engine.model)
            said = said if MODEL and version % 4 else replies(learner, version)
            probes.remember(tuple(tuple(ids[-TOKENS - 1 :]) for ids in said))
            learn(learner, optimizer, said, seed=version)
            target = folder / f"{version:06d}"
            policy = published(target, learner, version=version, probes=probes)
            try:
                note(row, publish(control, target))
            except ProofFailed as failed:
                print(failed)
                row.refused += 1
                continue
            right = engine.model
            for name, model in faulty(right, older) if version % EVERY == 0 else ():
                engine.model, engine.temperature_factor = model, 1.1 if name == WARMER else 1.0
                row.found[name].append((row.error[-1], not proved(control, policy)))
                engine.model, engine.temperature_factor = right, 1.0
            for path in target.glob("*.safetensors"):
                path.unlink()
    return row


def note(row: Row, proof: Proof) -> None:
    assert proof.weights.moved is not None
    row.moved.append(proof.weights.moved)
    row.error.append(1e9 if proof.weights.error is None else proof.weights.error)


def test_right_publishes_pass_and_wrong_ones_are_refused_as_far_as_they_can_be_told(tmp_path: Path) -> None:
    rows = []
    for rate in (1e-6, 1e-5, 1e-4):
        folder = tmp_path / f"{rate:g}"
        learner = load_model(ModelSection(path=MODEL), Path(MODEL)) if MODEL else small_policy(folder / "model")
        rows.append(measure(folder, learner, rate))
        moved, tries = sorted(rows[-1].moved), rows[-1].found.items()
        found = {name: f"{sum(refused for _, refused in each)} of {len(each)}" for name, each in tries}
        print(f"{rate:g}: {len(moved)} moves, half above {moved[len(moved) // 2]:.2g}; refused {found}", flush=True)
    assert [row.refused for row in rows] == [0, 0, 0]
    for row in rows:
        assert all(refused for _, refused in row.found[WARMER])
        for name in OLD:
            # Nothing is claimed where an update is less than ten standard errors.
            assert all(refused for error, refused in row.found[name] if error < 1 / 10)
