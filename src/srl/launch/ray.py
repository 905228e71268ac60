"""The launcher for clusters: workers are processes of sites on the hosts of Ray; the controller is the local one's.

Where sites are and what becomes of them is the business of :mod:`srl.launch.places`. The workers of a lost host start
anew elsewhere, and that uses nothing of the run's restart budget.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srl.core.errors import ConfigError
from srl.experiment import Experiment, Node
from srl.launch.controller import Child, Controller
from srl.launch.places import Place, Places, berths, line, squeezed
from srl.launch.site import Lines, RemoteLine
from srl.services.network import Keys, Network
from srl.streams.hub import Hub

KEYS = "keys.json"
_HEALTH = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "4"}
"""For clusters started here: a host whose processes are gone is given up after 5 s instead of 15."""
_UNHEARD = 5.0
"""Seconds without a word from a site after which its host is said not to answer."""
_GOING = 10.0
"""Seconds a process that was killed may take to end."""


class Hosts:
    """The hosts of a run: the Ray cluster they are in, and the network that joins them, with keys of its own."""

    def __init__(self, ray: Any, run_dir: Path, *, alone: bool) -> None:
        """``alone``: there is only this machine, and will be."""
        self.ray, self.alone = ray, alone
        keys = Keys.make()
        run_dir.mkdir(parents=True, exist_ok=True)
        self.keys = run_dir / KEYS
        """Where they are kept; who reads them there sees the run's folder."""
        keys.save(self.keys)
        network = Network(ray.util.get_node_ip_address(), keys)
        self.hub, self.lines = Hub(network), Lines(network)
        self.names = self.hub.names()

    def resources(self) -> list[dict[str, float]]:
        """What each host that is alive has."""
        return [each["Resources"] for each in self.ray.nodes() if each["Alive"]]

    def cores(self) -> int:
        """Of all hosts."""
        return max(1, int(sum(each.get("CPU", 0.0) for each in self.resources())))

    def close(self) -> None:
        """Leave them."""
        self.lines.close()
        self.hub.close()
        self.keys.unlink(missing_ok=True)


@contextlib.contextmanager
def joined(launcher: str, run_dir: Path) -> Iterator[Hosts]:
    """The hosts of the Ray cluster at ``ray://address``, or of the one there is, or with ``ray`` just this machine."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("the ray launcher needs Ray: pip install 'reallyscalablerl[ray]'") from error
    address = launcher.removeprefix("ray").removeprefix("://")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "namespace": f"srl-{os.getpid()}"}
    for name, value in _HEALTH.items():
        os.environ.setdefault(name, value)
    alone = False
    try:
        ray.init(address=address or "auto", **quiet)
    except ConnectionError as error:
        if address:
            raise ConfigError(f"there is no Ray cluster at {address}: {error}") from error
        ray.init(include_dashboard=False, **quiet)
        alone = True
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"cannot join the Ray cluster {address or 'of this machine'}: {error}") from error
    try:
        hosts = Hosts(ray, run_dir, alone=alone)
        try:
            yield hosts
        finally:
            hosts.close()
    finally:
        ray.shutdown()


@dataclass
class RemoteProcess:
    """A worker's process on another host. See :class:`~srl.launch.controller.Process`."""

    number: int
    place: Place
    handle: Any
    line: RemoteLine
    started: Any
    """Ready once the site has started it, or could not."""
    failed: str = ""

    @property
    def pid(self) -> int | None:
        """See the class."""
        return self.line.pid

    @property
    def lost(self) -> bool:
        """Whether its host, or its site there, is gone."""
        return self.place.lost or self.place.handle is not self.handle

    @property
    def exitcode(self) -> int | None:
        """See the class."""
        if self.line.exitcode is None and (self.lost or self.failed):
            return -signal.SIGKILL
        return self.line.exitcode

    def is_alive(self) -> bool:
        """See the class."""
        return self.exitcode is None

    def kill(self) -> None:
        """See the class."""
        if self.place.up is not None:  # there was no room for it
            self.failed = self.failed or "it was never started"
        elif self.is_alive():
            self.handle.signal.remote(self.number, int(signal.SIGKILL))

    def join(self, timeout: float | None = None) -> None:
        """See the class; never longer than a killed process takes to end."""
        deadline = time.monotonic() + min(_GOING, timeout if timeout is not None else _GOING)
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)


class RayLauncher(Controller):
    """Starts workers on the hosts of a Ray cluster."""

    def __init__(self, *given: Any, hosts: Hosts, experiment: Experiment, **watched: Any) -> None:
        super().__init__(*given, **watched)
        self.ray, self.lines = hosts.ray, hosts.lines
        self.numbers = {node.name: number for number, node in enumerate(self.nodes)}
        wanted = berths(experiment, self.nodes, hosts.resources())
        if hosts.alone:
            wanted = squeezed(wanted, hosts.cores())
        trainers = [node for node in self.nodes if node.worker.kind == "trainer"]
        relayed = [] if hosts.alone else [node.arguments["parameters"] for node in trainers]
        sites = hosts.names, hosts.lines.endpoint, hosts.keys, relayed
        self.places = Places(hosts.ray, wanted, *sites, self.restarts, self.say)

    def run(self, ending: Callable[[], float | None]) -> None:
        """See :class:`~srl.launch.controller.Controller`."""
        try:
            self.places.reserve(ending)
            if ending() is None:
                super().run(ending)
        finally:
            self.places.leave()

    def begin(self, node: Node, log: Path, incarnation: int, restarted: bool) -> tuple[RemoteProcess, RemoteLine]:
        """See :class:`~srl.launch.controller.Controller`."""
        place, number = self.places.of[node.name], self.numbers[node.name]
        if place.handle is None or place.lost:
            self.places.settle(place)
        line = self.lines.open(number, incarnation)
        given = number, pickle.dumps(node), node.name, str(log), incarnation, restarted, list(self.preload)
        started = place.handle.start.remote(*given)
        return RemoteProcess(number, place, place.handle, line, started), line

    def heard(self, timeout: float) -> list[Child]:
        """See :class:`~srl.launch.controller.Controller`."""
        self.lines.wait(timeout)
        self.places.look()
        self._look_for_starts()
        return [child for child in self.children.values() if child.pipe.poll()]

    def _look_for_starts(self) -> None:
        """See which workers could not be started."""
        children: Any = self.children.values()
        starting = {child.process.started: child for child in children if child.process.started is not None}
        for ref in self.places.ready(list(starting)):
            child, why = starting[ref], self.places.why(ref)
            child.process.started = None
            if why is not None and not child.process.lost:
                child.process.failed = child.cause = line(why)

    def spares(self, child: Child) -> bool:
        """See :class:`~srl.launch.controller.Controller`: a lost host is nobody's crash."""
        process: Any = child.process
        return bool(process.lost) or super().spares(child)

    def absent(self, child: Child) -> str:
        """See :class:`~srl.launch.controller.Controller`."""
        process: Any = child.process
        if process.place.up is not None:
            return "there is no room for it on the cluster yet"
        return "its host does not answer" if time.monotonic() - process.line.reached > _UNHEARD else ""

    def signal(self, process: Any, number: int) -> None:
        """See :class:`~srl.launch.controller.Controller`."""
        if process.lost:
            raise ProcessLookupError
        asked = process.handle.signal.remote(process.number, number)
        try:
            found = self.ray.get(asked, timeout=_GOING)
        except self.ray.exceptions.RayError as error:
            raise ProcessLookupError from error
        if not found:
            raise ProcessLookupError
