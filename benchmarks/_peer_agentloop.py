"""agentloop's side of `vs_trl`: the loop of `agentloop train`, buffer included, without evaluations and checkpoints."""

from contextlib import closing

import torch

from agentloop.learning.trainer import Trainer
from agentloop.runs.display import ConsoleDisplay
from agentloop.runs.run_folder import create_run_folder
from agentloop.training.components import build_components
from agentloop.training.loop import Loop
from agentloop.training.train import begin_run
from benchmarks._peer import MOST_ITERATIONS, Talk, order, run_config


def main() -> None:
    asked = order()
    talk = Talk(asked.weights)
    config = run_config(asked)
    folder = create_run_folder(config)
    torch.set_num_threads(config.run.threads)
    torch.manual_seed(asked.seed)
    display = ConsoleDisplay(stderr=True)
    with closing(build_components(folder, display, checkpoint=None)) as parts:
        trainer = parts.trainer
        assert isinstance(trainer, Trainer), "there is one rank"
        loop = Loop(parts, begin_run(parts, None))
        talk.begin()
        for iteration in range(1, MOST_ITERATIONS + 1):
            loop.iterate(iteration)
            if not talk.goes_on(trainer._actor.model, fresh=config.batch.trajectories):
                break


if __name__ == "__main__":
    main()
