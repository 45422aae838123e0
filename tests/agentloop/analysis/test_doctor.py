import sys
from pathlib import Path

import pytest

from agentloop.analysis.doctor import check_cpu, check_disk, check_engine, check_machine
from tests.fakes.scripted_http import scripted_server
from tests.replay.storage.test_machine import mounted

GIB = 1024**3


@pytest.mark.parametrize(
    "free, kind, status", [(1.9, "ext4", "warn"), (2.1, "ext4", "ok"), (2.1, "nfs4", "warn"), (3.0, "tmpfs", "ok")]
)
def test_disk_is_judged_by_its_room_and_its_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, kind: str, status: str
) -> None:
    mounted(monkeypatch, tmp_path, kind)
    check = check_disk(int(free * GIB), tmp_path)
    assert (check.status, kind in check.found) == (status, kind == "nfs4")
    assert check_disk(int(free * GIB), Path("/nowhere")).status == "fail"


def test_doctor_checks_everything_without_making_the_run_folder(tmp_path: Path) -> None:
    found = check_machine(tmp_path / "runs" / "deep")
    assert list(tmp_path.iterdir()) == []
    assert [check.name for check in found] == ["optional packages", "device", "sandbox", "disk"]
    assert "peft" in found[0].found
    assert "CPU cores" not in found[1].found or found[1].found.endswith("B memory")
    assert all(check.advice for check in found if check.status != "ok")


def test_extra_is_there_where_all_its_packages_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    there, advice = check_machine(tmp_path)[0][2:]
    assert "pandas" not in there and advice.startswith("For parquet, pandas")


def test_a_cpu_is_told_by_its_products_in_bfloat16() -> None:
    slow, quick = check_cpu(28.31), check_cpu(0.5)
    assert "products in bfloat16 about 28 times slower than in float32" in slow.found
    assert "products in bfloat16 about 2 times quicker than in float32" in quick.found
    assert slow.advice == "Enough for the built-in model."
    assert quick.advice == "For a model of your own set compute.autocast: bfloat16."


def test_engine_is_ok_where_a_policy_could_be_published_to_it() -> None:
    with scripted_server() as server:
        server.answers = {"/health": (200, None), "/weight_info": (200, {"weight_version": "run@3"})}
        server.answers["/version"] = (200, {"version": "0.32.0"})
        server.answers["/v1/models"] = (200, {"data": [{"id": "policy", "parent": None}]})
        found = check_engine(server.url, "the-key")
        assert (found.status, found.found) == ("ok", f"{server.url} serves weights that it calls 'run@3'")
        assert server.keys == {"Bearer the-key"}
        del server.answers["/weight_info"]
        without = check_engine(server.url, None)
        assert without.status == "fail" and "Start it with VLLM_SERVER_DEV_MODE=1" in without.found
        server.answers["/version"] = (200, {"version": "0.26.0"})
        old = check_engine(server.url, None).found
        assert old.startswith(f"--engine must be of vLLM 0.32 or newer, got 0.26.0 at {server.url}")
    nobody = check_engine(server.url, None)
    assert (nobody.status, nobody.advice) == ("fail", "Start it: agentloop engine MODEL")
