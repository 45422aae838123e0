"""A gateway that only records: it passes agents' requests to the user's engine or another model, and trains nothing."""

import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from starlette.applications import Starlette
from starlette.routing import Mount

from agentloop.config import RunConfig
from agentloop.config.sections.rollout import GatewaySection
from agentloop.engines.generator import GenerationRequest
from agentloop.engines.remote.engine_client import RemoteEngine
from agentloop.engines.remote.server_facts import KEY_VARIABLE, ServerFacts, ask_server
from agentloop.errors import UserError, shortened
from agentloop.gateway.agent_request import AgentRequest
from agentloop.gateway.agent_sessions import Ask
from agentloop.gateway.endpoints import create_app
from agentloop.gateway.recorded_sessions import RecordedSessions, Recording
from agentloop.gateway.run_gateway import serving
from agentloop.records import Completion
from agentloop.rollouts.actors import agents_policy, stop_strings
from agentloop.runs.leadership import Leadership
from agentloop.runs.signals import StopRequest
from context import Renderer
from context.conversation_tree import Prompt
from context.templates.model_files import ModelFiles, load_model_files
from replay.errors import ReplayError
from replay.exchange.stored_rows import known_runs
from replay.records import PolicyRecord, RunRecord
from replay.storage.databases import Location
from replay.store import ReplayStore

UPSTREAM_KEY = "AGENTLOOP_UPSTREAM_KEY"
"""The environment variable with the upstream's key."""
_LOOK_S = 0.25
_LEASE_S = 10.0
"""Seconds of the recording's lease: after a crash, the next gateway waits for its end."""
_LONGEST = 1 << 30
"""A limit in tokens for an upstream that states none: it knows its model's own limit."""


@dataclass(frozen=True)
class RecordingOptions:
    """The options of a recording: see `agentloop gateway --help`."""

    name: str
    model: Path
    upstream: str
    upstream_key: str | None
    upstream_model: str | None
    """The model's name at the upstream; None: the first that a vLLM names."""
    by_text: bool
    temperature: float
    idle_s: float


def record_sessions(
    location: Location,
    options: RecordingOptions,
    section: GatewaySection,
    *,
    key: str | None,
    stop: StopRequest,
    say: Callable[[str], None],
) -> None:
    """Record sessions until a signal comes. Raises UserError for wrong options or an unfit upstream."""
    sizes, server = _read_family(options.model), _ask_upstream(options)
    files = _load_files(options.model)
    renderer = files.renderer(RunConfig().context.author_table(), stop_strings(RunConfig(), files))
    fingerprint = {"tokenizer": files.codec.hash, "template": files.template.hash, **sizes}
    ask = _make_ask(options, server, renderer, vocab_size=int(fingerprint["vocab_size"]))
    longest = _LONGEST if server is None else server.max_model_len or _LONGEST
    limits = {"context": {"max_tokens": longest}, "rollout": {"max_tokens_per_turn": longest}}
    policy = agents_policy(RunConfig.model_validate(limits), renderer)
    with closing(ReplayStore.create(location)) as store, ExitStack() as leading:
        run = _find_or_add_run(store, options, renderer, fingerprint)
        _wait_to_lead(store, run=run, name=options.name, leading=leading)
        store.resume(run, 0)  # an earlier gateway, if it still runs, can store no more rows
        hashes = (renderer.codec.hash, renderer.template.hash)
        store.add_policy(PolicyRecord(run, 0, None if options.by_text else str(options.model.resolve()), *hashes))
        recording = Recording(store, run, policy, ask, options.by_text, options.temperature)
        sessions = RecordedSessions(recording, key, idle_s=options.idle_s)
        app = Starlette(routes=[Mount("/", create_app(sessions))], lifespan=sessions.lifespan)
        gc.set_threshold(20_000, 20, 20)  # sessions are few and large: more frequent collections would find nothing
        sys.setswitchinterval(0.0005)  # seconds: requests wait less for the writer's thread
        listening = serving(app, host=section.host, port=section.port, public_url=section.public_url)
        with listening as url, stop.working():
            kind = "text without log-probs, for imitation only" if options.by_text else "exact tokens with log-probs"
            say(f"recording {options.name} in {store.url}: {kind}")
            say(f"agents ask {section.public_url or url}/e/NAME/v1, each attempt at a task with a NAME of its own")
            while not stop.requested:
                time.sleep(_LOOK_S)


def _ask_upstream(options: RecordingOptions) -> ServerFacts | None:
    """Ask the upstream for its facts; None for a model that is asked by text."""
    if options.by_text:
        if options.upstream_model is None:
            raise UserError("--upstream-model must name the upstream's model with --text, got none. Give its name.")
        return None
    try:
        return ask_server(options.upstream, model=options.upstream_model, key=options.upstream_key)
    except UserError as error:
        text = str(error).replace("engine.urls", "--upstream").replace(KEY_VARIABLE, UPSTREAM_KEY)
        raise UserError(f"{text} A server other than vLLM can be recorded with --text, for imitation.") from None


def _make_ask(options: RecordingOptions, server: ServerFacts | None, renderer: Renderer, *, vocab_size: int) -> Ask:
    """Make the function that samples replies from the upstream."""
    key, stop_ids = options.upstream_key, renderer.stop_ids
    if server is None:
        from agentloop.gateway.text_upstream import TextUpstream

        return TextUpstream(options.upstream, key=key, model=str(options.upstream_model), renderer=renderer).ask
    engine = RemoteEngine([server], key=key, stop_ids=stop_ids, vocab_size=vocab_size, one_version=True)
    engine.begin(seed=0, temperature=options.temperature)
    engine.published(0)

    async def ask(request: AgentRequest, number: int, prompt: Prompt, most: int) -> Completion:
        return await engine.reply(GenerationRequest(number, prompt.ids, most, request.stop))

    return ask


def _read_family(model: Path) -> dict[str, str | int]:
    """Read model family and vocabulary size, as `agentloop.models.loading` reads them from the loaded model."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        vocab_size = int(config.get("text_config", config)["vocab_size"])
        return {"model_family": str(config["model_type"]), "vocab_size": vocab_size}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"--model must be a folder with the model's config.json, got {str(model)!r} ({shortened(str(error))}). "
            "Copy it there from the model."
        ) from error


_SAVE = "import sys, transformers as t; t.AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])"


def _load_files(model: Path) -> ModelFiles:
    """Load the model's files, with the tokenizer that transformers makes of them, as a run does. For some families it
    differs from tokenizer.json. It runs in a process of its own, because it may import torch."""
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run([sys.executable, "-c", _SAVE, model, folder], capture_output=True, text=True)
        if made.returncode:
            problem = shortened(made.stderr.strip().rpartition("\n")[2])
            raise UserError(
                f"--model must hold a tokenizer that transformers loads, got {str(model)!r} ({problem}). Copy it again."
            )
        with suppress(FileNotFoundError):
            shutil.copy(model / "generation_config.json", folder)
        return load_model_files(folder)


def _find_or_add_run(
    store: ReplayStore, options: RecordingOptions, renderer: Renderer, fingerprint: dict[str, str | int]
) -> str:
    """Find the recording of this name, or add it; return its id. Raises UserError where it is of another model."""
    model = str(options.model.resolve())
    made = {"model": model, "text": options.by_text, "upstream_model": options.upstream_model}
    with store.reading() as connection:
        named = [run for run in known_runs(connection).values() if run.name == options.name]
    if any(run.fingerprint != fingerprint or run.config.get("gateway") != made for run in named):
        raise UserError(
            f"--name must be of a recording of this model, got {options.name}, which is not of the same --model, "
            "--text and --upstream-model. Give another name."
        )
    id = named[0].id if named else uuid.uuid4().hex
    authors, code = renderer.authors, version("agentloop-replay")
    store.add_run(RunRecord(id, options.name, {"gateway": made}, authors.to_json(), authors.hash, code, fingerprint))
    return id


def _wait_to_lead(store: ReplayStore, *, run: str, name: str, leading: ExitStack) -> None:
    """Become the recording's only gateway. It waits for the end of a killed gateway's lease."""
    until = time.monotonic() + _LEASE_S + 2 * _LOOK_S
    while True:
        try:
            leading.enter_context(Leadership(store, run, str(os.getpid()), lease_s=_LEASE_S).held())
            return
        except ReplayError as error:
            if time.monotonic() > until:
                raise UserError(
                    f"--name must be of a recording that no other gateway goes on with, got {name} in {store.url}. "
                    "End that gateway, or give another name."
                ) from error
            time.sleep(_LOOK_S)
