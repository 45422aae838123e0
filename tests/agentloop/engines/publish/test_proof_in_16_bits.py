"""An engine that holds bfloat16 copies and multiplies in it: its rounding is told from weights that are others."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentloop.engines.publish.engine_control import EngineControl
from agentloop.engines.publish.proof import PROOFS, ProofFailed, prove, publish
from agentloop.engines.publish.published_policy import PublishedPolicy
from agentloop.models.loading import LoadedModel
from tests.fakes.engine_sampling import EngineModels, load, plain_log_probs
from tests.fakes.engine_server import serving
from tests.fakes.published_policies import TEXT, prober, published, step, tiny_learner

pytestmark = pytest.mark.slow


@dataclass
class Served:
    """A learner, and a server in bfloat16 that has its version 0; `update` makes and publishes the next one."""

    folder: Path
    learner: LoadedModel
    control: EngineControl
    models: EngineModels

    def __post_init__(self) -> None:
        self._probes = prober(self.learner, number_type="bfloat16")
        self._rows = tuple(tuple(self.learner.tokenizer.encode(text)) for text in TEXT[:16])
        self.version = 0

    def write(self, *, size: float) -> tuple[Path, PublishedPolicy]:
        self.version += 1
        self._probes.remember(self._rows)
        step(self.learner, seed=self.version, size=size)
        folder = self.folder / f"{self.version:06d}"
        return folder, published(folder, self.learner, version=self.version, probes=self._probes)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    learner = tiny_learner(tmp_path / "model")
    published(tmp_path / "000000", learner, probes=prober(learner, number_type="bfloat16"))
    with (
        serving(tmp_path / "000000", number_type="bfloat16") as one,
        EngineControl(one.address, model="tiny") as control,
    ):
        yield Served(tmp_path, learner, control, one.models)


def test_right_weights_pass_however_little_or_much_they_moved(served: Served) -> None:
    for size in (0.0, 1e-6, 1e-4, 1e-3, 1e-2):
        folder, policy = served.write(size=size)
        proof = publish(served.control, folder)
        assert proof.holds and proof.weights.rounding > 1e-3
        # Rounding of one kind on both sides: neither has twice the other's.
        assert 0.5 < proof.weights.difference / proof.weights.rounding < 2
    # The probe is of weights that are rounded, and of products that are not.
    exact = load(folder, "bfloat16").float()
    for row, log_probs in zip(policy.probe.rows, policy.probe.log_probs, strict=True):
        assert log_probs == pytest.approx(plain_log_probs(exact, row[:1], row[1:]), abs=1e-5)


def test_weights_before_are_refused_with_what_shows_it(served: Served) -> None:
    first = served.models.model
    folder, policy = served.write(size=1e-6)
    publish(served.control, folder)
    second, served.models.model = served.models.model, first
    assert prove(served.control, policy).holds  # bfloat16 does not show so small an update
    served.models.model = second
    folder, policy = served.write(size=0.01)
    publish(served.control, folder)
    served.models.model = second
    with pytest.raises(ProofFailed) as refused:
        prove(served.control, policy)
    said = str(refused.value)
    assert said.startswith(f"the engine at {served.control.url}, published {policy.label}, must sample with")
    assert " before the update; of an update that moves them by 0." in said
    assert said.endswith("it has kept previous weights. Start it again from a published folder.")


def test_another_temperature_is_refused_and_each_proof_is_recorded(served: Served) -> None:
    folder, policy = served.write(size=0.01)
    publish(served.control, folder)
    served.models.temperature_factor = 1.1
    with pytest.raises(ProofFailed, match="next tokens differ by .* without sampling settings of its own"):
        publish(served.control, folder)
    lines = [json.loads(line) for line in (served.folder / PROOFS).read_text().splitlines()]
    assert [line["holds"] for line in lines] == [True, False, False]  # it was sent once more before it was refused
    assert {line["policy"] for line in lines} == {policy.label}
    assert lines[0]["weights"].keys() == {"tokens", "difference", "rounding", "moved", "share", "error"}


def test_keys_and_values_of_old_weights_are_cleared_by_a_publish(served: Served) -> None:
    folder, policy = served.write(size=0.05)
    for row in policy.probe.rows:  # from now on their prefixes are cached
        served.control.score_tokens(row, temperature=0.7, model="tiny")
    publish(served.control, folder)
    served.models.cached = dict.fromkeys(policy.probe.rows, load(served.folder / "000000", "bfloat16"))
    with pytest.raises(ProofFailed, match="next tokens differ by"):
        prove(served.control, policy)


def test_an_engine_in_another_type_than_the_probe_is_refused(served: Served, tmp_path: Path) -> None:
    policy = published(tmp_path / "float32", served.learner, probes=prober(served.learner))
    served.control.name_weights(policy.label)
    with pytest.raises(ProofFailed, match="must multiply in float32 as the run's engines did .* got bfloat16"):
        prove(served.control, policy)
