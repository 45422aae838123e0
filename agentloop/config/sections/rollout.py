"""The sections about acting: episodes, who collects them, engines, gateway and evaluations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from agentloop.algorithms.catalog import OBJECTIVES
from replay.setting_types import NonNegative, Positive, PositiveFloat, Section

if TYPE_CHECKING:
    from agentloop.config.run_config import RunConfig


class RolloutSection(Section):
    engine: Literal["local", "vllm"] = Field(
        "local", description="What samples replies: this process, or vLLM at engine.urls or by engine.serve."
    )
    max_turns: Positive = Field(9, description="Most replies of the policy in one episode.")
    max_tokens_per_turn: Positive = Field(40, description="Most tokens of one reply.")
    parallel: Positive = Field(256, description="Most episodes run at once; bounds the memory of the key-value cache.")
    success_reward: float = Field(1.0, description="An episode is a success from this reward on.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature; stored with the log-probs.")
    tool_threads: Positive = Field(128, description="Most tool calls that run at once.")
    tool_timeout_s: PositiveFloat = Field(10.0, description="Seconds a tool call may take.")
    episode_timeout_s: PositiveFloat = Field(14_400.0, description="Seconds for an episode, its start and its reward.")
    tool_output_chars: Positive = Field(20_000, description="Longest tool result shown to the policy, in characters.")
    replay_observations: bool = Field(
        True,
        description="A call of a tool that the environment declares deterministic gets the result of an earlier equal "
        "call; false: every call is run.",
    )
    dynamic_sampling_rounds: int = Field(
        0,
        ge=0,
        description="Most rounds in which groups of equal rewards are replaced by groups of further tasks (dynamic "
        "sampling); 0: they stay.",
    )


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    port = parts.netloc.rpartition("@")[2].rpartition("]")[2].partition(":")[2]
    whole = parts.scheme in ("http", "https") and parts.hostname and (not port or port.isdecimal())
    if not whole or parts.query or parts.fragment:
        raise ValueError(f"each of engine.urls must be http://HOST:PORT or https://HOST:PORT, got {url!r}.")
    if parts.username is not None or parts.password is not None:
        # The URL itself would show it.
        raise ValueError(
            "engine.urls must hold no user and no password, got a URL with one. Put the key into AGENTLOOP_ENGINE_KEY."
        )
    return url.rstrip("/")


EngineUrl = Annotated[str, AfterValidator(_checked_url)]


class EngineSection(Section):
    serve: bool = Field(
        False,
        description="The run starts its own vLLM, by the executable that AGENTLOOP_VLLM names, and ends it. Where the "
        "policy is on a GPU, the two use it by turns. See docs/real-models.md.",
    )
    memory_share: PositiveFloat = Field(0.4, le=1, description="With serve: vLLM's share of the GPU's memory.")
    transfer: Literal["memory", "file"] = Field(
        "memory",
        description="With serve on a GPU: whole weights go to vLLM through its memory (CUDA IPC), or in files. "
        "Adapters, a CPU, and checkpoint.keep_policies always use files.",
    )
    options: tuple[str, ...] = Field((), description="With serve: more words for vllm serve, e.g. [--dtype, float32].")
    urls: tuple[EngineUrl, ...] = Field((), description="Where vLLM listens: http://HOST:PORT, all with one model.")
    concurrency: Positive = Field(64, description="Most replies under way at once, over all engines.")
    turn_timeout_s: PositiveFloat = Field(600.0, description="Seconds until a reply is given up, including retries.")
    restart_timeout_s: NonNegative = Field(300.0, description="Seconds that replies wait for a silent engine.")


def check_engine(config: RunConfig) -> None:
    """Raises ValueError where no server is named or started for vLLM, or one is named twice."""
    urls = config.engine.urls
    if config.rollout.engine == "vllm" and not urls and not config.engine.serve:
        raise ValueError(
            "engine.urls must name at least one server when rollout.engine is vllm, got none. "
            "Set engine.urls: [http://127.0.0.1:8000], or engine.serve: true."
        )
    if len(set(urls)) < len(urls):
        raise ValueError(f"engine.urls must name each server once, got {', '.join(urls)}.")


class EvaluationSection(Section):
    every: int = Field(4, ge=0, description="Iterations between held-out evaluations; 0: only before and after.")
    tasks: Positive = Field(256, description="Held-out tasks of one evaluation; the same ones each time.")
    samples: Positive = Field(1, description="Episodes on each of them: pass@k is known up to this k.")
    temperature: NonNegative = Field(1.0, description="Sampling temperature of evaluations; 0: greedy.")
    keep_episodes: int = Field(10, ge=0, description="Newest evaluations whose episodes are kept, to be read.")


class GatewaySection(Section):
    host: str = Field("127.0.0.1", description="Address to listen on, for environments that are agents.")
    port: int = Field(0, ge=0, lt=65536, description="Port to listen on; 0: any that is free.")
    public_url: str | None = Field(
        None, pattern="^https?://[^@]+$", description="Where agents on other machines find it; null: at host and port."
    )
    unsupported: Literal["refuse", "instruct"] = Field(
        "instruct",
        description="What becomes of a reply format, a required call or single calls, which no engine can enforce. "
        "instruct: the policy is asked for it in the last user message; refuse: the request gets a 400.",
    )


class CollectionSection(Section):
    by: Literal["loop", "workers"] = Field(
        "loop",
        description="loop: the training process runs the episodes; workers: `agentloop worker` runs them, in any "
        "number of processes, on any machines. See docs/scaling.md.",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="Most publishes between the sampling of a fresh trajectory and the update that learns from it. 0: "
        "workers and learner take turns; 1: workers are one batch ahead; and so on. No trajectory is thrown away.",
    )
    lease_s: PositiveFloat = Field(60.0, description="Seconds after which a silent worker or learner counts as gone.")


def check_collection(config: RunConfig) -> None:
    """Raises ValueError where the loss does not fit rows that workers collect ahead, for an earlier policy sampled
    these."""
    fresh, staleness = config.loss.fresh, config.collection.max_staleness
    if staleness == 0 or fresh.correction.kind != "none":
        return
    advice = "Set it, or loss.fresh.correction.kind: truncate."
    objective = OBJECTIVES.get(fresh.objective.name)
    if objective is not None and not objective.bounded:
        raise ValueError(
            f"loss.fresh.objective must be one that stays near the policy that sampled when collection.max_staleness "
            f"is above 0 ({staleness}), such as ppo_clip, got {fresh.objective.name}. {advice}"
        )
    if fresh.anchor != "behavior":
        raise ValueError(
            f"loss.fresh.anchor must be behavior when collection.max_staleness is above 0 ({staleness}), for the old "
            f"policy is not the one that sampled, got {fresh.anchor}. {advice}"
        )
