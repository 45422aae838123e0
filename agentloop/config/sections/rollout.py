"""What the configuration says about acting: episodes, who collects them, engines and evaluations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from agentloop.config.model_defaults import check_unused
from agentloop.config.sections.loss import UNBOUNDED, StreamLossSection
from replay.setting_types import NonNegative, Positive, PositiveFloat, Section

if TYPE_CHECKING:
    from agentloop.config.run_config import RunConfig


class RolloutSection(Section):
    engine: Literal["local", "vllm"] = Field(
        "local", description="What samples: the policy in this process, or vLLM at engine.urls or by engine.serve."
    )
    max_turns: Positive = Field(9, description="Most replies of the policy in one episode.")
    max_tokens_per_turn: Positive = Field(40, description="Most tokens of one reply.")
    parallel: Positive = Field(256, description="Most episodes run at once; bounds the memory of the key-value cache.")
    success_reward: float = Field(1.0, description="An episode is a success from this reward on.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature; stored with the log-probs.")
    tool_threads: Positive = Field(128, description="Most tool calls that run at once.")
    tool_timeout_s: PositiveFloat = Field(10.0, description="Seconds a tool call may take.")
    episode_timeout_s: PositiveFloat = Field(
        14_400.0, description="Seconds an episode may take; also its environment's start and its reward."
    )
    tool_output_chars: Positive = Field(20_000, description="Longest tool result shown to the policy, in characters.")
    replay_observations: bool = Field(
        True,
        description="Calls of tools that the environment declares deterministic are answered by what an equal call "
        "answered before; false: every call is run.",
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
            "engine.urls must hold no user and no password, got a URL with one. "
            "Put the key into the variable that engine.api_key_env names."
        )
    return url.rstrip("/")


EngineUrl = Annotated[str, AfterValidator(_checked_url)]


class EngineSection(Section):
    serve: bool = Field(
        False,
        description="The run starts a vLLM of its own, the executable that AGENTLOOP_VLLM names, which ends with it; "
        "where the policy is on a GPU, the two share it by turns. See docs/real-models.md.",
    )
    memory_share: PositiveFloat = Field(
        0.4, le=1, description="With serve: the share of the GPU's memory that vLLM has for weights and cache."
    )
    transfer: Literal["memory", "file"] = Field(
        "memory",
        description="With serve on a GPU: whole weights go to vLLM through its memory (CUDA IPC), or in files. Files "
        "are what adapters, a CPU, and checkpoint.keep_policies always take.",
    )
    options: tuple[str, ...] = Field(
        (), description="With serve: further words for vllm serve, for example [--dtype, float32]."
    )
    urls: tuple[EngineUrl, ...] = Field(
        (), description="Where vLLM listens, as http://HOST:PORT; each serves the same model."
    )
    served_model_name: str | None = Field(
        None, description="What the engines call the model; null: whatever model they serve."
    )
    api_key_env: str = Field(
        "AGENTLOOP_ENGINE_KEY",
        pattern="^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable that holds the engines' key; the key itself is never stored or logged.",
    )
    concurrency: Positive = Field(64, description="Most replies under way at once, over all engines.")
    turn_timeout_s: PositiveFloat = Field(
        600.0, description="Seconds after which a reply under way is given up, with all its tries."
    )
    restart_timeout_s: NonNegative = Field(
        300.0, description="Seconds for which replies wait for an engine that is gone; then its episodes fail."
    )


def check_engine(config: RunConfig) -> None:
    """URLs belong to engines that somebody else starts."""
    urls, engine = config.engine.urls, config.rollout.engine
    if config.engine.serve:
        _check_serve(config)
    elif config.engine.options:
        raise ValueError(
            f"engine.options must be empty when engine.serve is false, got {list(config.engine.options)}. Give them to "
            "whoever starts vLLM: agentloop engine MODEL -- WORDS."
        )
    elif engine == "vllm" and not urls:
        raise ValueError(
            "engine.urls must name at least one server when rollout.engine is vllm, got none. "
            "Set engine.urls: [http://127.0.0.1:8000], or engine.serve: true."
        )
    if engine == "local" and urls:
        raise ValueError(
            f"engine.urls must be empty when rollout.engine is local, got {', '.join(urls)}. Set rollout.engine: vllm."
        )
    if len(set(urls)) < len(urls):
        raise ValueError(f"engine.urls must name each server once, got {', '.join(urls)}.")


def _check_serve(config: RunConfig) -> None:
    for key, given, right in (
        ("rollout.engine", config.rollout.engine, "vllm"),
        ("engine.urls", list(config.engine.urls), []),
        ("collection.by", config.collection.by, "loop"),
    ):
        if given != right:
            raise ValueError(
                f"{key} must be {right} when engine.serve is true, got {given}. Set it, or start `agentloop engine` "
                "and name its URL in engine.urls."
            )


class EvaluationSection(Section):
    every: int = Field(4, ge=0, description="Iterations between held-out evaluations; 0: only before and after.")
    tasks: Positive = Field(256, description="Held-out tasks of one evaluation; the same ones each time.")
    samples: Positive = Field(1, description="Episodes on each of them: pass@k is known up to this k.")
    temperature: NonNegative = Field(1.0, description="Sampling temperature of evaluations; 0: greedy.")
    keep_episodes: int = Field(
        10, ge=0, description="Evaluations whose episodes are kept to be looked at, the newest ones; 0: none."
    )

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"evaluation.samples must be 1 when evaluation.temperature is 0, for all would be the same, "
                f"got {self.samples}. Raise the temperature."
            )
        return self


class CollectionSection(Section):
    by: Literal["loop", "workers"] = Field(
        "loop",
        description="loop: the training process runs the episodes; workers: `agentloop worker` does, in as many "
        "processes and on as many machines as there are. See docs/scaling.md.",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="Most publishes between the sampling of a fresh trajectory and the update that learns from it. 0: "
        "workers and learner take turns; 1: workers are one batch ahead; and so on. Nothing is thrown away for it.",
    )
    samples_per_insert: PositiveFloat | None = Field(
        None,
        description="While a batch is not collected yet, the learner goes on with batches of replayed rows alone, as "
        "long as all rows learned from are at most this many times the collected ones; null: it waits.",
    )
    lease_s: PositiveFloat = Field(
        60.0, description="Seconds after which a worker, or the learner, that says nothing counts as gone."
    )


def check_collection(config: RunConfig) -> None:
    """Raises ValueError where workers can't collect what the run asks for, or the loss can't learn from it."""
    section = config.collection
    if section.by == "loop":
        check_unused(section, ("max_staleness", "samples_per_insert"), where="collection", when="collection.by is loop")
        return
    for key, given, right in _needed(config):
        if given != right:
            raise ValueError(
                f"{key} must be {_plain(right)} when collection.by is workers, got {_plain(given)}. "
                "Set it, or collection.by: loop."
            )
    if section.samples_per_insert is not None:
        _check_replay_alone(config)
    if section.max_staleness > 0:
        _check_off_policy(config.loss.fresh, section.max_staleness)


def _check_replay_alone(config: RunConfig) -> None:
    """Whole batches can be replayed, and what is collected meanwhile may be older by them."""
    replay, when = config.replay, "when collection.samples_per_insert is set"
    if config.collection.max_staleness == 0:
        raise ValueError(
            f"collection.max_staleness must be at least 1 {when}, got 0: each update in between makes the rows that "
            "are being collected older by one."
        )
    if config.mix_rule().highest_fraction == 0:
        raise ValueError(f"replay.fraction must be above 0 {when}, got 0: there is nothing to go on with. Set it.")
    if replay.mode != "train":
        raise ValueError(f"replay.mode must be train {when}, got {replay.mode}. Set it, or leave that out.")
    if replay.unit not in ("any", "group"):
        raise ValueError(
            f"replay.unit must be any or group {when}, got {replay.unit}, whose rows stand beside fresh ones. "
            "Set it, or leave that out."
        )


def _check_off_policy(fresh: StreamLossSection, staleness: int) -> None:
    """Fresh rows were sampled by an earlier policy: the loss must say what it does about that."""
    if fresh.correction.kind != "none":
        return
    advice = "Set it, or loss.fresh.correction.kind: truncate."
    if fresh.objective.name in UNBOUNDED:
        raise ValueError(
            f"loss.fresh.objective must be one that stays near the policy that sampled when collection.max_staleness "
            f"is above 0 ({staleness}), such as ppo_clip, got {fresh.objective.name}. {advice}"
        )
    if fresh.anchor != "behavior":
        raise ValueError(
            f"loss.fresh.anchor must be behavior when collection.max_staleness is above 0 ({staleness}), for the old "
            f"policy is not the one that sampled, got {fresh.anchor}. {advice}"
        )


def _needed(config: RunConfig) -> list[tuple[str, object, object]]:
    """Keys that must be so: other values need the policy where episodes are run, or a whole iteration at once."""
    remax = config.algorithm == "remax"
    return [
        ("rollout.engine", config.rollout.engine, "vllm"),
        ("algorithm", config.algorithm, "grpo" if remax else config.algorithm),
        ("rollout.dynamic_sampling_rounds", config.rollout.dynamic_sampling_rounds, 0),
        ("reward.model.path", config.reward.model.path, None),
        ("tasks.curriculum", config.tasks.curriculum, "none"),
        ("replay.redact", config.replay.redact, None),
    ]


def _plain(value: object) -> str:
    """As a YAML file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
