"""`engine_program.py serve MODEL --port N --served-model-name NAME ...`: the test server, started as vLLM is."""

import os
import sys
import time
from pathlib import Path

# As vLLM's own environment would, it has its packages without this project's PYTHONPATH.
sys.path.insert(0, str(Path(__file__).parents[2]))

if sys.argv[1:] == ["--version"]:
    print("0.32.0")
    sys.exit()

import torch

from tests.fakes.engine_server import serving


def main() -> None:
    words = sys.argv[1:]
    given = {name: words[at + 1] for at, name in enumerate(words) if name.startswith("--") and at + 1 < len(words)}
    torch.set_num_threads(1)
    longest = int(given.get("--max-model-len", "4096"))
    name, key = given["--served-model-name"], os.environ.get("VLLM_API_KEY")
    options = {"name": name, "key": key, "max_model_len": longest, "transfers": "--weight-transfer-config" in words}
    with serving(Path(words[1]), port=int(given["--port"]), access_log=True, **options):
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    main()
