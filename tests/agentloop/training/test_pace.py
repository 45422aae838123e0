"""What a run says about its own length."""

from agentloop.config import RunConfig
from agentloop.training.pace import Pace
from tests.agentloop.runs.test_display import Clock


def paced(*, iteration: int = 0, iterations: int = 5, every: int = 2) -> tuple[Pace, Clock]:
    sections = {
        "run": {"iterations": iterations},
        "evaluation": {"every": every, "tasks": 10, "samples": 2},
        "batch": {"trajectories": 8, "group_size": 4, "mini_batch": 8},
    }
    clock = Clock()
    return Pace(RunConfig.model_validate(sections), iteration=iteration, clock=clock), clock


def test_time_left_has_evaluations_apart_from_iterations() -> None:
    pace, clock = paced()
    pace.add_evaluation(40.0, episodes=20)
    pace.begin()
    clock.now += 3.0
    # 4 iterations of 3 seconds, and evaluations after the second, the fourth and the last
    assert pace.seconds_left(1) == 4 * 3 + 3 * 40
    clock.now += 3.0 + 20.0
    pace.add_evaluation(20.0, episodes=20)
    assert pace.seconds_left(2) == 3 * 3 + 2 * 30
    clock.now += 3 * 3.0 + 2 * 30.0
    pace.add_evaluation(30.0, episodes=20)
    pace.add_evaluation(30.0, episodes=20)
    assert pace.seconds_left(5) == 0.0


def test_a_resumed_run_goes_by_its_own_iterations_until_it_evaluates() -> None:
    pace, clock = paced(iteration=2)
    pace.begin()
    clock.now += 8.0
    # 2 more iterations of 8 episodes in 8 seconds, and 2 evaluations of 20 episodes
    assert pace.seconds_left(3) == 2 * 8 + 2 * 20


def test_the_first_evaluation_says_what_episodes_will_take() -> None:
    pace, _ = paced()
    pace.add_evaluation(40.0, episodes=20)
    # 5 iterations of 8 episodes of 2 seconds, and 3 evaluations of 40
    assert pace.episodes_to_come() == (
        "episodes will take about 3:20, at this evaluation's 30.0 per minute (5 iterations of 8 at most, evaluations: "
        "3); updates come on top"
    )
