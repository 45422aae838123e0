"""examples/minimal_loop.py remembers, replays, learns from both streams, and says which rows fed which update."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentloop.learning.batch import build_batch
from agentloop.models.actor import Actor
from examples import minimal_loop
from replay.records import BatchRow
from replay.store import ReplayStore
from tests.fakes.runs import rows

ITERATIONS = 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ReplayStore, Path, Any]]:
    """The buffer, its file, and the model after some iterations."""
    path = tmp_path_factory.mktemp("minimal") / "replay.sqlite"
    store = ReplayStore.create(path)
    model = minimal_loop.run(store, iterations=ITERATIONS)
    yield store, path, model
    store.close()


def test_buffer_holds_what_was_sampled_with_its_log_probs(trained: tuple[ReplayStore, Path, Any]) -> None:
    store, path, _ = trained
    ids = [id for (id,) in rows(path, "select id from trajectories")]
    assert len(ids) == 32 * ITERATIONS
    for row in store.read(ids):
        (segment,) = row.segments
        known = np.isfinite(segment.tokens.behavior_log_probs)
        assert known.sum() == row.record.num_action_tokens > 0
        assert set(segment.tokens.policy_versions[known]) == {row.record.iteration - 1}


def test_every_update_says_which_rows_fed_it(trained: tuple[ReplayStore, Path, Any]) -> None:
    _, path, _ = trained
    counts = dict(rows(path, "select stream, count(*) from draws where state = 'committed' group by 1"))
    replayed = [drawn for (drawn,) in rows(path, "select replay from iterations order by iteration")]
    assert counts == {"fresh": 32 * ITERATIONS, "replay": sum(replayed)}
    assert replayed[0] == 0 < sum(replayed)
    assert rows(
        path,
        "select count(*) from draws d join trajectories t on t.id = d.trajectory "
        "where d.stream = 'replay' and (t.success = 0 or t.iteration >= d.iteration)",
    ) == [(0,)]
    ((lowest, highest),) = rows(path, "select min(value), max(value) from metrics where name = 'actor/replay/ess'")
    assert 0 < lowest < 0.99 and highest <= 1  # the weights have moved since


def test_ratio_of_fresh_rows_is_one(trained: tuple[ReplayStore, Path, Any]) -> None:
    """Scoring finds the log-probs that sampling stored, token by token."""
    _, _, model = trained
    collected = minimal_loop.collect(model, minimal_loop.make_renderer(), iteration=ITERATIONS + 1)
    batch = build_batch([BatchRow(row) for row in collected], minimal_loop.AUTHORS)
    with torch.no_grad():
        found, _ = Actor(model).log_probs(
            batch.token_ids, batch.attention_mask, batch.response_mask, batch.temperature, entropy=False
        )
    ratios = (found - batch.behavior_log_probs)[batch.response_mask].exp()
    assert ratios.tolist() == pytest.approx([1.0] * len(ratios), abs=1e-5)


@pytest.mark.soak
def test_it_learns(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    minimal_loop.run(ReplayStore.create(path), iterations=50)
    (last,) = rows(path, "select avg(value) from metrics where name = 'rollout/success' and iteration > 40")[0]
    assert last > 0.8
