"""The examples run as they are, and say what the documentation says they do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def quickstart(output):
    found = re.search(r"trained on ([\d,]+) steps .*\nevaluation: return ([\d.]+) over 10 episodes", output)
    assert int(found[1].replace(",", "")) >= 15_000
    assert float(found[2]) > 100  # a policy that was not trained keeps the pole up for about 20 steps


def own_environment(output):
    assert "return 0.60, best possible 0.60" in output


def remote_inference(output):
    assert "workers: actor-0, policy-default-0, trainer-default" in output
    assert float(re.search(r"evaluation: return ([\d.]+)", output)[1]) > 50


def evaluate_checkpoint(output):
    found = {tag: (int(v), float(r)) for tag, v, r in re.findall(r"(\w+): version (\d+), return ([\d.]+)", output)}
    early = next(tag for tag in found if tag.startswith("v"))
    assert found[early][0] == int(early[1:]) < found["latest"][0]
    assert found[early][1] < found["best"][1]


def own_network(output):
    assert float(re.search(r"^return ([\d.]+)$", output, re.MULTILINE)[1]) > 60  # not what the display says on the way


def own_algorithm(output):
    assert float(re.search(r"^return ([\d.]+)$", output, re.MULTILINE)[1]) > 60


def relabel(output):
    # Twenty random steps of 0.2 lead about 0.8 away from the middle; the best is half a step, 0.05 on average.
    assert float(re.search(r"end of an episode: ([\d.]+)", output)[1]) < 0.2


def multi_agent(output):
    assert re.findall(r"(\w+): return -?[\d.]+ over (\d+) agents' episodes", output) == [
        ("chasers", "30"),
        ("runner", "10"),
    ]


def self_play(output):
    assert int(re.search(r"(\d+) versions played", output)[1]) >= 3
    assert float(re.search(r"against it now: (-?[\d.]+)", output)[1]) > 0.2  # the first version plays at random


def curriculum(output):
    steps = int(re.search(r"solved the corridor of length 8 after ([\d,]+) steps", output)[1].replace(",", ""))
    assert steps < 500_000  # of a million: it ended because the target was reached


def custom_metrics(output):
    found = re.search(r"env/tilt ([\d.]+), train/weights ([\d.]+)", output)
    assert 0 < float(found[1]) < 0.5 and float(found[2]) > 1


def minigrid_room(output):
    assert float(re.search(r"^return ([\d.]+), best", output, re.MULTILINE)[1]) > 0.9


CHECKS = (quickstart, own_environment, remote_inference, evaluate_checkpoint, own_network, own_algorithm, relabel)
CHECKS += (multi_agent, self_play, curriculum, custom_metrics, minigrid_room)
CLAIMS = {check.__name__: check for check in CHECKS}
NEEDS = {"multi_agent": "mpe2", "self_play": "pettingzoo", "minigrid_room": "minigrid"}
LONGER = {"own_algorithm": 120}
"""A whole algorithm takes more than forty lines."""


@pytest.mark.parametrize("name", CLAIMS)
def test_example_runs_as_a_script_and_learns(tmp_path, name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    out = tmp_path / "run"
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), str(out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    CLAIMS[name](done.stdout)
    assert (out / "config.json").is_file() and list((out / "checkpoints").glob("*/tags.json"))
    assert [each.name for each in tmp_path.iterdir()] == ["run"]  # all it writes goes where it was told


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_is_tested_and_at_most_forty_lines_long(path):
    assert path.stem in CLAIMS
    assert len(path.read_text().splitlines()) <= LONGER.get(path.stem, 40)
