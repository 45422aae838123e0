"""An environment that is edited while a run stands: nothing goes on with it unless somebody says so."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest

from agentloop.analysis.stored_policies import evaluate_run
from agentloop.environments.factory import source_digest
from agentloop.errors import UserError
from agentloop.runs.run_folder import open_run_folder
from agentloop.training.train import train
from tests.fakes.runs import PARITY, SilentDisplay, StopAfter, rows, save_qwen2, small_config


def write_environment(folder: Path, even: int) -> None:
    """Parity's, with its reward in a file beside it."""
    text = Path(PARITY.rpartition(":")[0]).read_text().replace("% 2 == 0)", "% 2 == EVEN)")
    (folder / "mine.py").write_text(text.replace("class RowParity", "from rule import EVEN\n\n\nclass RowParity"))
    (folder / "rule.py").write_text(f"EVEN = {even}\n")


def test_source_digest_is_of_the_file_and_of_what_it_imports_from_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import json\nfrom near import x\nimport pack.inner\n")
    (tmp_path / "near.py").write_text("def f():\n    import further\n")
    (tmp_path / "further.py").write_text("")
    (tmp_path / "pack").mkdir()
    for name in ("pack/__init__.py", "pack/inner.py", "unused.py"):
        (tmp_path / name).write_text("")
    digests = [source_digest(file)]
    for name in ("mine.py", "near.py", "further.py", "pack/inner.py"):
        (tmp_path / name).write_text((tmp_path / name).read_text() + "# changed\n")
        digests.append(source_digest(file))
    assert len(set(digests)) == 5
    (tmp_path / "unused.py").write_text("# changed\n")
    copied = shutil.copytree(tmp_path, tmp_path / "elsewhere")
    assert source_digest(file) == source_digest(copied / "mine.py") == digests[-1]


@pytest.mark.slow
def test_changed_environment_is_asked_for_and_its_rows_are_of_another_version(tmp_path: Path) -> None:
    write_environment(tmp_path, even=0)
    config = small_config(
        tmp_path / "runs",
        save_qwen2(tmp_path / "model"),
        environment={"name": f"{tmp_path / 'mine.py'}:Parity"},
        evaluation={"tasks": 1},
    )
    run = train(config, display=StopAfter(1)).folder
    first = source_digest(tmp_path / "mine.py")
    assert open_run_folder(run).environments == (first,)
    evaluate_run(run)

    write_environment(tmp_path, even=1)
    second = source_digest(tmp_path / "mine.py")
    changed = rf"mine.py:Parity changed since \(digest {second[:8]} after {first[:8]}\)\. Put it back, or go on with "
    for going_on in (partial(evaluate_run, run), partial(train, config, resume=True, display=SilentDisplay())):
        with pytest.raises(UserError, match=changed):
            going_on()
    version = f"1+{second[:8]}"
    assert evaluate_run(run, environment_changed=True).evaluated.environment_version == version

    display = SilentDisplay()
    train(config, resume=True, environment_changed=True, display=display)
    (note,) = [note for note in display.notes if note.startswith("environment changed")]
    assert f"of its version {version}; 16 of other versions go on being replayed" in note
    assert note.endswith(f"""{run} --where "environment_version != '{version}' and source == 'self'" --yes""")
    stored = "select iteration, environment_version, count(*) from trajectories group by 1, 2 order by 1"
    assert rows(run / "replay.sqlite", stored) == [(1, "1", 16), (2, version, 12), (3, version, 12)]
    assert open_run_folder(run).environments == (first, second)
    evaluate_run(run)  # it is what the run had last
