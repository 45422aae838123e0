"""The look-ups by agent frameworks, each as its own documentation shows it: `python frameworks.py smolagents-code`.

The program needs only that framework. It reads the row on standard input; the gateway is in OPENAI_BASE_URL.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

TASK: dict[str, Any] = {}
MODEL = "policy"
MOST_TURNS = 4


class Answer(BaseModel):
    text: str


def lookup(key: str) -> str:
    """Look up the record of a key.

    Args:
        key: The key of the record.
    """
    return json.dumps(TASK["store"].get(key, {"error": "unknown key"}))


def smolagents_code() -> Any:
    from smolagents import CodeAgent, OpenAIServerModel, tool

    return CodeAgent(tools=[tool(lookup)], model=OpenAIServerModel(MODEL), max_steps=MOST_TURNS).run(TASK["prompt"])


def smolagents_tools() -> Any:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    agent = ToolCallingAgent(tools=[tool(lookup)], model=OpenAIServerModel(MODEL), max_steps=MOST_TURNS)
    return agent.run(TASK["prompt"])


def langchain_format() -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=MODEL).with_structured_output(Answer, method="json_schema").invoke(TASK["prompt"]).text


def langchain_named() -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=MODEL).with_structured_output(Answer, method="function_calling").invoke(TASK["prompt"]).text


def langchain_agent() -> Any:
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ToolStrategy
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model=MODEL), tools=[lookup], response_format=ToolStrategy(Answer))
    asked = {"messages": [{"role": "user", "content": TASK["prompt"]}]}
    return agent.invoke(asked, {"recursion_limit": 2 * MOST_TURNS})["structured_response"].text


def dspy_predict() -> Any:
    import dspy

    dspy.configure(lm=dspy.LM(f"openai/{MODEL}", cache=False))
    return dspy.Predict("question -> answer")(question=TASK["prompt"]).answer


def dspy_react() -> Any:
    import dspy

    dspy.configure(lm=dspy.LM(f"openai/{MODEL}", cache=False))
    return dspy.ReAct("question -> answer", tools=[lookup], max_iters=MOST_TURNS)(question=TASK["prompt"]).answer


def crewai_crew() -> Any:
    from crewai import LLM, Agent, Crew, Task
    from crewai.tools import tool

    llm = LLM(model=f"openai/{MODEL}", base_url=os.environ["OPENAI_BASE_URL"])
    clerk = Agent(
        role="Clerk",
        goal="Look records up",
        backstory="You keep records.",
        llm=llm,
        tools=[tool(lookup)],
        max_iter=MOST_TURNS,
    )
    task = Task(description=TASK["prompt"], expected_output="The answer", agent=clerk, output_pydantic=Answer)
    return Crew(agents=[clerk], tasks=[task]).kickoff().raw


def instructor_by(mode: str) -> Any:
    import instructor

    client = instructor.from_provider(f"openai/{MODEL}", mode=instructor.Mode[mode])
    asked: Any = [{"role": "user", "content": TASK["prompt"]}]
    return client.create(response_model=Answer, messages=asked, max_retries=2).text


def openai_agents() -> Any:
    from agents import Agent, ModelSettings, Runner, function_tool

    agent = Agent(
        "Clerk",
        instructions=TASK["system"],
        model=f"openai/{MODEL}",
        tools=[function_tool(lookup)],
        output_type=Answer,
        model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False),
    )
    return Runner.run_sync(agent, TASK["prompt"], max_turns=MOST_TURNS).final_output.text


def pydantic_ai() -> Any:
    from pydantic_ai import Agent, UsageLimits

    agent = Agent(f"openai-chat:{MODEL}", system_prompt=TASK["system"], tools=[lookup], output_type=Answer)
    return agent.run_sync(TASK["prompt"], usage_limits=UsageLimits(request_limit=MOST_TURNS)).output.text


FRAMEWORKS: dict[str, Callable[[], Any]] = {
    "smolagents-code": smolagents_code,
    "smolagents-tools": smolagents_tools,
    "langchain-format": langchain_format,
    "langchain-named": langchain_named,
    "langchain-agent": langchain_agent,
    "dspy-predict": dspy_predict,
    "dspy-react": dspy_react,
    "crewai": crewai_crew,
    "instructor-tools": lambda: instructor_by("TOOLS"),
    "instructor-json": lambda: instructor_by("JSON"),
    "instructor-json-schema": lambda: instructor_by("JSON_SCHEMA"),
    "instructor-responses": lambda: instructor_by("RESPONSES_TOOLS"),
    "openai-agents": openai_agents,
    "pydantic-ai": pydantic_ai,
}


def main() -> None:
    TASK.update(json.loads(sys.stdin.readline()))
    try:
        answer = FRAMEWORKS[sys.argv[1]]()
    except Exception as problem:
        if "Error code: 4" in str(problem):  # the gateway has refused a request
            raise
        answer = f"{type(problem).__name__}: {problem}"  # replies that the framework can't read
    print(f"answer: {answer}")
    print(json.dumps({"reward": float(answer == TASK["answer"])}))


if __name__ == "__main__":
    main()
