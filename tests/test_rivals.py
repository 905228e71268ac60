"""Other libraries are measured fairly, and nothing of them stays behind."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from running import eventually
from srl.bench import rivals, watched
from srl.bench.throughput import BenchOptions, experiment
from srl.core.errors import ConfigError, UnknownName

SCRIPTS = Path(__file__).parents[1] / "benchmarks" / "rivals"
BEGIN = """
import argparse, json, os, subprocess, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("work", nargs="?")
for name in ("config", "seed", "warmup", "seconds", "target", "events"):
    parser.add_argument("--" + name)
said = parser.parse_args()
begin = time.time()
def update(steps, seconds, mean=None):
    with open(said.events, "a") as file:
        file.write(json.dumps({"steps": steps, "time": begin + seconds, "return": mean}) + "\\n")
"""


@pytest.fixture
def script(tmp_path):
    """The command of a script with this body."""

    def write(body, name="rival.py"):
        path = tmp_path / name
        path.write_text(BEGIN + textwrap.dedent(body))
        return [sys.executable, str(path)]

    return write


def alive(pid):
    stat = watched._stat(pid)
    return stat is not None


def test_rate_counts_whole_updates_after_the_warmup(script):
    command = script(
        """
        update(1000, 1)
        for i in range(10):
            update(2000 + 100 * i, 5 + i * 0.5)
        """
    )
    found = watched.measure(command, warmup=4, seconds=5)
    assert found.error == ""
    assert found.steps_per_second == pytest.approx(200)
    assert 1 <= found.first < 4  # the interpreter has to start before the script knows the time
    assert [event["steps"] for event in found.events] == [1000, *range(2000, 3000, 100)]


def test_target_is_the_first_update_that_reaches_it(script):
    command = script(
        """
        update(100, 1, None)
        update(200, 2, 470.0)
        update(300, 3, 480.0)
        update(400, 4, 490.0)
        """
    )
    found = watched.measure(command, warmup=0, seconds=5, target=475.0)
    seconds, steps = found.reached
    assert steps == 300
    assert seconds == found.events[2]["time"]


def test_memory_of_all_processes_is_added(script, tmp_path, monkeypatch):
    monkeypatch.setattr(watched, "_EVERY", 0.02)
    seen = tmp_path / "seen"
    look = watched._pss_mb
    sizes = {}

    def looked(pid):
        sizes[pid] = max(sizes.get(pid, 0), look(pid))
        if sum(size > 60 for size in sizes.values()) == 2:
            seen.touch()
        return look(pid)

    monkeypatch.setattr(watched, "_pss_mb", looked)
    hold = f"x = b'x' * 60_000_000\nwhile not os.path.exists({str(seen)!r}): time.sleep(0.01)\n"
    command = script(
        f"""
        child = subprocess.Popen([sys.executable, "-c", "import os, time\\n" + {hold!r}], start_new_session=True)
        exec({hold!r})
        child.wait()
        update(100, 1)
        """
    )
    found = watched.measure(command, warmup=0, seconds=20)
    assert found.error == ""
    assert found.memory_mb > 120


def test_daemons_of_a_rival_are_killed(script, tmp_path):
    pids = tmp_path / "pids"
    command = script(
        f"""
        sleeper = "import os, time; print(os.getpid(), file=open({str(pids)!r}, 'a')); time.sleep(1000)"
        for leave in (False, True):
            subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=leave)
        while not os.path.exists({str(pids)!r}) or len(open({str(pids)!r}).read().split()) < 2:
            time.sleep(0.01)
        update(100, 1)
        """
    )
    found = watched.measure(command, warmup=0, seconds=5)
    left = [int(pid) for pid in pids.read_text().split()]
    assert found.error == ""
    assert len(left) == 2
    assert not any(alive(pid) for pid in left)


def test_crash_is_told_by_the_last_line_of_stderr(script):
    found = watched.measure(script("update(100, 1)\nraise RuntimeError('no such thing')"), warmup=0, seconds=5)
    assert found.error == "RuntimeError: no such thing"


def test_rival_that_never_ends_is_ended(script, tmp_path, monkeypatch):
    monkeypatch.setattr(watched, "_LATE", 0.5)
    pid = tmp_path / "pid"
    body = f"open({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(1000)"
    found = watched.measure(script(body), warmup=0, seconds=0)
    assert found.error == "no update within its time"
    if pid.exists():
        assert not alive(int(pid.read_text()))


def test_interrupted_measurement_leaves_nothing(script, tmp_path, monkeypatch):
    pid = tmp_path / "pid"

    def interrupted(family, deadline):
        eventually(lambda: pid.exists() and pid.read_text(), 10)
        raise KeyboardInterrupt

    monkeypatch.setattr(watched.Family, "watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        watched.measure(script(f"open({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(1000)"), 0, 5)
    assert not alive(int(pid.read_text()))


def test_pip_is_quoted_with_what_went_wrong():
    said = "  urllib.error.URLError: <no network>\n  [end of output]\n\nnote: not a problem with pip.\nhint: See above"
    assert watched.reason(said) == "urllib.error.URLError: <no network>"


@pytest.fixture
def bench(tmp_path, script, monkeypatch):
    """A folder of rivals: SRL, one that trains half as fast, one that crashes, one that cannot be installed."""
    train = "for i in range(5):\n    update(100 * {speed} * i, 10 + i)\n"
    script(train.format(speed=2), "srl_ppo.py")
    script(train.format(speed="json.loads(said.config)['speed']"), "half.py")
    script("raise ValueError('bad luck')", "crash.py")
    names = {"half": [{"speed": 0.5}, {"speed": 1}], "crash": [{}], "missing": [{}]}
    kind = "from types import SimpleNamespace as Rival\n"
    table = {name: f"Rival(script='{name}.py', search={{'cartpole': {search}}})" for name, search in names.items()}
    entries = ", ".join(f"{name!r}: {value}" for name, value in table.items())
    (tmp_path / "search.py").write_text(f"{kind}RIVALS = {{{entries}}}\nLEFT_OUT = {{'other': 'needs more'}}\n")
    (tmp_path / "works.py").write_text((SCRIPTS / "works.py").read_text())
    for name in names:
        (tmp_path / f"requirements-{name}.txt").write_text(f"{name}==1.0\n")

    def install(folder, name, say):
        if name == "missing":
            raise rivals.InstallError("no such package")
        return Path(sys.executable)

    monkeypatch.setattr(rivals, "install", install)
    monkeypatch.setattr(rivals, "_scripts", lambda: tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_a_library_may_have_hyper_parameters_of_its_own(bench, script):
    works = bench / "works.py"
    works.write_text(works.read_text() + "\nOWN = {'half': {'cartpole': ({'epochs': 20}, {'speed': 4})}}\n")
    out = bench / "out.json"
    arguments = ["cartpole", "--rivals", "half", "--rounds", "1", "--warmup", "5", "--seconds", "5"]
    assert rivals.main([*arguments, "--own", "--json", str(out)]) == 0
    found = json.loads(out.read_text())["works"]["cartpole"]["half"]
    assert found["config"] == {"speed": 4, "own": {"epochs": 20}}
    assert found["rounds"][0]["steps_per_second"] == 400


def test_own_hyper_parameters_are_fields_of_a_work():
    works = rivals._load(SCRIPTS / "works.py")
    for each in works.OWN.values():
        for name, (own, _) in each.items():
            work = replace(works.WORKS[name], **own)
            assert work.batch % work.minibatch == 0 or name == "cartpole"


def test_bench_compares_in_turn_and_goes_on_after_failures(bench, capsys):
    out = bench / "out.json"
    assert rivals.main(["cartpole", "--rounds", "2", "--warmup", "5", "--seconds", "5", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert "200 (200–200)" in rows["srl"]
    assert "100 (100–100)" in rows["half"] and "0.50" in rows["half"]
    assert "failed: ValueError: bad luck" in rows["crash"]
    assert "not installed: no such package" in rows["missing"]
    assert json.loads((bench / "best.json").read_text())["half"]["cartpole"] == {"speed": 1}
    found = json.loads(out.read_text())
    assert [len(rival["rounds"]) for rival in found["works"]["cartpole"].values()] == [2, 2, 2]
    assert found["not installed"] == {"other": "needs more", "missing": "no such package"}
    assert found["machine"]["cores"] == os.cpu_count()


def test_known_configuration_is_not_searched_again(bench, capsys):
    (bench / "best.json").write_text(json.dumps({"half": {"cartpole": {"speed": 0.5}}}))
    rivals.main(["cartpole", "--rivals", "half", "--rounds", "1", "--warmup", "5", "--seconds", "5"])
    assert "0.25" in capsys.readouterr().out


def test_unknown_rival_is_refused(bench):
    with pytest.raises(UnknownName, match="did you mean 'half'"):
        rivals.main(["cartpole", "--rivals", "halv"])


def test_without_a_clone_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rivals, "__file__", str(tmp_path / "a" / "b" / "c" / "rivals.py"))
    with pytest.raises(ConfigError, match="clone the repository"):
        rivals._scripts()


@pytest.mark.parametrize("name", ["cartpole", "halfcheetah", "pong", "pong-4"])
def test_rivals_are_asked_for_the_work_that_srl_does(name):
    work = rivals._load(SCRIPTS / "works.py").WORKS[name]
    x = experiment(name, BenchOptions())
    ours = x.algorithms["default"]
    assert work.env == x.env.id
    assert work.batch == x.actors.envs * ours.horizon  # divided over as many actors as suit the machine
    assert work.normalize == ours.normalize_obs == ours.normalize_return
    theirs = (work.epochs, work.minibatch, work.lr, work.gamma, work.lam, work.clip, work.entropy, work.log_std)
    assert theirs == (
        *(ours.epochs, ours.minibatch, ours.lr, ours.gamma, ours.lam, ours.clip, ours.entropy, ours.log_std),
    )
    assert (work.value_coef, work.grad_norm) == (ours.value_coef, ours.max_grad_norm)
    assert ours.anneal_steps == 0


def test_every_configuration_trains_on_the_same_batch():
    works, known = rivals._load(SCRIPTS / "works.py"), rivals._load(SCRIPTS / "search.py").RIVALS
    best = json.loads((SCRIPTS / "best.json").read_text())
    for name, rival in known.items():
        assert (SCRIPTS / rival.script).is_file()
        assert (SCRIPTS / f"requirements-{name}.txt").is_file()
        for work, configs in rival.search.items():
            for config in configs:
                assert works.horizon(works.WORKS[work], config["envs"]) * config["envs"] == works.WORKS[work].batch
    for name, chosen in best.items():
        for work, config in chosen.items():
            assert config in known[name].search[work]
