"""Several trainers of one policy: a group that trains in step and sums its gradients with ``torch.distributed``.

Every trainer has a rank and a share of the samples of its own. The first one publishes and saves. Before an update all
say that they have a batch, so nobody stands in a collective call for longer than an update takes; in the update
gradients are summed, so weights stay the same everywhere.

A group is formed by names alone. Every member says a word of its own, new for every attempt, and a digest of the words
it has heard; once all digests are the same the words are a group, and its members connect through a file in the run's
folder. A member that dies breaks the connections of all, who then take new words. Who has trained most gives its state
to the others, so nothing that was published is lost.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from srl.core.specs import Arrays
from srl.services.names import Names

if TYPE_CHECKING:
    from torch import Tensor

_UPDATE = timedelta(seconds=60)
"""How long the others may take within an update. Longer than a network may be cut."""
_BATCH = timedelta(days=7)
"""How long the others may wait for samples."""
_CONNECTING = timedelta(seconds=10)
_LOOK = 0.5
"""Seconds between two looks at the words of the others."""
_ADDRESS_OF_INTERFACE = 0x8915


class PeersLost(Exception):
    """A member of the group is gone."""


class Group:
    """One trainer's view of the group it is in."""

    def __init__(self, name: str, rank: int, size: int, names: Names, folder: Path) -> None:
        """``folder`` is one that all members see."""
        self.name, self.rank, self.size, self.names, self.folder = name, rank, size, names, folder
        self.formed = False
        self._word = ""
        self._words: list[str] = []
        self._attempts = 0
        self._looked = 0.0
        self._asked: Any = None
        self._said = ("", 0.0)

    def join(self, incarnation: int, backend: str) -> None:
        """Begin to look for the others."""
        self._life, self._backend = f"{incarnation}-{os.getpid()}", backend
        card = _interface(self.names.network.address)
        os.environ.update(GLOO_SOCKET_IFNAME=card, NCCL_SOCKET_IFNAME=card)
        self.leave()

    def leave(self) -> None:
        """Leave the group that there was, and look for a new one."""
        import torch.distributed as dist

        self._asked, self.formed = None, False
        if dist.is_initialized():
            dist.destroy_process_group()
        self._attempts += 1
        self._word = f"{self._life}-{self._attempts}"
        self._say("")

    def form(self, timeout: float) -> bool:
        """Wait for up to ``timeout`` seconds for the group to form; whether it has."""
        deadline = time.monotonic() + timeout
        while not self.formed:
            heard = [self._hear(rank) for rank in range(self.size)]
            words = [word for word, _ in heard]
            digest = hashlib.sha256(" ".join(words).encode()).hexdigest()[:16] if all(words) else ""
            self._say(digest)
            if digest and all(seen == digest for _, seen in heard):
                self._connect(digest, words)
            elif time.monotonic() >= deadline:
                return False
            else:
                time.sleep(0.02)
        return True

    def _connect(self, digest: str, words: list[str]) -> None:
        import torch.distributed as dist

        self.folder.mkdir(parents=True, exist_ok=True)
        path = str(self.folder / f"{self.name.replace('/', '_')}-{digest}")
        store = dist.FileStore(path, self.size)  # type: ignore[attr-defined]
        store.set_timeout(_CONNECTING)
        given: dict[str, Any] = {"store": store, "rank": self.rank, "world_size": self.size, "timeout": _UPDATE}
        try:
            dist.init_process_group(self._backend, **given)
        except RuntimeError:  # somebody died meanwhile
            self.leave()
            return
        self.formed, self._words = True, words

    def ready(self, amount: int, timeout: float) -> int | None:
        """Say that this trainer has a batch of ``amount`` steps; the steps of all once everybody has one.

        None: not everybody has after ``timeout`` seconds; call again.
        """
        import torch
        import torch.distributed as dist

        if self._asked is None:
            total = torch.tensor([amount])
            options = dist.AllreduceOptions()
            options.timeout = _BATCH
            world: Any = dist.group.WORLD
            self._asked = total, self._try(lambda: world.allreduce([total], options))
        total, answer = self._asked
        deadline = time.monotonic() + timeout
        while not answer.is_completed():
            if time.monotonic() >= deadline:
                self._look()
                return None
            time.sleep(0.001)  # torch has nothing to wait on that does not end the group when time is up
        self._asked = None
        self._try(answer.wait)
        return int(total)

    def _look(self) -> None:
        """Notice a member that was replaced although its connection was never closed, as when its host lost power."""
        now = time.monotonic()
        if now - self._looked > _LOOK:
            self._looked = now
            if [self._hear(rank)[0] or word for rank, word in enumerate(self._words)] != self._words:
                raise PeersLost

    def sum(self, *tensors: Tensor) -> None:
        """Add up each of ``tensors`` over all trainers, in place."""
        import torch.distributed as dist

        for tensor in tensors:
            self._try(partial(dist.all_reduce, tensor))

    def gather(self, tensor: Tensor) -> Tensor:
        """What all trainers gave, by rank."""
        import torch
        import torch.distributed as dist

        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._try(lambda: dist.all_gather(found, tensor.contiguous()))
        return torch.stack(found)

    def give(self, arrays: Arrays | None, source: int) -> Arrays:
        """The arrays of trainer ``source``; the others give None."""
        import torch

        listed = b""
        if arrays is not None:
            listed = msgspec.msgpack.encode([(n, a.dtype.str, a.shape) for n, a in arrays.items()])
        length = torch.tensor([len(listed)])
        self._broadcast(length, source)
        text = torch.frombuffer(bytearray(listed or bytes(int(length))), dtype=torch.uint8)
        self._broadcast(text, source)
        found = {}
        for name, dtype, shape in msgspec.msgpack.decode(text.numpy().tobytes()):
            array = np.empty(shape, dtype) if arrays is None else np.ascontiguousarray(arrays[name])
            self._broadcast(torch.from_numpy(array.reshape(-1).view(np.uint8)), source)
            found[name] = array
        return found

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        import torch.distributed as dist

        if tensor.numel():
            self._try(lambda: dist.broadcast(tensor, source))

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:  # torch has no other name for a connection that broke
            raise PeersLost from error

    def _say(self, digest: str) -> None:
        """Say it if it is new, or was said a while ago and may not have been heard."""
        text, now = f"{self._word} {digest}", time.monotonic()
        if text != self._said[0] or now - self._said[1] > _LOOK:
            self._said = text, now
            self.names.add(f"{self.name}/{self.rank}", text)

    def _hear(self, rank: int) -> tuple[str, str]:
        """The word of a member, and the digest of the words it has heard."""
        word, _, digest = (self.names.resolve(f"{self.name}/{rank}") or " ").partition(" ")
        return word, digest

    def close(self) -> None:
        """Leave for good."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def _interface(address: str) -> str:
    """The name of the network card that has this address."""
    if sys.platform != "linux":
        return "lo0"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return "lo"
