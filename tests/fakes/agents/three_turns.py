"""An agent that asks three times, and says in a file where and with which key."""

from typing import Any

from openai import OpenAI


def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """1 where every reply came."""
    with open(task["keys"], "a", encoding="utf-8") as keys:
        keys.write(f"{base_url} {api_key}\n")
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(3):
            reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "Go on."}]
    return 1.0
