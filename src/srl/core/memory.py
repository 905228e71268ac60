"""Memory that several processes of one host can map, and doorbells that wake them.

Nothing here has a name in the file system: a segment is an anonymous memory file and a doorbell an anonymous
pipe, both owned by the process that made them (the controller). Another process opens them through
``/proc/<owner>/fd/<n>``, so when the last process is gone, however it died, the kernel has freed everything.
Where ``/proc`` is missing (macOS) a named file and FIFO in a private temporary folder stand in.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import shutil
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from srl.core.errors import ConfigError, SrlError
from srl.core.specs import Array

_ANONYMOUS = sys.platform == "linux"
_TRIM, _MAP = -1, -3
"""What mallopt calls the sizes from which on it gives memory back, and takes it from the kernel for one array."""
_HUGE = 2**22
"""Bytes from which on memory is in large pages, where the kernel has them for it: as numpy does it."""


def keep_freed_memory() -> None:
    """Have this process keep what it frees for what it allocates next.

    Arrays of megabytes, made anew for every minibatch, are otherwise taken from the kernel and given back each time:
    twenty thousand pages a second that it fills with zeros.
    """
    with contextlib.suppress(AttributeError, OSError):  # of glibc only
        library = ctypes.CDLL(None)
        for parameter in (_TRIM, _MAP):
            library.mallopt(parameter, 2**30)


def available_memory() -> int:
    """Bytes that new shared segments may still take on this host."""
    if not _ANONYMOUS:
        return shutil.disk_usage(tempfile.gettempdir()).free
    with open("/proc/meminfo", encoding="ascii") as lines:
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    limit = found["MemAvailable"]
    with contextlib.suppress(OSError, ValueError):  # inside a container the cgroup may allow less
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as top:
            most = int(top.read())
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as now:
            limit = min(limit, most - int(now.read()))
    return limit


class Segment:
    """A zeroed run of bytes, private to this process or mappable by others on the host."""

    def __init__(self, nbytes: int, *, shared: bool) -> None:
        self.nbytes = nbytes
        self.handle = ""
        fd = -1
        if shared:
            fd, self.handle = _create_file(max(nbytes, 1))
        self._map(fd)
        if fd >= 0:
            # The descriptor stays open as long as this object lives: it is what other processes open.
            weakref.finalize(self, _discard, fd, self.handle)

    @classmethod
    def attached(cls, handle: str, nbytes: int) -> Segment:
        """The segment of another process on this host."""
        segment = cls.__new__(cls)
        segment.nbytes, segment.handle = nbytes, handle
        fd = os.open(handle, os.O_RDWR)
        try:
            if os.fstat(fd).st_size < nbytes:
                raise SrlError(f"shared segment {handle} is smaller than the {nbytes} bytes it should hold")
            segment._map(fd)
        finally:
            os.close(fd)
        return segment

    def _map(self, fd: int) -> None:
        private = fd < 0 and hasattr(mmap, "MAP_PRIVATE")
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if private else {}
        try:
            self._mmap = mmap.mmap(fd, max(self.nbytes, 1), **flags)
        except OSError as error:
            raise ConfigError(f"cannot map {self.nbytes / 2**20:.1f} MiB of memory: {error.strerror}") from error
        if self.nbytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                self._mmap.madvise(mmap.MADV_HUGEPAGE)

    def resize(self, nbytes: int) -> None:
        """Grow to ``nbytes``. Views made before stay valid, and see the same bytes if the segment is shared."""
        if nbytes <= self.nbytes:
            return
        self.nbytes = nbytes
        fd = os.open(self.handle, os.O_RDWR) if self.handle else -1
        try:
            if fd >= 0 and os.fstat(fd).st_size < nbytes:
                os.ftruncate(fd, nbytes)
            self._map(fd)
        finally:
            if fd >= 0:
                os.close(fd)

    def array(self, offset: int, shape: tuple[int, ...], dtype: str) -> Array:
        """A view of the bytes from ``offset`` on."""
        return np.ndarray(shape, dtype, buffer=self._mmap, offset=offset)

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.handle:
            raise SrlError("private memory cannot be sent to another process")
        return Segment.attached, (self.handle, self.nbytes)


def _create_file(nbytes: int) -> tuple[int, str]:
    if _ANONYMOUS:
        fd = os.memfd_create("srl", os.MFD_CLOEXEC)
        handle = f"/proc/{os.getpid()}/fd/{fd}"
    else:
        fd, handle = tempfile.mkstemp(prefix="srl-segment-")
    os.ftruncate(fd, nbytes)
    return fd, handle


def _discard(fd: int, handle: str) -> None:
    os.close(fd)
    if not _ANONYMOUS:
        with contextlib.suppress(OSError):
            Path(handle).unlink()


class Doorbell:
    """Wakes whoever waits on it. Rings while nobody waits are remembered as one ring.

    Another process opens the end it uses when it first uses it: each of many workers is handed the bells of all.
    """

    def __init__(self) -> None:
        if _ANONYMOUS:
            self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self.handle = f"/proc/{os.getpid()}/fd/{self._read}"
        else:
            self.handle = str(Path(tempfile.mkdtemp(prefix="srl-bell-")) / "bell")
            os.mkfifo(self.handle, 0o600)
            self._read = os.open(self.handle, os.O_RDONLY | os.O_NONBLOCK)
            self._write = os.open(self.handle, os.O_WRONLY | os.O_NONBLOCK)
        weakref.finalize(self, _discard, self._read, self.handle)
        weakref.finalize(self, os.close, self._write)

    def _open(self, way: int) -> int:
        fd = os.open(self.handle, way | os.O_NONBLOCK | os.O_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        return fd

    def fileno(self) -> int:
        """A descriptor that is readable after a ring."""
        if self._read < 0:
            self._read = self._open(os.O_RDONLY)
        return self._read

    def ring(self) -> None:
        """Wake the waiter."""
        try:
            if self._write < 0:
                self._write = self._open(os.O_WRONLY)
            os.write(self._write, b"!")
        except (BlockingIOError, FileNotFoundError):
            pass  # The pipe is full: there are rings enough. It is not there: its owner is gone, and with it the run.

    def clear(self) -> None:
        """Forget all rings so far. Call before looking at what the rings announce, not after."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fileno(), 1 << 16)  # all that a pipe holds

    def wait(self, timeout: float) -> bool:
        """Wait until rung or until ``timeout`` seconds have passed; True if rung."""
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        return bool(poller.poll(timeout * 1000))

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach_doorbell, (self.handle,)


def _attach_doorbell(handle: str) -> Doorbell:
    bell = Doorbell.__new__(Doorbell)
    bell.handle, bell._read, bell._write = handle, -1, -1
    return bell
