"""The policy worker: serves everything that is pending as one batch, and reloads weights between batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from srl.algorithms.base import Algorithm
from srl.core.seeding import derive
from srl.core.slab import PEEK, Slab
from srl.core.specs import Arrays, Spaces
from srl.core.worker import Progress, State, Worker
from srl.streams.inference import LocalInference
from srl.streams.protocols import InferenceServer, InferenceStream, ParameterReader, ParameterStream
from srl.streams.wait import wait


class PolicyWorker(Worker):
    """Hosts one copy of a policy behind an inference stream."""

    kind = "policy"
    prompt = True

    def __init__(
        self,
        name: str,
        index: int,
        algorithm: Algorithm,
        spaces: Spaces,
        inference: InferenceStream,
        parameters: ParameterStream,
        seed: int,
        threads: int,
        clients: int,
        rows: int,
    ) -> None:
        super().__init__(name)
        self.clients, self.rows = clients, rows
        self.index, self.algorithm, self.spaces, self.seed, self.threads = index, algorithm, spaces, seed, threads
        self.inference, self.parameters = inference, parameters
        self.server: InferenceServer
        self.reader: ParameterReader

    def start(self) -> None:
        """See :class:`Worker`."""
        import torch

        from srl.policies.host import PolicyHost

        torch.set_num_threads(self.threads)
        seed = derive(self.seed, self.name)
        self.host = PolicyHost(self.algorithm, self.spaces, seed, clients=self.clients, rows=self.rows)
        self.server = self.inference.server(self.index)
        self.reader = self.parameters.reader()

    def poll(self, timeout: float) -> Progress:
        """See :class:`Worker`."""
        requests = self.server.take()
        if requests is None or self.reader.newest() < requests.version:
            if timeout > 0:
                with self.metrics.wait("requests"):
                    pollables = [self.server.pollable()] if requests is None else [self.reader.pollable()]
                    wait(pollables, timeout if requests is None else min(timeout, 0.005))
            return Progress()
        self.host.refresh(self.reader)
        outputs = self.host.act(requests.obs, requests.clients, requests.marks == PEEK)
        self.server.reply(requests, outputs, self.host.version)
        rows = len(next(iter(outputs.values())))
        self.metrics.add("rows", rows)
        self.metrics.add("batches")
        return Progress(rows)

    def close(self) -> None:
        """See :class:`Worker`."""
        self.server.close()
        self.reader.close()

    def state(self) -> State:
        """See :class:`Worker`."""
        return self.host.state()

    def load_state(self, state: State) -> None:
        """See :class:`Worker`."""
        self.host.load_state(state)


class InlineInference:
    """The inference stream without a policy worker: the actor that opens it hosts the policy itself."""

    def __init__(
        self,
        algorithm: Algorithm,
        spaces: Spaces,
        parameters: ParameterStream,
        seed: int,
        threads: int,
        clients: int,
        rows: int,
    ) -> None:
        self.algorithm, self.spaces, self.parameters = algorithm, spaces, parameters
        self.seed, self.threads, self.clients, self.rows = seed, threads, clients, rows
        self._host: Any = None

    def client(self, index: int, slab: Slab, incarnation: int) -> LocalInference:
        """See :class:`~srl.streams.protocols.InferenceStream`."""
        if self._host is None:
            import torch

            from srl.policies.host import PolicyHost

            torch.set_num_threads(self.threads)
            seed = derive(self.seed, incarnation)
            self._host = PolicyHost(self.algorithm, self.spaces, seed, clients=self.clients, rows=self.rows)
            self._reader = self.parameters.reader()
        host, reader, me = self._host, self._reader, np.array([index])
        peeks = np.array([False]), np.array([True])

        def act(inputs: Arrays, kind: int, version: int) -> tuple[Arrays, int] | None:
            host.refresh(reader)
            return None if host.version < version else (host.act(inputs, me, peeks[kind == PEEK]), host.version)

        return LocalInference(slab, act, reader.pollable)

    def server(self, index: int) -> InferenceServer:
        """There is none."""
        raise RuntimeError("inline inference has no policy worker")

    def state(self) -> State:
        """The state of the hosted policy."""
        found: State = self._host.state()
        return found

    def load_state(self, state: State) -> None:
        """Go on where ``state`` was taken."""
        self._host.load_state(state)
