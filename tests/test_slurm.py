"""`srl slurm submit`: on a real Slurm of two nodes, each in a network namespace with an address of its own."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from running import eventually
from srl import cli
from srl.bench.hosts import hosts, obstacle
from srl.config import load
from srl.launch.slurm import Job
from srl.monitor.sinks import read_metrics
from srl.plan import check, checkpoint_store

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")


def without_slurm():
    """Why there can be no Slurm here, if so."""
    missing = [each for each in DAEMONS if shutil.which(each) is None]
    if missing:
        return f"the commands {', '.join(missing)} are missing (make system-packages installs them on Debian)"
    return obstacle()


CONFIG = """
ClusterName=test
SlurmctldHost={host}({first})
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=h1 NodeHostname={host} NodeAddr={first} CPUs=4
NodeName=h2 NodeHostname={host} NodeAddr={second} CPUs=4
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Slurm:
    """slurmctld and two slurmd, with a munged of their own; all their files are in one folder."""

    def __init__(self, found, folder):
        self.hosts, self.folder = found, folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        first, second = (host.address for host in found)
        for name in ("state", "h1", "h2"):
            (folder / name).mkdir()
        given = {"host": socket.gethostname(), "first": first, "second": second, "folder": folder}
        (folder / "slurm.conf").write_text(CONFIG.format(**given))
        # No cgroups: a container may have none, and the default is to look for them.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._start("slurmctld", found[0], "slurmctld", "-D")
        for index, host in enumerate(found):
            self._start(f"slurmd{index}", host, "slurmd", "-D", "-N", f"h{index + 1}")
        eventually(lambda: self.run("sinfo", "-h", "-o", "%D %t").split() == ["2", "idle"], 30, "two idle nodes")
        self.daemons = [set(host.pids()) for host in found]

    def _start(self, name, host, *command):
        with open(self.folder / f"{name}.log", "wb") as log:
            host.start(command, env=self.env, stdout=log, stderr=log)

    def run(self, *command):
        """What a command on the first host prints."""
        command = [*self.hosts[0].within, *map(str, command)]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, *arguments, nodes=2):
        """Submit a job as a user does; its number and its log."""
        srl = [sys.executable, "-c", "from srl.cli import main; main()"]
        options = ["--nodes", nodes, "--cpus-per-node", 4]
        said = self.run(*srl, "slurm", "submit", *options, "--", *arguments)
        return re.search(r"submitted job (\d+)", said)[1], Path(re.search(r"^  log +(.*)$", said, re.M)[1]), said

    def state(self, job):
        """A job's state and exit code."""
        said = self.run("scontrol", "show", "job", job)
        return re.search(r"JobState=(\w+)", said)[1], re.search(r"ExitCode=(\S+)", said)[1]

    def wait(self, job, log, seconds):
        """A job's state and exit code once it has ended and nothing of it is left on any node."""
        running = ("PENDING", "RUNNING", "COMPLETING")
        with contextlib.suppress(pytest.fail.Exception):
            eventually(lambda: self.state(job)[0] not in running, seconds, f"the end of job {job}")
        assert self.state(job)[0] not in running, log.read_text()
        eventually(lambda: not any(self.jobs()), 10, f"{self.jobs()} to be gone")
        return self.state(job)

    def jobs(self):
        """What runs on each node beside Slurm's own daemons, as {pid: command line}."""
        found = []
        for host, daemons in zip(self.hosts, self.daemons, strict=True):
            found.append({})
            for pid in set(host.pids()) - daemons:
                with contextlib.suppress(OSError):
                    found[-1][pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        return found


@pytest.fixture
def munged():
    """A munged with a key of its own, in a folder for everything of Slurm."""
    folder = Path(tempfile.mkdtemp(prefix="slurm"))  # sockets have short names only
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o400)
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    command = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files]
    with open(folder / "munged.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        eventually((folder / "munge.socket").exists, 10, "munged")
        yield folder
    finally:
        process.terminate()
        process.wait(10)
        shutil.rmtree(folder)


@pytest.fixture
def slurm(munged):
    pytest.importorskip("ray", reason="Ray is not installed")
    with hosts(2) as found:
        yield Slurm(found, munged)


needs_slurm = pytest.mark.skipif(bool(without_slurm()), reason=without_slurm())
APART = ["--trainer.on=role=first", "--actors.on=role=other", "--actors", "2", "--actors.envs", "32"]


def ray_folders():
    """Of all jobs: those of another test may be among them."""
    return {path for path in Path(tempfile.gettempdir()).glob("srl-*") if (path / "said").exists()}


@needs_slurm
@pytest.mark.learning
def test_cartpole_is_learned_across_two_nodes_of_a_job(slurm, tmp_path):
    before, run_dir = ray_folders(), tmp_path / "runs of mine" / "cart pole's 100%"
    goal = ["--until", "return>=475", "--steps", "3000000"]
    job, log, _ = slurm.submit("train", "cartpole", "--out", run_dir, *APART, *goal)
    eventually(lambda: read_metrics(run_dir) and read_metrics(run_dir)[-1]["steps"] > 0, 90, "training")
    folders = ray_folders() - before
    assert len(folders) >= 2
    first, other = slurm.jobs()
    assert any("forkserver" in line for line in first.values()), "the trainer is not on the first node"
    assert any("forkserver" in line for line in other.values()), "the actors are not on the other node"
    environ = next(Path(f"/proc/{pid}/environ").read_text() for pid, line in other.items() if "/raylet " in line)
    token = re.search(r"RAY_AUTH_TOKEN=(\w{64})\0", environ)[1]
    assert not [line for line in (*first.values(), *other.values()) if token in line]
    assert slurm.wait(job, log, 90) == ("COMPLETED", "0:0"), log.read_text()
    said = log.read_text()
    assert float(said.split("evaluation: return ")[1].split()[0]) >= 475, said
    assert token not in said + Path(f"{run_dir}.sbatch").read_text()
    eventually(lambda: not folders & ray_folders(), 60, "the end of Ray's folders")


@needs_slurm
def test_a_job_that_is_cancelled_or_runs_out_of_time_saves_and_goes_on(slurm, tmp_path):
    run_dir = tmp_path / "run"

    def saved():
        return checkpoint_store(run_dir, check(load(run_dir))[0]).load("latest").values["steps"]

    def trained(steps):
        eventually(lambda: read_metrics(run_dir) and read_metrics(run_dir)[-1]["steps"] > steps, 90, "training")

    job, log, said = slurm.submit("train", "cartpole", "--out", run_dir, *APART, "--steps", 10**9)
    trained(0)
    slurm.run("scancel", job)
    assert slurm.wait(job, log, 20)[0] == "CANCELLED"
    assert "interrupted at" in log.read_text()
    steps = saved()
    assert steps > 0
    assert f"-- resume {run_dir}" in said
    again, log, _ = slurm.submit("resume", run_dir)
    trained(steps)
    slurm.run("scancel", "--batch", "--signal=TERM", again)  # what Slurm does when the time is almost up
    assert slurm.wait(again, log, 20) == ("FAILED", "130:0"), log.read_text()
    assert saved() > steps


@needs_slurm
def test_a_node_whose_ray_was_killed_joins_again(slurm, tmp_path):
    run_dir = tmp_path / "run"
    job, log, _ = slurm.submit("train", "cartpole", "--out", run_dir, *APART, "--steps", 10**9)
    eventually(lambda: read_metrics(run_dir) and read_metrics(run_dir)[-1]["steps"] > 0, 90, "training")
    os.kill(next(pid for pid, line in slurm.jobs()[1].items() if "/raylet " in line), signal.SIGKILL)
    eventually(lambda: "started again where there is room" in log.read_text(), 30, "the loss to be noticed")
    steps = read_metrics(run_dir)[-1]["steps"]
    eventually(lambda: read_metrics(run_dir)[-1]["steps"] > steps + 10_000, 60, "training to go on")
    slurm.run("scancel", job)
    slurm.wait(job, log, 20)


def script(*lines, **given):
    """The lines of a job's script that are not always there."""
    job = Job(("train", "cartpole"), Path("/home/a b"), Path("/runs/x-%j.log"), "x", **given)
    return job.script().splitlines()


def test_script_asks_for_what_was_asked_for():
    lines = script(nodes=4, cpus=32, gpus=2, time="12:00:00", partition="p", account="a", options=["--constraint=a100"])
    wanted = ["nodes=4", "cpus-per-task=32", "gpus-per-node=2", "time=12:00:00", "partition=p", "account=a"]
    assert {f"#SBATCH --{each}" for each in (*wanted, "constraint=a100", "signal=B:TERM@60")} < set(lines)
    assert not any("exclusive" in line for line in lines)
    bare = script()
    assert {"#SBATCH --exclusive", "#SBATCH --mem=0", "#SBATCH --nodes=1"} < set(bare)
    assert not any(word in line for line in bare for word in ("gpus", "time", "partition", "account"))


def test_script_is_quoted_for_the_shell_and_for_sbatch(tmp_path):
    command = ["train", "cartpole", "--out", "/a b/it's $HOME `x` 100%"]
    job = Job(command, tmp_path, Path("/a b/x-%j.log"), "x", options=['--comment=say "hi" \\o/'])
    lines = job.script().splitlines()
    assert '#SBATCH "--output=/a b/x-%j.log"' in lines
    assert '#SBATCH "--comment=say \\"hi\\" \\\\o/"' in lines
    assert lines[-2] == f"cd {shlex.quote(str(tmp_path))} || exit 2"
    assert shlex.split(lines[-1])[-4:] == command
    done = subprocess.run(["bash", "-n"], input=job.script(), text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def srl(monkeypatch, capsys, tmp_path):
    """Run an ``srl slurm submit`` in this process where there is no Slurm; (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["srl", "slurm", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sumbit"], ["unknown command", "'slurm submit'"]),
        (["submit"], ["after --", "train RECIPE"]),
        (["submit", "train", "cartpole"], ["Unrecognized options", "train"]),
        (["submit", "--nodse", "2", "--", "train", "cartpole"], ["--nodse", "did you mean --nodes?"]),
        (["submit", "--nodes", "two", "--", "train", "cartpole"], ["--nodes", "two"]),
        (["submit", "--nodes", "0", "--", "train", "cartpole"], ["--nodes must be at least 1"]),
        (["submit", "--cpus-per-node", "0", "--", "train", "cartpole"], ["--cpus-per-node must be at least 1"]),
        (["submit", "--option", "a100", "--", "train", "cartpole"], ["--option=--constraint=a100", "'a100'"]),
        (["submit", "--name", "a\nb", "--", "train", "cartpole"], ["one line"]),
        (["submit", "--", "trian", "cartpole"], ["unknown command for a job", "'train'"]),
        (["submit", "--", "eval", "run"], ["unknown command for a job"]),
        (["submit", "--", "train", "cartpol"], ["unknown recipe", "'cartpole'"]),
        (["submit", "--", "train", "cartpole", "--actor.count", "2"], ["--actor.count", "--actors.count"]),
        (["submit", "--", "train", "--env", "CartPoel-v1"], ["unknown environment", "'CartPole-v1'"]),
        (["submit", "--", "train", "cartpole", "--transport", "shm"], ["transport=shm"]),
        (["submit", "--", "train", "cartpole", "--on", "local"], ["leave out --on"]),
        (["submit", "--", "resume", "no/such/run"], ["no/such/run", "not a run directory"]),
        (
            ["submit", "--nodes", "2", "--cpus-per-node", "4", "--", "train", "cartpole", "--actors", "8"],
            ["needs 9 CPUs", "2 nodes with 4 each"],
        ),
        (["submit", "--", "train", "cartpole", "--trainer.gpus", "1"], ["needs 1 GPUs", "--gpus-per-node"]),
        (["submit", "--", "train", "cartpole", "--out", "a\\b"], ["beside", "plainer folder"]),
        (["submit", "--", "train", "cartpole"], ["sbatch is not here"]),
    ],
)
def test_mistakes_get_one_line(srl, arguments, words):
    code, out, err = srl(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("srl: ")
    assert all(word in err for word in words), err


def test_folder_of_another_run_is_refused(srl, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    code, _, err = srl("submit", "--", "train", "cartpole", "--out", tmp_path / "run")
    assert code == 2
    assert "not an empty folder" in err


def test_dry_run_prints_the_script_and_writes_nothing(srl, tmp_path):
    options = ["--option", "--constraint=a b", "--option=--exclusive", "--dry-run"]
    code, out, err = srl("submit", *options, "--", "train", "cartpole", "--actors", "auto")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert '#SBATCH "--constraint=a b"' in lines
    assert "#SBATCH --exclusive" in lines
    command = shlex.split(lines[-1])
    assert command[:5] == ["exec", sys.executable, "-u", "-m", "srl.launch.slurm"]
    assert command[5:9] == ["train", "cartpole", "--actors", "auto"]
    assert re.fullmatch(r"--out=runs/cartpole-.*", command[9])  # said now, so that it is known where
    assert not list(tmp_path.iterdir())


def test_help_says_how(srl):
    code, out, err = srl("submit", "--help")
    assert (code, err) == (0, "")
    assert "-- train RECIPE" in out
    code, out, _ = srl("--help")
    assert code == 0
    assert "srl slurm submit" in out
