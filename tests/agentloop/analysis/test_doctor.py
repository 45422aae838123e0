from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentloop.analysis.doctor import check_disk, check_engine, check_file_system, checks
from tests.fakes.scripted_http import scripted_server
from tests.replay.storage.test_machine import mounted

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("free", "status"), [(0.2, "fail"), (0.3, "warn"), (1.9, "warn"), (2.1, "ok")])
def test_doctor_judges_free_disk_in_gibibytes(free: float, status: str) -> None:
    assert check_disk(int(free * 1024**3), Path("/")).status == status
    unwritable = check_disk(1024**4, Path("/proc"))
    assert (unwritable.status, unwritable.found[:23]) == ("fail", "can't write in /proc: n")


@pytest.mark.parametrize(
    ("kind", "status"), [("nfs4", "warn"), ("fuse.sshfs", "warn"), ("ext4", "ok"), ("tmpfs", "ok")]
)
def test_doctor_warns_where_the_store_refuses_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, status: str
) -> None:
    mounted(monkeypatch, tmp_path, kind)
    check = check_file_system(tmp_path)
    assert (check.status, kind in check.found) == (status, status == "warn")


@pytest.mark.slow
def test_doctor_finds_a_local_module_that_shadows_one_of_ours(tmp_path: Path) -> None:
    (tmp_path / "context.py").write_text("")
    code = (
        f"import sys; sys.path.append({str(ROOT)!r})\n"
        "from agentloop.analysis.doctor import check_module\n"
        "for name in ('context', 'replay'):\n"
        "    check = check_module(name); print(check.status, check.found)\n"
    )

    def seen(first_on_path: str) -> list[str]:
        command = [sys.executable, "-c", f"import sys; sys.path[0] = {first_on_path!r}\n{code}"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()

    # First on the path it is what `import context` gives; elsewhere it would only be, from this folder.
    assert seen(str(tmp_path)) == [f"fail comes from {tmp_path}/context.py", f"ok {ROOT}/replay"]
    assert seen(str(ROOT)) == [f"warn {tmp_path}/context.py has the same name", f"ok {ROOT}/replay"]


def test_doctor_checks_everything_without_making_the_run_folder(tmp_path: Path) -> None:
    found = checks(tmp_path / "runs" / "deep")
    assert list(tmp_path.iterdir()) == []
    modules = [f"module {name}" for name in ("agentloop", "replay", "context")]
    assert [check.name for check in found] == [*modules, "device", "disk", "file system"]
    assert json.loads(json.dumps([check._asdict() for check in found]))[0]["name"] == "module agentloop"
    assert all(check.advice for check in found if check.status != "ok")


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
