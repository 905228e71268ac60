"""A Slurm job: the script that is submitted, and what runs inside the job.

The script runs this module on the job's first node. It starts the head of a Ray cluster there and, through one
``srun``, a keeper on each of the other nodes, which starts a Ray node and starts it again if it ends. Address and
token of the cluster, made for this job, reach the keepers on their standard input; when that input ends, so do they.
Then the command runs in this very process: its exit code is the job's, and Slurm's signals reach its controller.

When a job is cancelled, or its time is up, Slurm sends SIGTERM to all processes of the job at once and, half a minute
later, SIGKILL. The controller answers by saving and ending the run, for which it needs Ray and all workers. So Ray is
started with that signal blocked, which workers inherit, and killed once the command has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srl.core.errors import SrlError, WorkerError
from srl.launch import interrupts_blocked, share_the_machine

SAVE_SECONDS = 60
"""How long before its time is up a job is told to save and end."""
_START_SECONDS = 120.0
"""What the head of a cluster may take to start."""
_JOIN_SECONDS = 300.0
"""What all other nodes may take to join it."""
_LEAVE_SECONDS = 15.0
"""What they may take to end."""
_HEADS = 3
"""How often a head is started before that is given up."""
_KEEP = "keep"
_RAY = "import sys; sys.modules['grpc'] = None; from ray.scripts.scripts import main; main()"
"""Ray as a command. Without grpc it starts no server for its clients, of which there are none; its port is fixed."""
_SHORT = 40
"""Characters of a folder in which Ray's sockets have names that are short enough."""


@dataclass(frozen=True)
class Job:
    """What is asked of Slurm, and the command to run there: the arguments of ``srl``."""

    command: Sequence[str]
    folder: Path
    """Where the command runs."""
    log: Path
    """Where its output goes; %j stands for the job's number."""
    name: str
    nodes: int = 1
    cpus: int | None = None
    """Processor cores of each node; without a number whole nodes are taken."""
    gpus: int = 0
    time: str = ""
    partition: str = ""
    account: str = ""
    options: Sequence[str] = ()
    """Further options of ``sbatch``."""

    def script(self) -> str:
        """The text of the batch script."""
        options = [f"--job-name={self.name}", f"--nodes={self.nodes}", "--ntasks-per-node=1"]
        options += [f"--cpus-per-task={self.cpus}"] if self.cpus is not None else ["--exclusive", "--mem=0"]
        options += [f"--gpus-per-node={self.gpus}"] if self.gpus else []
        named = {"time": self.time, "partition": self.partition, "account": self.account}
        options += [f"--{name}={value}" for name, value in named.items() if value]
        # A run outlives the loss of a node; a job that is put back into the queue would find its folder used.
        options += ["--no-kill", "--no-requeue", f"--signal=B:TERM@{SAVE_SECONDS}", f"--output={self.log}"]
        lines = ["#!/bin/bash", "# Written by srl slurm submit."]
        lines += [f"#SBATCH {_quoted(option)}" for option in (*options, *self.options)]
        run = [sys.executable, "-u", "-m", "srl.launch.slurm", *self.command]
        return "\n".join([*lines, f"cd {shlex.quote(str(self.folder))} || exit 2", f"exec {shlex.join(run)}", ""])


def _quoted(option: str) -> str:
    """``option`` as sbatch reads it in a script: quotes work as in a shell, but a backslash always escapes."""
    if shlex.quote(option) == option:
        return option
    return '"' + option.replace("\\", "\\\\").replace('"', '\\"') + '"'


def main() -> None:
    """What a job's script starts on its first node, and ``srun`` on the others."""
    share_the_machine()
    arguments = sys.argv[1:]
    sys.exit(_keep() if arguments == [_KEEP] else run_job(arguments))


def run_job(command: Sequence[str]) -> int:
    """Run ``srl command … --on ray://…`` with Ray on all nodes of this job; its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with _cluster() as address:
            return _srl([*command, f"--on=ray://{address}"])
    except SrlError as error:
        print(f"srl: {error}", file=sys.stderr)
        return 1


def _srl(arguments: Sequence[str]) -> int:
    from srl import cli

    sys.argv = ["srl", *arguments]
    try:
        cli.main()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    return 0


@contextlib.contextmanager
def _cluster() -> Iterator[str]:
    """Ray on all nodes of this job; its address."""
    here, nodes = os.environ["SLURMD_NODENAME"], _nodes(os.environ["SLURM_JOB_NODELIST"])
    others = [name for name in nodes if name != here]
    own = _address_towards(nodes[others[0]]) if others else "127.0.0.1"
    token = secrets.token_hex(32)
    with contextlib.ExitStack() as cleanup:
        keepers = cleanup.enter_context(_Keepers(here, len(others))) if others else None
        os.environ.update(_settings(token))  # for Ray here and for the command; keepers hear of it in another way
        head = cleanup.enter_context(_head(here, own))
        cleanup.callback(_hear_no_signals)
        address = head.address
        if keepers is not None:
            keepers.tell({"address": address, "token": token})
        _wait_for(nodes, address, keepers)
        print(f"srl: job {os.environ['SLURM_JOB_ID']} has Ray on {', '.join(nodes)}", flush=True)
        yield address


def _settings(token: str) -> dict[str, str]:
    """The environment of everything that has to do with Ray."""
    from srl.launch.ray import _HEALTH

    os.environ.pop("RAY_ADDRESS", None)  # of another cluster
    return {**_HEALTH, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}


def _hear_no_signals() -> None:
    """What is being ended need not be ended again."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _nodes(expression: str) -> dict[str, str]:
    """The nodes ``n[1-3]`` stands for, and where Slurm finds each."""
    command = ["sinfo", "--all", "--noheader", "--Node", f"--nodes={expression}", "--format=%N %o"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not done.stdout.strip():
        raise WorkerError(f"{shlex.join(command)} failed: {done.stderr.strip() or 'it names no nodes'}")
    return dict(line.split() for line in done.stdout.splitlines())


def _address_towards(peer: str) -> str:
    """The address of this node in the network that joins it with another: it may have several."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # sends nothing
        return str(probe.getsockname()[0])


@contextlib.contextmanager
def _head(name: str, own: str) -> Iterator[RayNode]:
    """The head of a cluster; another one if it does not start, as with a port that somebody else has just taken."""
    for attempt in range(1, _HEADS + 1):
        with RayNode(name, own) as head:
            if head.is_up():
                yield head
                return
            said = head.last_words()
        print(f"srl: Ray did not start on {name} (attempt {attempt} of {_HEADS}): {said}", file=sys.stderr)
    raise WorkerError(f"Ray does not start on {name}")


class RayNode:
    """Ray's processes on this node, in a session of their own: a cluster's head, unless the address of one is given."""

    def __init__(self, name: str, own: str, head: str = "") -> None:
        root = tempfile.gettempdir()
        self.folder = Path(tempfile.mkdtemp(prefix="srl-", dir=root if len(root) < _SHORT - 12 else "/tmp"))  # noqa: S108
        self.address = head
        self._said = self.folder / "said"
        here = os.environ
        options = [f"--node-ip-address={own}", f"--temp-dir={self.folder}", "--block", "--disable-usage-stats"]
        options += [f"--num-cpus={here['SLURM_CPUS_ON_NODE']}", f"--num-gpus={here.get('SLURM_GPUS_ON_NODE', '0')}"]
        options += [f"--labels=node={name},role={'other' if head else 'first'}"]
        # Nodes may be shared by several jobs: no port is fixed.
        options += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
        options += [f"--address={head}"] if head else ["--head", "--port=0", "--include-dashboard=false"]
        with interrupts_blocked(), open(self._said, "wb") as said:
            command = [sys.executable, "-c", _RAY, "start", *options]
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
            )

    def __enter__(self) -> RayNode:
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + _LEAVE_SECONDS
        while (left := _session(self.process.pid)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.05)
        shutil.rmtree(self.folder, ignore_errors=True)

    def is_up(self) -> bool:
        """Whether this head has started, which may take a while; then its address is known."""
        written = self.folder / "ray_current_cluster"
        deadline = time.monotonic() + _START_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            if written.exists() and ":" in (found := written.read_text()):
                self.address = found.strip()
                return True
            time.sleep(0.1)
        return False

    def last_words(self) -> str:
        """What Ray said last."""
        lines = [line.strip() for line in self._said.read_text(errors="replace").splitlines()]
        return " ".join([line for line in lines if line][-3:]) or "it said nothing"


def _session(leader: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(folder.name))
    return found


class _Keepers:
    """All other nodes' keepers, from the first node."""

    def __init__(self, here: str, count: int) -> None:
        step = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--exclude={here}", "--overlap"]
        step += ["--quiet", "--export=ALL", "--mpi=none", "--cpu-bind=none"]
        step += ["--no-kill", "--wait=0", "--kill-on-bad-exit=0"]  # those that are left go on
        with interrupts_blocked():
            command = ["srun", *step, sys.executable, "-u", "-m", "srl.launch.slurm", _KEEP]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE)

    def __enter__(self) -> _Keepers:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()  # Slurm ends what it has started

    def tell(self, order: Mapping[str, str]) -> None:
        """Tell all of them which cluster to join."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # that it has ended is noticed below
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()


def _wait_for(nodes: Mapping[str, str], address: str, keepers: _Keepers | None) -> None:
    """Wait until all nodes have joined."""
    import ray

    before = signal.getsignal(signal.SIGTERM)
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    signal.signal(signal.SIGTERM, before)  # Ray has an answer of its own
    try:
        deadline = time.monotonic() + _JOIN_SECONDS
        while missing := set(nodes) - _joined(ray):
            if keepers is not None and keepers.process.poll() is not None:
                raise WorkerError(f"srun ended with code {keepers.process.returncode} before all nodes had joined Ray")
            if time.monotonic() > deadline:
                raise WorkerError(f"{', '.join(sorted(missing))} did not join Ray within {_JOIN_SECONDS:.0f} s")
            time.sleep(0.1)
    finally:
        ray.shutdown()


def _joined(ray: Any) -> set[str]:
    return {str(node["Labels"].get("node")) for node in ray.nodes() if node["Alive"]}


def _keep() -> int:
    """Keep a Ray node running here, of the cluster that standard input names, until that input ends."""
    _hear_no_signals()
    said = b""
    while not said.endswith(b"\n"):
        part = os.read(0, 4096)
        if not part:
            return 0
        said += part
    order, name = json.loads(said), os.environ["SLURMD_NODENAME"]
    os.environ.update(_settings(order["token"]))
    own = _address_towards(order["address"].rpartition(":")[0])
    while True:
        with RayNode(name, own, order["address"]) as node:
            while node.process.poll() is None:
                if _ended(0, 1.0):
                    return 0
            print(f"srl: Ray ended on {name}, started again; it said: {node.last_words()}", file=sys.stderr)
        if _ended(0, random.uniform(0.5, 3.0)):  # nodes that were in each other's way try at different times
            return 0


def _ended(file: int, seconds: float) -> bool:
    """Whether ``file``, of which nothing more is expected, ends within so many seconds."""
    return bool(select.select([file], [], [], seconds)[0]) and not os.read(file, 4096)


if __name__ == "__main__":
    main()
