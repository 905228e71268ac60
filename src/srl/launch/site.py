"""Workers on other hosts: a site starts them there as the local launcher would, and lines join them to the controller.

A site is one process on one host. It forks workers from a process that has imported what they need, so a host can hold
hundreds, and passes on what they report and what they are ordered; a site that dies takes its workers with it. Who
starts sites, and where, is the business of :mod:`srl.launch.places`.

What is said over a line survives a cut connection: orders are numbered and repeated until they are taken, and the end
of a worker is told until the controller has forgotten it. A site says every second that its workers are there, so that
one that is stuck can be told from one whose host cannot be reached.
"""

from __future__ import annotations

import multiprocessing.util
import os
import platform
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from srl.core.errors import ConfigError, DecodeError
from srl.core.memory import Doorbell
from srl.launch.local import start_worker
from srl.services.network import Keys, Network
from srl.streams.frames import Header, decode, encode, stream_id
from srl.streams.hub import HubNames
from srl.streams.relay import Relays
from srl.streams.sockets import ServerThread, bind, connect, receive
from srl.streams.tcp_parameters import TcpParameters

_NAME = "lines"
_LONGEST = 2**24
"""Bytes of a report or an order."""
_AGAIN = 0.5
"""Seconds after which something is said again that may not have been heard."""
_GREETING = 1.0
"""Seconds between two words about a worker that has nothing to say itself."""
_CODES = 1024
"""Added to exit codes, which may be negative; headers hold no such numbers."""


@dataclass
class RemoteLine:
    """The controller's end of the line to one life of a worker."""

    bell: Doorbell
    """Rung when something was said on any line."""
    outgoing: Doorbell
    """To be rung when there is something to send."""
    incarnation: int
    closed: bool = False
    pid: int | None = None
    exitcode: int | None = None
    inbox: deque[bytes] = field(default_factory=deque)
    orders: list[bytes] = field(default_factory=list)
    taken: int = 0
    """Orders that have arrived."""
    identity: bytes = b""
    tried: float = 0.0
    reached: float = field(default_factory=time.monotonic)
    """When something was last said by the worker or its site."""

    def poll(self) -> bool:
        """See :class:`~srl.launch.controller.Line`."""
        return bool(self.inbox)

    def recv_bytes(self) -> bytes:
        """See :class:`~srl.launch.controller.Line`."""
        if not self.inbox:
            raise EOFError
        return self.inbox.popleft()

    def send_bytes(self, message: bytes) -> None:
        """See :class:`~srl.launch.controller.Line`."""
        self.orders.append(message)
        self.tried = 0.0
        self.outgoing.ring()

    def close(self) -> None:
        """See :class:`~srl.launch.controller.Line`."""
        self.closed = True


class Lines:
    """All lines to workers on other hosts, at the controller."""

    def __init__(self, network: Network) -> None:
        self.bell = Doorbell()
        self._lines: dict[int, RemoteLine] = {}
        socket = bind(network, _NAME, 0, _LONGEST)
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._server = ServerThread(socket, _NAME, self._handle, self._pass_orders)
        self._server.start()

    def open(self, number: int, incarnation: int) -> RemoteLine:
        """The line to worker ``number``, of which a new life begins: what is heard of an older one is forgotten."""
        self._lines[number] = line = RemoteLine(self.bell, self._server.bell, incarnation)
        return line

    def wait(self, timeout: float) -> None:
        """Wait until something was said on any line, for up to ``timeout`` seconds."""
        self._server.check()
        self.bell.wait(timeout)
        self.bell.clear()

    def close(self) -> None:
        """Hear nothing more."""
        self._server.close()

    def _handle(self, identity: bytes, header: Header, frames: Any) -> None:
        line = self._lines.get(header.sender)
        if header.kind == "exit" and (line is None or line.incarnation != header.incarnation or line.closed):
            self._server.send(identity, Header("forget", header.sender, header.incarnation))
        if line is None or line.incarnation != header.incarnation:
            return
        line.identity, line.taken, line.reached = identity, max(line.taken, header.sequence), time.monotonic()
        if header.kind == "hello":
            line.pid = header.number
        elif header.kind == "report" and len(frames) == 1:
            line.inbox.append(bytes(frames[0]))
        elif header.kind == "exit":
            line.exitcode = header.number - _CODES
        else:
            raise DecodeError(f"a worker does not send {header.kind!r}")
        self.bell.ring()

    def _pass_orders(self) -> None:
        now = time.monotonic()
        for number, line in list(self._lines.items()):
            if line.identity and line.taken < len(line.orders) and now - line.tried > _AGAIN:
                line.tried = now
                header = Header("order", number, line.incarnation, line.taken)
                self._server.send(line.identity, header, line.orders[line.taken])


@dataclass
class _Worker:
    """A worker of a site."""

    process: Any
    pipe: Connection
    incarnation: int
    taken: int = 0
    """Orders passed on."""
    greeted: float = 0.0
    """When the controller was last told that it is there."""
    told: float = 0.0
    """When the controller was last told that it has ended."""
    forgotten: bool = False


class Site:
    """A host's share of a run: starts workers, and passes on what they and the controller have to say."""

    def __init__(self, names: HubNames, lines: str, keys: str, relayed: Sequence[TcpParameters] = ()) -> None:
        """``lines`` is where the controller's :class:`Lines` are, ``keys`` where the run's folder has its keys.

        ``relayed`` are the parameter streams that workers here read.
        """
        self._relays = Relays(relayed)
        self._broom = _broom(multiprocessing.util.get_temp_dir())
        self._unseen = "" if _holds(Path(keys), names.keys) else str(Path(keys).parent)
        self._socket = connect(names.network, lines, _LONGEST)
        self._stream = stream_id(_NAME)
        self._workers: dict[int, _Worker] = {}
        self._lock = threading.Lock()
        self._bell = Doorbell()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._pass_all_on, name="site", daemon=True)
        self._thread.start()

    def start(
        self,
        number: int,
        payload: bytes,
        name: str,
        log: str,
        incarnation: int,
        restarted: bool,
        preload: Sequence[str],
    ) -> None:
        """Start worker ``number``; an older life of it is ended first."""
        self.signal(number, signal.SIGKILL)
        process, pipe = start_worker(payload, name, Path(log), incarnation, restarted, preload)
        with self._lock:
            self._workers[number] = _Worker(process, pipe, incarnation)
        self._bell.ring()

    def signal(self, number: int, which: int) -> bool:
        """Send a signal to a worker; False if it is gone."""
        with self._lock:
            worker = self._workers.get(number)
        if worker is None or not worker.process.is_alive():
            return False
        os.kill(worker.process.pid, which)
        return True

    def close(self) -> None:
        """End all workers."""
        self._closing.set()
        self._bell.ring()
        self._thread.join(timeout=5)
        for worker in self._workers.values():
            worker.process.kill()
            worker.process.join(timeout=5)
        self._relays.close()
        assert self._broom.stdin is not None
        self._broom.stdin.close()

    def wait(self) -> None:
        """Return when the site is closed. Raises ConfigError if it is of no use."""
        if self._unseen:
            raise ConfigError(
                f"the run's folder {self._unseen} is not there on host {platform.node()}; "
                "put it (--out) where all hosts see it"
            )
        self._closing.wait()

    def _pass_all_on(self) -> None:
        while not self._closing.is_set():
            with self._lock:
                workers = dict(self._workers)
            poller = zmq.Poller()
            open_pipes = {worker.pipe.fileno(): n for n, worker in workers.items() if not worker.pipe.closed}
            for each in (self._socket, self._bell.fileno(), *open_pipes):
                poller.register(each, zmq.POLLIN)
            ready = [source for source, _ in poller.poll(200)]
            self._bell.clear()
            self._take_orders(workers)
            for number, worker in workers.items():
                if time.monotonic() - worker.greeted > _GREETING:
                    worker.greeted = time.monotonic()
                    self._say("hello", number, worker, worker.process.pid)
            for source in ready:
                if source in open_pipes:
                    self._pass_on(open_pipes[source], workers[open_pipes[source]])
            for number, worker in workers.items():
                self._look_after(number, worker)
        self._socket.close()

    def _take_orders(self, workers: dict[int, _Worker]) -> None:
        for frames in receive(self._socket):
            try:
                header, payload = decode(frames, self._stream)
            except DecodeError:
                continue
            worker = workers.get(header.sender)
            if worker is None or worker.incarnation != header.incarnation:
                continue
            if header.kind == "forget":
                worker.forgotten = True
            elif header.kind == "order" and len(payload) == 1:
                if header.sequence == worker.taken:
                    worker.taken += 1
                    self._order(worker, bytes(payload[0]))
                self._say("hello", header.sender, worker, worker.process.pid)  # it has been taken

    def _order(self, worker: _Worker, order: bytes) -> None:
        try:
            worker.pipe.send_bytes(order)
        except OSError:  # it has ended, or is about to
            return

    def _pass_on(self, number: int, worker: _Worker) -> None:
        try:
            while worker.pipe.poll():
                self._say("report", number, worker, 0, worker.pipe.recv_bytes())
        except (EOFError, OSError):
            worker.pipe.close()

    def _look_after(self, number: int, worker: _Worker) -> None:
        """Tell the controller, until it has understood, that a worker has ended."""
        if worker.process.is_alive():
            return
        if not worker.pipe.closed:
            self._pass_on(number, worker)  # its last words
        now = time.monotonic()
        if worker.forgotten:
            worker.process.join()
            with self._lock:
                if self._workers.get(number) is worker:
                    del self._workers[number]
        elif now - worker.told > _AGAIN:
            worker.told = now
            self._say("exit", number, worker, worker.process.exitcode + _CODES)

    def _say(self, kind: str, number: int, worker: _Worker, value: int, *frames: bytes) -> None:
        header = Header(kind, number, worker.incarnation, worker.taken, value)
        try:
            self._socket.send_multipart([*encode(header, stream=self._stream), *frames], zmq.NOBLOCK)
        except zmq.Again:  # cut off for long; reports are many, all else is said again
            return


def _broom(folder: str) -> subprocess.Popen[bytes]:
    """Removes a folder when this process ends, however that is: Ray ends it before Python could do anything."""
    sweep = 'exec 3<&0; (read _ <&3; rm -rf -- "$1") >/dev/null 2>&1 &'  # not our child: Ray ends those too
    process = subprocess.Popen(["/bin/sh", "-c", sweep, "sh", folder], stdin=subprocess.PIPE, start_new_session=True)
    process.wait()
    return process


def _holds(path: Path, keys: Keys | None) -> bool:
    """Whether a file holds these keys: a folder of the same name may be another one."""
    try:
        return Keys.load(path) == keys
    except ConfigError:
        return False
