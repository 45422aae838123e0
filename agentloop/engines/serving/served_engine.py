"""A run's own engine, which starts and ends with the run."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agentloop.config import RunConfig
from agentloop.engines.publish.engine_control import EngineControl
from agentloop.engines.remote.server_facts import read_key
from agentloop.engines.serving.engine_process import START_S, EngineProcess, ServeOptions, free_port, vllm_process
from agentloop.errors import TrainingStopped

_SILENT_S = 60.0
_LOOK_AGAIN_S = 0.5


class EngineEnded(TrainingStopped):
    """The run's own engine has ended, or does not answer any more."""


class ServedEngine:
    """A run's own engine that answers. Nobody restarts it: a resumed run starts another, with the last weights."""

    def __init__(self, options: ServeOptions, process: EngineProcess, control: EngineControl) -> None:
        self.options, self._process, self._control = options, process, control

    def check(self) -> None:
        """Check that the engine is up. Raises EngineEnded if it has ended, or does not answer for a while."""
        end = time.monotonic() + _SILENT_S
        while not self._control.healthy():
            if self._process.exit_code is not None or time.monotonic() > end:
                code = self._process.exit_code
                found = "no answer" if code is None else f"exit code {code}: {self._process.last_error()}"
                raise EngineEnded(
                    f"the run's own engine must stay up, got {found}. Its log is {self._process.log}. Run again "
                    "with --resume, which starts another."
                )
            time.sleep(_LOOK_AGAIN_S)

    def connected(self, config: RunConfig) -> RunConfig:
        """Return the settings with the engine's URL. Nobody waits for this engine once it is gone."""
        engine = config.engine.model_copy(update={"urls": (self.options.url,), "restart_timeout_s": 0.0})
        return config.model_copy(update={"engine": engine})


def serve_options(config: RunConfig, model: Path | str, *, shares_gpu: bool) -> ServeOptions:
    """Choose how vLLM starts for a run. `shares_gpu`: the learner uses the same GPU."""
    section, whole = config.engine, config.lora.rank == 0
    in_memory = section.transfer == "memory" and config.checkpoint.keep_policies == "none"
    return ServeOptions(
        str(model),
        port=free_port(),
        max_model_len=config.context.max_tokens,
        lora_rank=config.lora.rank,
        memory_share=section.memory_share,
        sleep_level=0 if not shares_gpu else 2 if whole else 1,
        shares_memory=shares_gpu and whole and in_memory,
        further=section.options,
    )


@contextmanager
def served_engine(options: ServeOptions, *, run: Path, note: Callable[[str], None]) -> Iterator[ServedEngine]:
    """Start vLLM and wait until it answers; its log is in the folder `run`. Raises UserError if it does not answer."""
    key = read_key()
    with (
        vllm_process(options, key, folder=run, say=note) as process,
        EngineControl(options.url, model=options.served_model_name, key=key) as control,
    ):
        process.wait_until(control.healthy, limit_s=START_S, stopped=lambda: False)
        yield ServedEngine(options, process, control)
