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


CLAIMS = {check.__name__: check for check in (quickstart, own_environment, remote_inference, evaluate_checkpoint)}


@pytest.mark.parametrize("name", CLAIMS)
def test_example_runs_as_a_script_and_learns(tmp_path, name):
    out = tmp_path / "run"
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), str(out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    CLAIMS[name](done.stdout)
    assert (out / "config.json").is_file() and (out / "checkpoints" / "default" / "tags.json").is_file()
    assert [each.name for each in tmp_path.iterdir()] == ["run"]  # all it writes goes where it was told


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_is_tested_and_at_most_forty_lines_long(path):
    assert path.stem in CLAIMS
    assert len(path.read_text().splitlines()) <= 40
