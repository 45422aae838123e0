"""Folders of rows, which the hub's own client brings to a server that answers as the hub does, and back."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from replay import ReplayStore
from replay.exchange import export_file, export_folder, import_file
from tests.fakes.hub_server import TOKEN, HubServer, served
from tests.fakes.records import RUN, a_run, new_store, put, session_row, trajectory
from tests.fakes.replay_command import ask
from tests.replay.exchange.test_exchange import filled

ROWS = "data/trajectories.parquet"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """20 rows of every shape, and an agent's session."""
    with closing(filled(new_store(tmp_path / "run.sqlite"))) as store:
        put(store, session_row("agent"))
        store.labels.add(["agent"], "good", by="mistress")
        store.labels.add([RUN], "baseline", by="mistress", on="run")
        export_file(store, tmp_path / "rows.parquet")
    return tmp_path / "run.sqlite"


def test_folder_goes_to_the_hub_and_back_by_its_own_client(run: Path, tmp_path: Path) -> None:
    wins, back, database = (tmp_path / name for name in ("wins", "back", "back.sqlite"))
    assert ask("export", run, "--to", wins).output.startswith("21 rows in ")
    with served(HubServer()) as hub:
        settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        settings |= {"HF_HOME": str(tmp_path / "home")}
        for words in (
            ["upload", "jane/wins", str(wins), "--repo-type", "dataset", "--private"],
            ["download", "jane/wins", "--repo-type", "dataset", "--local-dir", str(back)],
        ):
            hf = Path(sys.executable).with_name("hf")
            subprocess.run([hf, *words], env={**os.environ, **settings}, check=True, capture_output=True, timeout=120)
        assert hub.private["jane/wins"]
    with closing(ReplayStore.create(database)) as store:
        assert ask("import", back, database, "--keep-source").output.startswith("21 rows imported from ")
        export_file(store, tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "rows.parquet").read_bytes()
    refused = ask("export", run, "--to", wins)
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert refused.stderr.startswith(f"agentloop: FILE must not exist, got '{wins}/README.md'. Choose another name, or")
    assert ask("export", run, "--to", wins, "--without-labels", "--force").exit_code == 0
    assert b"mistress" not in (wins / ROWS).read_bytes()


def test_folder_is_read_by_datasets_and_comes_back(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="datasets is installed by make test")
    folder = tmp_path / "wins"
    with closing(ReplayStore.open(run)) as store:
        store.add_run(a_run("run-2"))
        put(store, trajectory("other", run="run-2", group="g2"))
        export_folder(store, folder, license="mit")
        export_file(store, tmp_path / "rows.parquet", force=True)
    card = (folder / "README.md").read_text().splitlines()
    assert 'license: "mit"' in card and "# 22 trajectories of tool-using agents" in card
    found = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    found.to_parquet(folder / ROWS)
    with closing(ReplayStore.create(tmp_path / "back.sqlite")) as store:
        assert import_file(store, folder, name=None).inserted == 22
        export_file(store, tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "rows.parquet").read_bytes()
