"""The launcher for clusters: Ray places sites on hosts and says when one is lost; the controller is the local one's.

A site (:mod:`srl.launch.site`) is one Ray actor that holds one worker, or a pack of actors: as many as fit on the
smallest host. All sites are bundles of one placement group. When a host is lost Ray places its bundles elsewhere, as
soon as there is room, and their workers start anew there; that uses nothing of the run's restart budget.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srl.core.errors import ConfigError, WorkerError
from srl.experiment import Experiment, Node
from srl.launch.controller import Child, Controller
from srl.launch.site import Lines, RemoteLine, Site
from srl.services.network import Keys, Network
from srl.streams.hub import Hub

KEYS = "keys.json"
_HEALTH = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "4"}
"""For clusters started here: a host whose processes are gone is given up after 5 s instead of 15."""
_PATIENCE = 30.0
"""Seconds after which a run that still waits for room says so."""
_GOING = 10.0
"""Seconds a process that was killed may take to end."""


@dataclass(frozen=True)
class Berth:
    """What one site holds, and what it needs of a host."""

    nodes: tuple[Node, ...]
    resources: dict[str, float]
    labels: dict[str, str]


class Hosts:
    """The hosts of a run: the Ray cluster they are in, and the network that joins them, with keys of its own."""

    def __init__(self, ray: Any, run_dir: Path) -> None:
        self.ray = ray
        keys = Keys.make()
        run_dir.mkdir(parents=True, exist_ok=True)
        self._keys = run_dir / KEYS
        keys.save(self._keys)
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
        self._keys.unlink(missing_ok=True)


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
    try:
        ray.init(address=address or "auto", **quiet)
    except ConnectionError as error:
        if address:
            raise ConfigError(f"there is no Ray cluster at {address}: {error}") from error
        ray.init(include_dashboard=False, **quiet)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"cannot join the Ray cluster {address or 'of this machine'}: {error}") from error
    try:
        hosts = Hosts(ray, run_dir)
        try:
            yield hosts
        finally:
            hosts.close()
    finally:
        ray.shutdown()


def berths(x: Experiment, nodes: Sequence[Node], hosts: Sequence[dict[str, float]]) -> list[Berth]:
    """The sites of a run: actors in packs, everybody else alone."""
    groups: dict[str, Any] = {"actor": x.actors, "policy": x.policies, "trainer": x.trainer, "peer": x.trainer}
    found = []
    actors = [node for node in nodes if node.worker.kind == "actor"]
    smallest = min((host.get("CPU", 0.0) for host in hosts if host.get("CPU")), default=1.0)
    pack = max(1, min(int(smallest / x.actors.cpus) if x.actors.cpus else len(actors), -(-len(actors) // len(hosts))))
    packs = [tuple(actors[start : start + pack]) for start in range(0, len(actors), pack)]
    alone = [(node,) for node in nodes if node.worker.kind != "actor"]
    for held in [*alone, *packs]:
        group = groups.get(held[0].worker.kind)
        resources = {"CPU": group.cpus * len(held) if group is not None else 1.0}
        if group is not None and group.gpus:
            resources["GPU"] = group.gpus * len(held)
        found.append(Berth(held, resources, _labels(group.on) if group is not None else {}))
    return found


def _labels(text: str) -> dict[str, str]:
    """``role=learner,zone=a`` as a dictionary."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    if any(not name or not value for name, _, value in pairs):
        raise ConfigError(f"hosts are named by their labels, such as role=learner, got {text!r}")
    return {name.strip(): value.strip() for name, _, value in pairs}


@dataclass
class _Place:
    """A site as the launcher knows it."""

    berth: Berth
    bundle: int
    handle: Any = None
    ended: Any = None
    """Ready once the site is gone."""
    lost: bool = False


@dataclass
class RemoteProcess:
    """A worker's process on another host. See :class:`~srl.launch.controller.Process`."""

    number: int
    place: _Place
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
        if self.is_alive():
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
        self.ray, self.hosts = hosts.ray, hosts
        self.numbers = {node.name: number for number, node in enumerate(self.nodes)}
        trainers = [node for node in self.nodes if node.worker.kind == "trainer"]
        self.relayed = [node.arguments["parameters"] for node in trainers]
        self.places: dict[str, _Place] = {}
        self.sites: list[_Place] = []
        for bundle, berth in enumerate(berths(experiment, self.nodes, hosts.resources())):
            place = _Place(berth, bundle)
            self.sites.append(place)
            self.places.update({node.name: place for node in berth.nodes})
        self.group: Any = None
        self._marker = self.logs.parent / f".seen-{os.getpid()}"

    def run(self, ending: Callable[[], float | None]) -> None:
        """See :class:`~srl.launch.controller.Controller`."""
        try:
            self._reserve(ending)
            if ending() is None:
                self._marker.touch()
                super().run(ending)
        finally:
            self._marker.unlink(missing_ok=True)
            self._leave()
            if self.group is not None:
                self.ray.util.remove_placement_group(self.group)

    def _leave(self) -> None:
        """End the sites; one that does not answer is ended by Ray."""
        here = [place.handle for place in self.sites if place.handle is not None and not place.lost]
        if here:
            self.ray.wait([site.close.remote() for site in here], num_returns=len(here), timeout=_GOING)
        for site in here:
            self.ray.kill(site)

    def _reserve(self, ending: Callable[[], float | None]) -> None:
        """Wait until there is room for all."""
        bundles = [dict(place.berth.resources) for place in self.sites]
        labels = [dict(place.berth.labels) for place in self.sites]
        chosen = {"bundle_label_selector": labels} if any(labels) else {}
        self.group = self.ray.util.placement_group(bundles, strategy="PACK", **chosen)
        begin, told = time.monotonic(), False
        while not self.group.wait(1) and ending() is None:
            if time.monotonic() - begin > _PATIENCE and not told:
                told = True
                self.say(f"waits for room on the cluster: it needs {_sum(bundles)}, of which {self._free()} are free")

    def _free(self) -> str:
        free = self.ray.available_resources()
        return _sum([{name: free.get(name, 0.0) for name in ("CPU", "GPU")}])

    def begin(self, node: Node, log: Path, incarnation: int, restarted: bool) -> tuple[RemoteProcess, RemoteLine]:
        """See :class:`~srl.launch.controller.Controller`."""
        place, number = self.places[node.name], self.numbers[node.name]
        if place.handle is None or place.lost:
            self._settle(place)
        line = self.hosts.lines.open(number, incarnation)
        given = number, pickle.dumps(node), node.name, str(log), incarnation, restarted, list(self.preload)
        started = place.handle.start.remote(*given)
        return RemoteProcess(number, place, place.handle, line, started), line

    def _settle(self, place: _Place) -> None:
        """Put a site where its bundle is."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=place.bundle)
        needs = place.berth.resources
        options = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0), "max_concurrency": 8}
        kind = self.ray.remote(Site).options(**options, scheduling_strategy=where, max_restarts=0)
        reads = any(node.worker.kind in ("actor", "policy") for node in place.berth.nodes)
        relayed = self.relayed if reads else []
        place.handle = kind.remote(self.hosts.names, self.hosts.lines.endpoint, str(self._marker), relayed)
        place.ended, place.lost = place.handle.wait.remote(), False

    def heard(self, timeout: float) -> list[Child]:
        """See :class:`~srl.launch.controller.Controller`."""
        self.hosts.lines.wait(timeout)
        self._look_for_losses()
        return [child for child in self.children.values() if child.pipe.poll()]

    def _look_for_losses(self) -> None:
        here = {place.ended: place for place in self.sites if place.ended is not None and not place.lost}
        gone, _ = self.ray.wait(list(here), num_returns=len(here), timeout=0) if here else ([], [])
        for ref in gone:
            place = here[ref]
            place.lost = True
            why = self._why(ref)
            if isinstance(why, ConfigError):
                raise why
            names = ", ".join(node.name for node in place.berth.nodes)
            self.say(f"the host of {names} was lost ({why}); started again where there is room")
        for child in self.children.values():
            process: Any = child.process
            if process.started is not None and self.ray.wait([process.started], timeout=0)[0]:
                why = self._why(process.started)
                process.started = None
                if why is not None and not process.lost:
                    process.failed = child.cause = str(why)

    def _why(self, ref: Any) -> Exception | None:
        """What ended a call to a site; None if nothing went wrong."""
        try:
            self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause
            return cause if isinstance(cause, ConfigError) else WorkerError(str(cause))
        except self.ray.exceptions.RayError as error:
            return WorkerError(str(error).strip().splitlines()[0])
        return None

    def spares(self, child: Child) -> bool:
        """See :class:`~srl.launch.controller.Controller`: a lost host is nobody's crash."""
        process: Any = child.process
        return bool(process.lost)

    def signal(self, process: Any, number: int) -> None:
        """See :class:`~srl.launch.controller.Controller`."""
        if process.lost or not self.ray.get(process.handle.signal.remote(process.number, number), timeout=_GOING):
            raise ProcessLookupError


def _sum(bundles: Sequence[dict[str, float]]) -> str:
    totals = {name: sum(each.get(name, 0.0) for each in bundles) for name in ("CPU", "GPU")}
    return ", ".join(f"{total:g} {name}s" for name, total in totals.items() if total) or "nothing"
