"""The inference stream between hosts: observations travel there, outputs travel back into the block.

A request is numbered and repeated until it is answered. The server keeps each client's last observations and outputs in
a slab of one step, so a request that comes twice is answered from there, and only requests that are new make a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zmq

from srl.core.errors import DecodeError
from srl.core.slab import KEEP, PEEK, PLAIN, BlockSpec, Slab
from srl.core.specs import Array, Arrays
from srl.services.names import Names
from srl.streams.frames import Header, decode, encode, payload, stream_id
from srl.streams.inference import mark, read_rows, write_rows, write_step
from srl.streams.protocols import Requests
from srl.streams.sockets import ServerLink, listen, receive


class TcpInference:
    """An inference stream for ``clients`` client slots and ``servers`` policy workers."""

    def __init__(self, name: str, names: Names, spec: BlockSpec, clients: int, servers: int, port: int = 0) -> None:
        self.name, self.names, self.clients, self.servers, self.port = name, names, clients, servers, port
        self.spec = BlockSpec(spec.fields, 0, spec.rows)
        self.inputs, self.outputs, self.state = spec.inputs, spec.outputs, spec.state

    def client(self, index: int, slab: Slab, incarnation: int) -> TcpClient:
        """See :class:`~srl.streams.protocols.InferenceStream`."""
        return TcpClient(self, index, slab, incarnation)

    def server(self, index: int) -> TcpServer:
        """See :class:`~srl.streams.protocols.InferenceStream`."""
        return TcpServer(self, index)

    def answer(self, kind: int) -> tuple[str, ...]:
        """The fields of the reply to a request of this kind."""
        return (*self.outputs, *self.state) if kind == KEEP else self.outputs

    def shapes(self, names: tuple[str, ...]) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of the payload frames for these fields."""
        rows = self.spec.rows
        return [((rows, *self.spec.fields[name].shape), self.spec.fields[name].dtype) for name in names]

    def largest(self, names: tuple[str, ...]) -> int:
        """Bytes of the largest payload frame for these fields."""
        return max(self.spec.fields[name].nbytes for name in names) * self.spec.rows


class TcpClient:
    """The end of one client slot."""

    def __init__(self, stream: TcpInference, index: int, slab: Slab, incarnation: int) -> None:
        self.stream, self.index, self.slab, self.incarnation = stream, index, slab, incarnation
        name = f"{stream.name}/{index % stream.servers}"
        self._link = ServerLink(stream.names, name, stream.largest((*stream.outputs, *stream.state)))
        self._asked = self._answered = 0
        self._step = self._version = self._mark = 0

    def submit(self, step: int, version: int) -> None:
        """See :class:`~srl.streams.protocols.InferenceClient`."""
        self._asked += 1
        self._step, self._version, self._mark = step, version, int(mark(self.slab.spec, step))
        self._ask()

    def ready(self) -> bool:
        """See :class:`~srl.streams.protocols.InferenceClient`."""
        for header, frames in self._link.receive():
            if header.kind == "reply" and header.sequence == self._asked > self._answered:
                names = self.stream.answer(self._mark)
                try:
                    arrays = payload(frames, self.stream.shapes(names))
                except DecodeError:
                    self._link.rejected += 1
                    continue
                outputs = dict(zip(names, arrays, strict=True))
                write_step(self.slab, self._step, self._mark, outputs, header.version)
                self._answered = self._asked
        if self._answered < self._asked and self._link.silent():
            self._ask()
        return self._answered == self._asked

    def waiting(self) -> bool:
        """See :class:`~srl.streams.protocols.InferenceClient`."""
        return self._answered < self._asked

    def ended(self, rows: Array, returns: Array) -> None:
        """See :class:`~srl.streams.protocols.InferenceClient`."""

    def pollable(self) -> Any:
        """See :class:`~srl.streams.protocols.InferenceClient`."""
        return self._link.socket

    def close(self) -> None:
        """See :class:`~srl.streams.protocols.InferenceClient`."""
        self._link.close()

    def _ask(self) -> None:
        header = Header("request", self.index, self.incarnation, self._asked, self._mark, self._version)
        self._link.send(header, [self.slab.steps[name][self._step] for name in self.stream.inputs])


class TcpServer:
    """The end of one policy worker."""

    def __init__(self, stream: TcpInference, index: int) -> None:
        self.stream = stream
        self.slab = Slab(stream.spec, stream.clients, shared=False)
        port, name = stream.port + index if stream.port else 0, f"{stream.name}/{index}"
        self._stream = stream_id(name)
        self._socket = listen(stream.names, name, port, stream.largest(stream.inputs))
        self._shapes = stream.shapes(stream.inputs)
        self._identities: list[bytes] = [b""] * stream.clients
        self._incarnation = np.full(stream.clients, -1)
        self._asked = np.zeros(stream.clients, np.int64)
        self._answered = np.zeros(stream.clients, np.int64)
        self._version = np.zeros(stream.clients, np.int64)
        self._marks = np.zeros(stream.clients, np.int64)
        self.rejected = 0

    def take(self) -> Requests | None:
        """See :class:`~srl.streams.protocols.InferenceServer`."""
        for frames in receive(self._socket):
            try:
                self._handle(bytes(frames[0]), *decode(frames[1:], self._stream))
            except DecodeError:
                self.rejected += 1
        clients = np.flatnonzero(self._asked != self._answered)
        if not len(clients):
            return None
        obs = {name: read_rows(self.slab.steps[name], clients) for name in self.stream.inputs}
        marks, version = self._marks[clients], int(self._version[clients].max())
        return Requests(clients, self._asked[clients], clients, marks, version, obs)

    def reply(self, requests: Requests, outputs: Arrays, version: int) -> None:
        """See :class:`~srl.streams.protocols.InferenceServer`."""
        write_rows(self.slab, requests.steps, outputs, version)
        self._answered[requests.clients] = requests.sequences
        for client in requests.clients.tolist():
            self._answer(client)

    def pollable(self) -> Any:
        """See :class:`~srl.streams.protocols.InferenceServer`."""
        return self._socket

    def close(self) -> None:
        """See :class:`~srl.streams.protocols.InferenceServer`."""
        self._socket.close()

    def _handle(self, identity: bytes, header: Header, frames: Any) -> None:
        client = header.sender
        known = header.kind == "request" and header.number in (PLAIN, KEEP, PEEK)
        if not known or not 0 <= client < self.stream.clients:
            raise DecodeError(f"{header.kind!r} from client {client}")
        arrays = payload(frames, self._shapes)  # before anything changes
        if header.incarnation < self._incarnation[client]:
            return
        if header.incarnation > self._incarnation[client]:
            self._incarnation[client] = header.incarnation
            self._asked[client] = self._answered[client] = 0
        self._identities[client] = identity
        if header.sequence > self._asked[client]:
            for name, array in zip(self.stream.inputs, arrays, strict=True):
                self.slab.steps[name][client] = array
            self._asked[client], self._version[client] = header.sequence, header.version
            self._marks[client] = header.number
        elif header.sequence == self._answered[client]:
            self._answer(client)

    def _answer(self, client: int) -> None:
        version = int(self.slab.steps["version"][client].flat[0])
        header = Header("reply", client, sequence=int(self._answered[client]), version=version)
        arrays = [self.slab.steps[name][client] for name in self.stream.answer(int(self._marks[client]))]
        try:
            self._socket.send_multipart([self._identities[client], *encode(header, arrays, self._stream)], zmq.NOBLOCK)
        except zmq.ZMQError:  # it is away, or its queue is full: it will ask again
            return
