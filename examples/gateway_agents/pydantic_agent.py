"""The same as an agent of pydantic-ai."""

from typing import Any

from openai import AsyncOpenAI
from pydantic_ai import Agent, AgentRunError, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

MOST_TURNS = 12


async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """1 if the answer is the right one."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
        agent = Agent(model, system_prompt=task["system"])

        @agent.tool_plain
        def lookup(key: str) -> dict[str, str]:
            """Look up the record of a key."""
            record: dict[str, str] = task["store"].get(key, {"error": "unknown key"})
            return record

        try:
            run = await agent.run(task["prompt"], usage_limits=UsageLimits(request_limit=MOST_TURNS))
        except AgentRunError:  # too many turns, or replies that pydantic-ai takes for none
            return 0.0
    return float(run.output == task["answer"])
