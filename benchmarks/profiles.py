"""Where the processor time of a training run goes, function by function.

python benchmarks/profiles.py [cartpole halfcheetah pong pong-4] [--seconds 60] [--warmup 15]

Every work runs as in ``srl bench throughput``; py-spy (of the ``dev`` extra) samples each of its workers, C and C++
frames included. A sample of a thread that does something counts for the innermost function, and for whom that function
belongs to: the environment, torch, arithmetic of networks in C (which is torch's elsewhere), numpy, Python, the
system, or SRL, in Python or in C. Tables, the shares of SRL's own functions and the stacks themselves (folded, those
below a thousandth left out; any flame graph viewer reads them) go to benchmarks/results/profiles/. Under "run" is what
all workers did together.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from srl.bench.machine import machine
from srl.bench.throughput import BenchOptions, experiment
from srl.launch import share_the_machine
from srl.launch.run import run

WORKS = ("cartpole", "halfcheetah", "pong", "pong-4")
KEPT = Path(__file__).parent / "results" / "profiles"
RATE = 20
"""Samples a second: a process stands still while its C frames are read, so few, for longer."""
IDLE = ("poll (", "epoll_wait (", "select (", "futex_wait", "pthread_cond", "sem_wait", "sem_clockwait")
"""Innermost functions of a thread that waits."""
ARITHMETIC = ("wide", "narrow", "collect", "products_", "windows_", "dense_", "small_", "adam_", "eye_pack", "returns_")
"""How functions of SRL's compiled code begin that do what torch does elsewhere: products, gradients, Adam."""
OWNERS = {
    "environment": ("ale_py", "mujoco", "gymnasium", "opencv", "libcv"),
    "torch": ("torch", "libgomp", "mkldnn", "dnnl", "mkl", "c10", "at::"),
    "numpy": ("numpy", "openblas"),
    "SRL": ("srl/",),
    "Python": ("libpython", "python3", ".py:", "importlib", "/python"),
    "system": ("libc", "ld-linux", "linux-gnu", "vdso", "kernel"),
}


def owner(frame: str) -> str:
    """Whom a frame such as ``name (file:line)`` belongs to."""
    if "libnative" in frame and frame.startswith(ARITHMETIC):
        return "arithmetic"
    return next((name for name, marks in OWNERS.items() if any(mark in frame for mark in marks)), "other")


def workers(pid: int) -> dict[str, int]:
    """The worker processes below ``pid`` by name: each writes to a log of that name."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            group = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[2])
            log = (folder / "fd" / "1").readlink()
        except (OSError, ValueError):
            continue
        if group == pid and log.suffix == ".log" and log.parent.name == "logs":
            found[log.stem] = int(folder.name)
    return found


def sample(work: str, warmup: float, seconds: float) -> tuple[dict[str, Counter[str]], dict[str, float]]:
    """Stacks of every worker of ``work``, and the cores each of them kept busy."""
    with tempfile.TemporaryDirectory(prefix="srl-profile-") as scratch:
        command = [sys.executable, __file__, work, "--run", f"{scratch}/run", "--seconds", str(warmup + seconds + 5)]
        process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
        try:
            time.sleep(warmup)
            pids = workers(process.pid)
            before = {name: spent(pid) for name, pid in pids.items()}
            spies = [spy(pid, seconds, f"{scratch}/{name}") for name, pid in pids.items()]
            time.sleep(seconds)
            busy = {name: (spent(pid) - before[name]) / seconds for name, pid in pids.items()}
            for each in spies:
                each.wait(30)
        finally:
            process.wait(120)
        return {name: stacks(Path(scratch) / name) for name in pids}, busy


def spy(pid: int, seconds: float, to: str) -> subprocess.Popen[bytes]:
    how = ["--native", "--rate", str(RATE), "--duration", str(int(seconds)), "--format", "raw"]
    command = [str(Path(sys.executable).parent / "py-spy"), "record", *how, "--output", to, "--pid", str(pid)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def spent(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def stacks(path: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in path.read_text().splitlines():
        stack, count = line.rsplit(" ", 1)
        if not stack.rsplit(";", 1)[-1].startswith(IDLE):
            found[stack] += int(count)
    return found


def together(found: dict[str, Counter[str]], busy: dict[str, float]) -> Counter[str]:
    """Stacks of all workers, each worker's counted for the processor time it took."""
    whole: Counter[str] = Counter()
    for name, each in found.items():
        for stack, count in each.items():
            whole[stack] += round(1e6 * busy[name] * count / each.total())
    return whole


def summary(found: Counter[str]) -> dict[str, dict[str, float]]:
    """Shares of owners, of the innermost functions, and of SRL's own among these."""
    owners: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for stack, count in found.items():
        frame = stack.rsplit(";", 1)[-1]
        owners[owner(frame)] += count
        functions[re.sub(r":\d+\)$", ")", frame)[-100:]] += count
    whole = max(found.total(), 1)
    ours = {name: count for name, count in functions.items() if owner(name) == "SRL"}
    shares = {"owners": dict(owners.most_common()), "functions": dict(functions.most_common(15))}
    shares["SRL's own"] = dict(Counter(ours).most_common(8))
    return {key: {name: round(count / whole, 4) for name, count in each.items()} for key, each in shares.items()}


def keep(work: str, name: str, found: Counter[str]) -> None:
    least = found.total() / 1000
    text = "\n".join(f"{stack} {count}" for stack, count in found.most_common() if count >= least)
    with gzip.GzipFile(KEPT / f"{work}-{name}.folded.gz", "wb", mtime=0) as file:
        file.write(text.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", nargs="*", default=WORKS)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--warmup", type=float, default=15.0)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        x = experiment(options.work[0], BenchOptions())
        run(replace(x, steps=10**12), options.run, seconds=options.seconds)
        return
    KEPT.mkdir(parents=True, exist_ok=True)
    results = KEPT / "profiles.json"
    works = json.loads(results.read_text())["works"] if results.exists() else {}
    for work in options.work:
        found, busy = sample(work, options.warmup, options.seconds)
        samples = {name: each.total() for name, each in found.items()}
        for name, each in found.items():
            keep(work, name, each)
        works[work] = {}
        busy["run"], samples["run"], found["run"] = sum(busy.values()), sum(samples.values()), together(found, busy)
        for name, each in sorted(found.items()):
            works[work][name] = {"cores": round(busy[name], 2), "samples": samples[name], **summary(each)}
            about = works[work][name]
            shares = ", ".join(f"{who} {share:.0%}" for who, share in about["owners"].items())
            most = next(iter(about["SRL's own"].items()), ("none", 0.0))
            print(f"{work:12} {name:16} {about['cores']:.2f} cores: {shares}; most of SRL's: {most[0]} {most[1]:.1%}")
        results.write_text(json.dumps({"machine": machine(), "works": works}, indent=1) + "\n")


if __name__ == "__main__":
    share_the_machine()
    main()
