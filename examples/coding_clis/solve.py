"""A coding program of others on a task of a few files: `solve.py codex /path/to/codex`, with a row on standard input.

The row has a `prompt`, `files` by their names, and a `check`: Python that fails where the task is not done.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

COMMANDS = {  # words of one line
    "aider": "--model=openai/policy --weak-model=openai/aside --edit-format=diff --openai-api-base={url} --yes-always "
    "--no-check-update --analytics-disable --no-show-model-warnings --message {prompt} {files}",
    "claude": "--dangerously-skip-permissions -p {prompt}",
    "codex": "exec --dangerously-bypass-approvals-and-sandbox --skip-git-repo-check --model=policy "
    "-c model_provider=gateway -c {codex} {prompt}",
    "mini": "--model=openai/policy --yolo --exit-immediately --task {prompt}",
    "opencode": "run --model=gateway/policy {prompt}",
    "qwen": "--auth-type=openai --yolo -p {prompt}",
}
CODEX = 'model_providers.gateway={name="gateway", base_url="URL", env_key="OPENAI_API_KEY", wire_api="responses"}'
OPENCODE = {
    "model": "gateway/policy",
    "small_model": "gateway/aside",
    "permission": "allow",
    "provider": {
        "gateway": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
            "models": {"policy": {}, "aside": {}},
        }
    },
}
SETTINGS = {
    "CLAUDE_CODE_SUBAGENT_MODEL": "policy/subagent",
    "IS_SANDBOX": "1",  # for claude: being root is no reason to ask for permissions
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "OPENCODE_CONFIG_CONTENT": json.dumps(OPENCODE),
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}


def main(name: str, program: str) -> float:
    """1 if the check passes once the program has ended."""
    row, url = json.loads(sys.stdin.readline()), os.environ["OPENAI_BASE_URL"]
    given = {"{prompt}": [row["prompt"]], "{files}": [*row["files"]], "{codex}": [CODEX.replace("URL", url)]}
    words = [one for word in COMMANDS[name].split() for one in given.get(word, [word.replace("{url}", url)])]
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as folder:
        for file, text in row["files"].items():
            path = Path(folder, file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        settings = {**os.environ, **SETTINGS, "HOME": home, "PWD": folder}
        subprocess.run([program, *words], cwd=folder, env=settings, stdin=subprocess.DEVNULL, check=False)
        checked = subprocess.run([sys.executable, "-c", row["check"]], cwd=folder, check=False)
    return float(checked.returncode == 0)


if __name__ == "__main__":
    print(json.dumps({"reward": main(*sys.argv[1:])}))
