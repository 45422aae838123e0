"""Hundreds of publishes to an engine in bfloat16: none that is right is refused, and what is refused is in a table."""

from __future__ import annotations

from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentloop.engines.publish.engine_control import EngineControl
from agentloop.engines.publish.proof import ProofFailed, prove, publish
from agentloop.engines.publish.published_policy import PublishedPolicy
from agentloop.models.loading import LoadedModel
from agentloop.training.policies.engine_publisher import Prober
from tests.fakes.engine_server import serving
from tests.fakes.published_policies import TEXT, prober, published, tiny_learner

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]
PUBLISHES, REPLIES, TOKENS, EVERY = 100, 16, 48, 4
"""Of every fourth publish engines are asked that something is wrong with."""
OLD = {"1 version old": 1, "2 versions old": 2, "5 versions old": 5}
WARMER = "temperature x 1.1"


@dataclass
class Row:
    """One learning rate of the table."""

    moved: list[float] = field(default_factory=list)
    refused: int = 0
    """Right publishes that were refused."""
    found: defaultdict[str, list[tuple[float, bool]]] = field(default_factory=lambda: defaultdict(list))
    """The standard error that the publish had, and whether it was refused, by fault."""


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


def refuses(control: EngineControl, policy: PublishedPolicy) -> bool:
    with suppress(ProofFailed):
        prove(control, policy)
        return False
    return True


def measure(folder: Path, learner: LoadedModel, rate: float) -> Row:
    row, older = Row(), deque[Any](maxlen=5)
    probes: Prober = prober(learner, number_type="bfloat16", temperature=0.7)
    optimizer = torch.optim.AdamW(learner.model.parameters(), lr=rate)
    published(folder / "000000", learner, probes=probes)
    with (
        serving(folder / "000000", number_type="bfloat16", max_model_len=4096) as server,
        EngineControl(server.address, model="tiny") as control,
    ):
        publish(control, folder / "000000")
        engine = server.models
        for version in range(1, PUBLISHES + 1):
            older.appendleft(engine.model)
            said = replies(learner, version)
            probes.remember(tuple(tuple(ids[-TOKENS - 1 :]) for ids in said))
            learn(learner, optimizer, said, seed=version)
            target = folder / f"{version:06d}"
            policy = published(target, learner, version=version, probes=probes)
            try:
                weights = publish(control, target).weights
            except ProofFailed as failed:
                print(failed)
                row.refused += 1
                continue
            assert weights.moved is not None
            row.moved.append(weights.moved)
            error, right = 1e9 if weights.error is None else weights.error, engine.model
            if version % EVERY == 0:
                for name, age in OLD.items():
                    if len(older) >= age:
                        engine.model = older[age - 1]
                        row.found[name].append((error, refuses(control, policy)))
                engine.model, engine.temperature_factor = right, 1.1
                row.found[WARMER].append((error, refuses(control, policy)))
                engine.temperature_factor = 1.0
            for path in target.glob("*.safetensors"):
                path.unlink()
    return row


@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1e-4])
def test_right_publishes_pass_and_wrong_ones_are_refused_as_far_as_they_can_be_told(
    rate: float, tmp_path: Path
) -> None:
    row = measure(tmp_path, small_policy(tmp_path / "model"), rate)
    found = {name: f"{sum(refused for _, refused in each)} of {len(each)}" for name, each in row.found.items()}
    print(f"{rate:g}: {len(row.moved)} moves, half above {sorted(row.moved)[len(row.moved) // 2]:.2g}; refused {found}")
    assert row.refused == 0
    assert all(refused for _, refused in row.found[WARMER])
    for name in OLD:
        # Nothing is claimed where an update is less than ten standard errors.
        assert all(refused for error, refused in row.found[name] if error < 1 / 10)
