"""The places of a run on a cluster: room for its sites on the hosts of Ray, asked for, watched, and asked for anew.

A site (:mod:`srl.launch.site`) is one Ray actor that holds one worker, or a pack of actors: as many as fit on the
smallest host. When a host is lost the sites it had are placed elsewhere, as soon as there is room.

A host is lost when Ray says so. Ray asks every few seconds; a host that refuses to be talked to has no processes any
more, and is given up at once. One that just does not answer may be behind a network that is cut: that is left to Ray,
which by its own settings waits for most of a minute, and as long as it waits nothing is started anew.
"""

from __future__ import annotations

import math
import random
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from srl.core.errors import ConfigError, WorkerError
from srl.experiment import Experiment, Node
from srl.launch.site import Site
from srl.streams.hub import HubNames
from srl.streams.tcp_parameters import TcpParameters

_PATIENCE = 30.0
"""Seconds after which a run that still waits for room says so."""
_ATTEMPT = 10.0
"""Seconds a run that waits for the rest of its room keeps others from the part that it has."""
_LOOK = 0.2
"""Seconds between two looks at the sites."""
_GOING = 10.0
"""Seconds a site may take to end its workers."""
_NODE_ID = "ray.io/node-id"
"""A label that Ray gives every host."""


@dataclass(frozen=True)
class Berth:
    """What one site holds, and what it needs of a host."""

    nodes: tuple[Node, ...]
    resources: dict[str, float]
    labels: dict[str, str]


def berths(x: Experiment, nodes: Sequence[Node], hosts: Sequence[dict[str, float]]) -> list[Berth]:
    """The sites of a run: actors in packs, everybody else by itself."""
    groups: dict[str, Any] = {"actor": x.actors, "policy": x.policies, "trainer": x.trainer, "peer": x.trainer}
    found = []
    actors = [node for node in nodes if node.worker.kind == "actor"]
    smallest = min((host.get("CPU", 0.0) for host in hosts if host.get("CPU")), default=1.0)
    pack = max(1, min(int(smallest / x.actors.cpus) if x.actors.cpus else len(actors), -(-len(actors) // len(hosts))))
    packs = [tuple(actors[start : start + pack]) for start in range(0, len(actors), pack)]
    others = [(node,) for node in nodes if node.worker.kind != "actor"]
    for held in [*others, *packs]:
        group = groups.get(held[0].worker.kind)
        resources = {"CPU": group.cpus * len(held) if group is not None else 1.0}
        if group is not None and group.gpus:
            resources["GPU"] = group.gpus * len(held)
        found.append(Berth(held, resources, _labels(group.on) if group is not None else {}))
    return found


def squeezed(found: Sequence[Berth], cores: float) -> list[Berth]:
    """The same sites on one machine to which nothing will be added: workers share its cores, however many they are."""
    wanted = sum(berth.resources["CPU"] for berth in found)
    if wanted <= cores:
        return list(found)
    shares = [math.floor(1e3 * berth.resources["CPU"] * cores / wanted) / 1e3 for berth in found]
    return [replace(each, resources={**each.resources, "CPU": cpus}) for each, cpus in zip(found, shares, strict=True)]


def _labels(text: str) -> dict[str, str]:
    """``role=learner,zone=a`` as a dictionary."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    if any(not name or not value for name, _, value in pairs):
        raise ConfigError(f"hosts are named by their labels, such as role=learner, got {text!r}")
    return {name.strip(): value.strip() for name, _, value in pairs}


@dataclass
class Place:
    """A site as the launcher knows it."""

    berth: Berth
    group: Any = None
    """Its room on a host: a placement group of one bundle."""
    handle: Any = None
    up: Any = None
    """Ready once the site is there; None once that is known."""
    since: float = 0.0
    """When the site was asked for."""
    told: bool = False
    """Whether the user knows that there is no room for it."""
    node: str = ""
    """Ray's name for the host it is on."""
    ended: Any = None
    """Ready once the site is gone."""
    lost: bool = False
    deaths: int = 0
    """How often the site died though its host did not."""

    @property
    def names(self) -> str:
        """Of the workers it holds."""
        return ", ".join(node.name for node in self.berth.nodes)


class Places:
    """All places of a run."""

    def __init__(
        self,
        ray: Any,
        berths: Sequence[Berth],
        names: HubNames,
        lines: str,
        keys: Path,
        relayed: Sequence[TcpParameters],
        restarts: int,
        say: Callable[[str], None],
    ) -> None:
        """``names``, ``lines``, ``keys`` and ``relayed`` are for sites, see :class:`~srl.launch.site.Site`.

        ``restarts`` is how often a site may die though its host did not.
        """
        self.ray, self.names, self.lines, self.keys, self.relayed = ray, names, lines, keys, relayed
        self.restarts, self.say = restarts, say
        self.all = [Place(berth) for berth in berths]
        self.of = {node.name: place for place in self.all for node in place.berth.nodes}
        """The place of every worker."""
        self.refused: set[str] = set()
        """Hosts that are gone, whether Ray knows it or not."""
        self._looked = 0.0

    def reserve(self, ending: Callable[[], float | None]) -> None:
        """Wait until there is room for all; who waits holds nothing for long that another run could use."""
        begin, told = time.monotonic(), False
        while ending() is None:
            for place in self.all:
                place.group = self._room(place)
            deadline = time.monotonic() + _ATTEMPT
            waiting = [place.group for place in self.all]
            while waiting and time.monotonic() < deadline and ending() is None:
                waiting = [group for group in waiting if not group.wait(1 if group is waiting[0] else 0)]
            if not waiting:
                return
            self._release()
            if time.monotonic() - begin > _PATIENCE and not told:
                told = True
                self.say(f"waits for room on the cluster: {self._missing(self.all)}")
            time.sleep(random.uniform(0, 1))

    def _room(self, place: Place) -> Any:
        """Ask for a place on a host, and not on one that is gone."""
        labels, gone = dict(place.berth.labels), self.refused & self._alive().keys()
        if gone:
            labels[_NODE_ID] = f"!in({','.join(sorted(gone))})"
        chosen = {"bundle_label_selector": [labels]} if labels else {}
        return self.ray.util.placement_group([dict(place.berth.resources)], **chosen)

    def _release(self) -> None:
        for place in self.all:
            if place.group is not None:
                self.ray.util.remove_placement_group(place.group)
                place.group = None

    def _missing(self, places: Sequence[Place]) -> str:
        free = self.ray.available_resources()
        needs = _sum([place.berth.resources for place in places])
        has = _sum([{name: free.get(name, 0.0) for name in ("CPU", "GPU")}])
        wanted = sorted({label for place in places for label in place.berth.labels.items()})
        where = f" on hosts with {', '.join('='.join(label) for label in wanted)}" if wanted else ""
        return f"it takes {needs}{where}; free on all hosts: {has}"

    def settle(self, place: Place) -> None:
        """Put a site where there is room for it."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if place.lost:
            self.ray.util.remove_placement_group(place.group)
            place.group = self._room(place)
        where = PlacementGroupSchedulingStrategy(place.group, placement_group_bundle_index=0)
        needs = place.berth.resources
        options = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0), "max_concurrency": 8}
        kind = self.ray.remote(Site).options(**options, scheduling_strategy=where, max_restarts=0)
        reads = any(node.worker.kind in ("actor", "policy") for node in place.berth.nodes)
        place.handle = kind.remote(self.names, self.lines, str(self.keys), self.relayed if reads else [])
        place.up, place.ended = place.handle.__ray_ready__.remote(), place.handle.wait.remote()
        place.since, place.told, place.node, place.lost = time.monotonic(), False, "", False

    def look(self) -> None:
        """See what has become of the sites, if it is time."""
        if time.monotonic() - self._looked > _LOOK:
            self._looked = time.monotonic()
            self._look_for_losses()
            self._look_for_room()

    def _look_for_losses(self) -> None:
        watched = {place.ended: place for place in self.all if place.ended is not None and not place.lost}
        for ref in self.ready(list(watched)):
            place, why = watched[ref], self.why(ref)
            if isinstance(why, ConfigError):
                raise why
            gone = self._is_gone(place)
            if isinstance(why, self.ray.exceptions.ActorUnavailableError) and not gone:
                place.ended = place.handle.wait.remote()  # nobody knows; Ray will
            else:
                self._lose(place, gone, why)

    def _lose(self, place: Place, gone: bool, why: Exception | None) -> None:
        place.lost = True
        if gone:
            self.say(f"the host of {place.names} was lost; started again where there is room")
            return
        place.deaths += 1
        text = f"the process that had started {place.names} died: {line(why)}"
        if place.deaths > self.restarts:
            raise WorkerError(f"{text}; that was the {place.deaths}. time")
        self.say(f"{text}; started again")

    def _is_gone(self, place: Place) -> bool:
        """Whether the host of a site has no processes any more."""
        alive, node = self._alive(), place.node or self._where(place)
        if not node:
            return False
        if node in alive and _refuses(alive[node]["NodeManagerAddress"], alive[node]["NodeManagerPort"]):
            self.refused.add(node)
        return node not in alive or node in self.refused

    def _alive(self) -> dict[str, Any]:
        return {each["NodeID"]: each for each in self.ray.nodes() if each["Alive"]}

    def _where(self, place: Place) -> str:
        """The host of a site, as far as Ray has chosen one."""
        table = self.ray.util.placement_group_table(place.group) or {}
        return str(table.get("bundles_to_node_id", {}).get(0) or "")

    def _look_for_room(self) -> None:
        """See which sites have been placed by now, and say which have not been for long."""
        coming = {place.up: place for place in self.all if place.up is not None and not place.lost}
        for ref in self.ready(list(coming)):
            place = coming.pop(ref)
            place.up, place.node = None, self._where(place)
        late = [place for place in coming.values() if time.monotonic() - place.since > _PATIENCE and not place.told]
        for place in late:
            place.told = True
            self.say(f"{place.names} waits for room on the cluster: {self._missing([place])}")

    def leave(self) -> None:
        """End the sites; one that does not answer is ended by Ray."""
        self._look_for_room()
        made = [place for place in self.all if place.handle is not None and not place.lost]
        closing = [place.handle.close.remote() for place in made if place.up is None]
        if closing:
            self.ray.wait(closing, num_returns=len(closing), timeout=_GOING)
        for place in made:
            self.ray.kill(place.handle)
        self._release()

    def ready(self, refs: Sequence[Any]) -> list[Any]:
        """Those that are ready."""
        found: list[Any] = self.ray.wait(list(refs), num_returns=len(refs), timeout=0)[0] if refs else []
        return found

    def why(self, ref: Any) -> Exception | None:
        """What ended a call to a site; None if nothing went wrong."""
        try:
            self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause
            return cause if isinstance(cause, Exception) else error
        except self.ray.exceptions.RayError as error:
            found: Exception = error
            return found
        return None


def _refuses(address: str, port: int) -> bool:
    """Whether a host is there, but nobody listens at this port of it."""
    try:
        socket.create_connection((address, port), timeout=1).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # no answer is no answer
        return False
    return False


def line(error: Exception | None) -> str:
    """The first line of an error."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _sum(bundles: Sequence[dict[str, float]]) -> str:
    totals = {name: sum(each.get(name, 0.0) for each in bundles) for name in ("CPU", "GPU")}
    return ", ".join(f"{total:g} {name}s" for name, total in totals.items() if total) or "nothing"
