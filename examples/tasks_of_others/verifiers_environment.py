"""An environment of verifiers as an agent: `verifiers_environment.py NAME` writes its tasks, one a line, as rows.

Without a name it plays the row on standard input: its client asks the policy, and its rubric is the reward.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import verifiers


def main() -> None:
    if len(sys.argv) > 1:
        for row in verifiers.load_environment(sys.argv[1]).get_dataset():
            print(json.dumps({"environment": sys.argv[1], "input": row}))
        return
    print(json.dumps({"reward": asyncio.run(play(json.loads(sys.stdin.readline())))}))


async def play(row: Mapping[str, Any]) -> float:
    """The rubric's reward. Raises RuntimeError where the environment or its client failed."""
    environment = verifiers.load_environment(row["environment"])
    client = verifiers.ClientConfig(api_key_var="OPENAI_API_KEY", api_base_url=os.environ["OPENAI_BASE_URL"])
    played = await environment.run_rollout(row["input"], client, "policy", {})
    if played["error"] is not None:
        raise RuntimeError(f"{row['environment']} must play its task, got {played['error']}.")
    return float(played["reward"])


if __name__ == "__main__":
    main()
