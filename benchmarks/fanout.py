"""What a new version costs the trainer, by the number of readers and hosts: with relays, and without.

python benchmarks/fanout.py --json benchmarks/results/fanout.json

Hosts are network namespaces with addresses of their own (root and iproute2 needed); all between them is encrypted with
the keys of the run. The trainer's cost is the processor time of its whole process, sending threads included.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from srl.bench.hosts import Host, hosts, obstacle
from srl.bench.machine import machine
from srl.services.network import Keys, Network
from srl.streams.hub import Hub, HubNames
from srl.streams.relay import Relays
from srl.streams.tcp_parameters import TcpParameters
from srl.streams.wait import wait

STREAM = "parameters/default"
CASES = {"1 reader": (1, 1, True), "32 readers on 8 hosts": (8, 4, True), "32 readers, no relays": (8, 4, False)}


def stream(endpoint: str) -> TcpParameters:
    """The stream, with keys read from standard input."""
    return TcpParameters(STREAM, HubNames(endpoint, msgspec.json.decode(sys.stdin.readline(), type=Keys)))


def run_hub(address: str) -> None:
    hub = Hub(Network(address, msgspec.json.decode(sys.stdin.readline(), type=Keys)))
    print(hub.endpoint, flush=True)
    sys.stdin.read()


def run_relay(endpoint: str) -> None:
    relays = Relays([stream(endpoint)])
    print("ready", flush=True)
    sys.stdin.read()
    relays.close()


def run_reader(endpoint: str, megabytes: float) -> None:
    """Say when each version was there, read into weights of one's own."""
    reader = stream(endpoint).reader()
    like = {"w": np.empty(int(megabytes * 2**18), np.float32)}
    mine, seen = {"w": like["w"].copy()}, -1
    while True:
        if reader.newest() <= seen:
            wait([each for each in [reader.pollable()] if each is not None], 0.1)
            continue
        seen = reader.read(like, lambda arrays: np.copyto(mine["w"], arrays["w"]))
        print(json.dumps([seen, time.time()]), flush=True)


def run_writer(endpoint: str, megabytes: float) -> None:
    """Publish at every line that comes in; say when, how long that took, and the processor time so far."""
    writer = stream(endpoint).writer()
    weights = {"w": np.arange(int(megabytes * 2**18), dtype=np.float32)}
    for version, _ in enumerate(sys.stdin):
        begin, clock = time.time(), time.perf_counter()
        writer.publish(weights, version)
        took, used = time.perf_counter() - clock, resource.getrusage(resource.RUSAGE_SELF)
        print(json.dumps([version, begin, took, used.ru_utime + used.ru_stime]), flush=True)


class Actors:
    """Processes of this script on hosts, with lines to and from them."""

    def __init__(self, keys: Keys, stack: ExitStack) -> None:
        self.keys, self.stack = msgspec.json.encode(keys) + b"\n", stack

    def start(self, host: Host, *role: str) -> subprocess.Popen[Any]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = host.start([sys.executable, __file__, *role], **pipes)
        self.stack.callback(process.kill)
        process.stdin.write(self.keys)
        process.stdin.flush()
        return process


def measure(case: str, megabytes: float, versions: int, pause: float) -> dict[str, float]:
    count, each, relayed = CASES[case]
    with ExitStack() as stack:
        found = stack.enter_context(hosts(count + 1))
        actors = Actors(Keys.make(), stack)
        endpoint = actors.start(found[0], "hub", found[0].address).stdout.readline().decode().strip()
        for host in found[1:] if relayed else []:
            assert actors.start(host, "relay", endpoint).stdout.readline() == b"ready\n"
        size = str(megabytes)
        readers = [actors.start(host, "reader", endpoint, size) for host in found[1:] for _ in range(each)]
        writer = actors.start(found[0], "writer", endpoint, size)
        rows, late = [], []
        for version in range(versions + 3):  # the first few find their relays
            writer.stdin.write(b"\n")
            writer.stdin.flush()
            row = json.loads(writer.stdout.readline())
            for reader in readers:
                while (heard := json.loads(reader.stdout.readline()))[0] < version:
                    pass
                late.append((version, heard[1] - row[1]))
            time.sleep(pause)
            rows.append(row)
        kept = rows[2:]
        used = (kept[-1][3] - kept[0][3]) / (len(kept) - 1)
        visible = [seconds for version, seconds in late if version > 2]
        return {
            "trainer, ms of processor time": 1000 * used,
            "publish(), ms": 1000 * median(row[2] for row in kept[1:]),
            "visible after, ms (median)": 1000 * median(visible),
            "visible after, ms (last reader)": 1000 * max(visible),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--megabytes", type=float, default=10.0)
    parser.add_argument("--versions", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between two versions")
    parser.add_argument("--rounds", type=int, default=3)
    said = parser.parse_args()
    if obstacle():
        raise SystemExit(obstacle())
    found: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for number in range(said.rounds):
        for case, rounds in found.items():
            rounds.append(measure(case, said.megabytes, said.versions, said.pause))
            print(f"round {number + 1}: {case:24} {rounds[-1]}", file=sys.stderr, flush=True)
    keys = list(found["1 reader"][0])
    print(f"| {said.megabytes:g} MB | " + " | ".join(keys) + " |\n|---" + "|---" * len(keys) + "|")
    for case, rounds in found.items():
        print(f"| {case} | " + " | ".join(f"{median(row[key] for row in rounds):.1f}" for key in keys) + " |")
    costs = {case: median(row[keys[0]] for row in rounds) for case, rounds in found.items()}
    print(f"32 readers on 8 hosts cost the trainer {costs['32 readers on 8 hosts'] / costs['1 reader']:.2f} times one")
    if said.json:
        options = {"megabytes": said.megabytes, "versions": said.versions, "rounds": said.rounds}
        said.json.write_text(json.dumps({"machine": machine(), "options": options, "found": found}, indent=1) + "\n")


ROLES = {"hub": run_hub, "relay": run_relay, "reader": run_reader, "writer": run_writer}

if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] in ROLES:
        role, *given = sys.argv[1:]
        ROLES[role](given[0], *map(float, given[1:]))  # type: ignore[operator]
    else:
        main()
