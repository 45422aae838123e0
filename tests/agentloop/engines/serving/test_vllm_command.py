"""vLLM is started with the words that proved publishing needs, on this machine only, and its key is in none of them."""

from pathlib import Path
from typing import Any

import pytest

from agentloop.engines.serving.engine_process import ServeOptions, find_vllm, serve_command, serve_environment
from agentloop.engines.serving.served_engine import serve_options
from agentloop.errors import UserError
from tests.fakes.refusals import refusal_of
from tests.fakes.runs import small_config

NOT_KEPT = {"keep_policies": "none"}


MEMORY = {"memory_share": 0.4, "sleep_level": 2, "shares_memory": True}
SHARED = """ --gpu-memory-utilization 0.4 --enable-sleep-mode --weight-transfer-config {"backend": "ipc"}"""
LORA_VARIABLE, MEMORY_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_INSECURE_SERIALIZATION"
RANKS = [(1, 1), (4, 8), (16, 16), (48, 64)]


@pytest.mark.parametrize(
    ("chosen", "words", "variables"),
    [
        ({}, "", set()),
        ({"max_model_len": 4096, "further": ("--seed", "2")}, " --max-model-len 4096 --seed 2", set()),
        (MEMORY, SHARED, {MEMORY_VARIABLE}),
        *(
            ({"lora_rank": rank}, f" --enable-lora --max-lora-rank {most} --max-loras 2", {LORA_VARIABLE})
            for rank, most in RANKS
        ),
    ],
)
def test_command_and_environment_let_a_run_publish(chosen: dict[str, Any], words: str, variables: set[str]) -> None:
    options = ServeOptions("model", port=8123, **chosen)
    assert " ".join(serve_command(Path("/v/vllm"), options)) == (
        "/v/vllm serve model --served-model-name policy --host 127.0.0.1 --port 8123 --dtype auto "
        f"--logprobs-mode processed_logprobs --enable-scale-out{words}"
    )
    assert options.url == "http://127.0.0.1:8123"
    environment = serve_environment(options, None, {})
    assert {name for name in environment if "ALLOW" in name} == variables
    assert all(environment[name] == "1" for name in variables)


def test_environment_is_its_own() -> None:
    base = {"PATH": "/bin", "PYTHONPATH": "/ours", "VIRTUAL_ENV": "/ours", "AGENTLOOP_ENGINE_KEY": "secret"}
    found = serve_environment(ServeOptions("model"), "secret", base)
    assert found == {"PATH": "/bin", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_API_KEY": "secret"}


def test_executable_is_the_one_named_and_new_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "vllm"
    _says(program, "Triton is installed, but disabled\n0.32.1rc1+cpu")
    monkeypatch.delenv("AGENTLOOP_VLLM", raising=False)
    with monkeypatch.context() as on_the_path:
        on_the_path.setenv("PATH", str(tmp_path))
        assert find_vllm({}) == program
    monkeypatch.setenv("AGENTLOOP_VLLM", "/nowhere/vllm")
    with pytest.raises(UserError, match="AGENTLOOP_VLLM must be vLLM's own executable, got '/nowhere/vllm'"):
        find_vllm({})
    monkeypatch.setenv("AGENTLOOP_VLLM", str(program))
    assert find_vllm({}) == program
    for said, got in (("0.26.0", "0.26.0"), ("0.9.2", "0.9.2"), ("it is not said", "exit code 0")):
        _says(program, said)
        assert refusal_of(find_vllm, {}) == (
            f"AGENTLOOP_VLLM must be of vLLM 0.32 or newer, got {got} at {program}. "
            "Install it in vLLM's own environment: pip install 'vllm>=0.32'."
        )


def _says(program: Path, text: str) -> None:
    program.write_text(f"#!/bin/sh\necho '{text}'\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("sections", "shares_gpu", "level", "in_memory"),
    [
        ({"checkpoint": NOT_KEPT}, True, 2, True),
        ({"checkpoint": NOT_KEPT, "engine": {"transfer": "file"}}, True, 2, False),
        ({"checkpoint": {"keep_policies": "all"}}, True, 2, False),
        ({"checkpoint": NOT_KEPT, "lora": {"rank": 4}}, True, 1, False),
        ({"checkpoint": NOT_KEPT}, False, 0, False),
    ],
)
def test_sleep_follows_the_run(
    sections: dict[str, dict[str, Any]], shares_gpu: bool, level: int, in_memory: bool
) -> None:
    given = {**sections, "engine": {"serve": True, **sections.get("engine", {})}, "rollout": {"engine": "vllm"}}
    options = serve_options(small_config(Path("runs"), Path("model"), **given), "model", shares_gpu=shares_gpu)
    assert (options.sleep_level, options.shares_memory) == (level, in_memory)
    assert options.lora_rank == sections.get("lora", {}).get("rank", 0)
    assert (options.model, options.max_model_len, options.memory_share) == ("model", 400, 0.4)
    assert options.url == f"http://127.0.0.1:{options.port}"
