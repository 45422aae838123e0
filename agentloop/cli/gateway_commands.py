"""`agentloop gateway`: agents that others start, recorded for later runs or as episodes of one."""

from pathlib import Path
from typing import Annotated

import typer

from agentloop.cli.options import saying
from agentloop.config.sections.rollout import GatewaySection
from agentloop.engines.remote.server_facts import read_key
from agentloop.environments.check import needing
from agentloop.errors import UserError
from agentloop.runs.signals import end_at_once, graceful_stop
from replay.locate import place

KEY = "AGENTLOOP_GATEWAY_KEY"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    epilog="Keys are read from AGENTLOOP_GATEWAY_KEY, what agents ask with, and AGENTLOOP_UPSTREAM_KEY. "
    "Example: agentloop gateway --record history.sqlite --upstream http://127.0.0.1:8000 --model models/qwen, "
    "or: agentloop gateway --run runs/search-001"
)
def gateway(
    record: Annotated[str | None, typer.Option(metavar="BUFFER", help="Store sessions there, to train later.")] = None,
    run: Annotated[Path | None, typer.Option(metavar="RUN", help="Or give the tickets of this run to agents.")] = None,
    upstream: Annotated[str | None, typer.Option(metavar="URL", help="The vLLM; with --text the base URL.")] = None,
    model: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Its tokenizer, template and config.")] = None,
    text: Annotated[bool, typer.Option("--text", help="The upstream gives no tokens: only to be imitated.")] = False,
    upstream_model: Annotated[str | None, typer.Option(metavar="NAME", help="What the upstream calls it.")] = None,
    name: Annotated[str, typer.Option(help="Of the recording; one that is there is gone on with.")] = "gateway",
    temperature: Annotated[float, typer.Option(min=0, help="That a vLLM upstream samples at.")] = 1.0,
    idle_s: Annotated[float, typer.Option(min=0.1, help="Seconds without a request that end a session.")] = 3600.0,
    host: Annotated[str, typer.Option(help=f"Address to listen on; if others reach it, set {KEY}.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8700,
    public_url: Annotated[str | None, typer.Option(metavar="URL", help="Where agents find it, if elsewhere.")] = None,
) -> None:
    """Let agents of any kind ask at a base URL: recorded for later runs, or as episodes of a run."""
    with needing("gateway", "agentloop gateway"):
        from agentloop.workers.episodes_on_request import give_episodes
        from agentloop.workers.recording import UPSTREAM_KEY, RecordingOptions, record_sessions
    recorded = (record, upstream, model)
    if (run is None) != (None not in recorded) or (run is not None and any(recorded)):
        raise UserError(
            "--record, --upstream and --model must be given, or --run alone, got "
            f"{', '.join(str(one) for one in (*recorded, run))}. Example: agentloop gateway --run runs/search-001"
        )
    key = read_key(KEY)
    if key is None and host not in _LOOPBACK:
        raise UserError(f"{KEY} must be set where others reach --host, got none for {host}. Set it to a long secret.")
    if public_url is not None and not public_url.startswith(("http://", "https://")):
        raise UserError(f"--public-url must begin with http:// or https://, got {public_url!r}. Write the whole URL.")
    section = GatewaySection(host=host, port=port, public_url=public_url)

    say = saying("gateway")
    with graceful_stop(say, working="leaving; again to end at once", idle="left") as stop:
        if run is not None:
            give_episodes(run, section, key=key, idle_s=idle_s, stop=stop, say=say)
        else:
            assert record is not None and upstream is not None and model is not None
            asked = (upstream, read_key(UPSTREAM_KEY), upstream_model, text)
            options = RecordingOptions(name, model, *asked, 1.0 if text else temperature, idle_s)
            record_sessions(place(record)[0], options, section, key=key, stop=stop, say=say)
    say("left")
    end_at_once(stop.exit_code)  # an engine that never answers is not waited for
