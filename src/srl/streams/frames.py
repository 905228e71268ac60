"""What TCP peers send each other: a checked header, then raw array buffers. Never pickle.

A message is several ZeroMQ frames: ``b"SRL1"``, four bytes that name the stream and a small msgpack header, then one
frame per array, in the order of the stream's spec. The header says nothing about shapes or dtypes: both sides know
them, so a peer cannot make the other allocate anything, and a payload either has exactly the expected sizes or is
refused.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from srl.core.errors import DecodeError
from srl.core.specs import Array

MAGIC = b"SRL1"
NO_STREAM = bytes(4)
MAX_HEADER = 128
_OF_STREAMS = {"hello", "credit", "block", "piece", "mark", "close", "request", "reply", "have", "parameters"}
_OF_RUNS_ACROSS_HOSTS = {"name", "where", "number", "count", "report", "order", "exit", "forget"}
KINDS = frozenset(_OF_STREAMS | _OF_RUNS_ACROSS_HOSTS)


Number = Annotated[int, msgspec.Meta(ge=-1, le=2**62)]


class Header(msgspec.Struct, array_like=True, frozen=True):
    """The first frame. What ``sequence`` and ``number`` mean depends on the kind."""

    kind: str
    sender: Number = 0
    incarnation: Number = 0
    sequence: Number = 0
    number: Number = 0
    version: Number = -1


_decode = msgspec.msgpack.Decoder(Header).decode
_encode = msgspec.msgpack.Encoder().encode


def stream_id(name: str) -> bytes:
    """Tells the streams of a run apart: a port may be given to the server of another stream after a restart."""
    return zlib.crc32(name.encode()).to_bytes(4, "little")


def encode(header: Header, arrays: Iterable[Array] = (), stream: bytes = NO_STREAM) -> list[Any]:
    """A message; contiguous arrays are not copied."""
    return [MAGIC + stream + _encode(header), *(_bytes(array) for array in arrays)]


def decode(frames: Sequence[Any], stream: bytes = NO_STREAM) -> tuple[Header, Sequence[Any]]:
    """The header of a message of this stream and its payload frames. Raises DecodeError on anything else."""
    if not frames:
        raise DecodeError("an empty message")
    first = bytes(memoryview(frames[0])[: MAX_HEADER + 1])
    if len(first) > MAX_HEADER or not first.startswith(MAGIC + stream):
        raise DecodeError("a message that does not begin with a header of this stream")
    try:
        header = _decode(first[len(MAGIC + stream) :])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DecodeError(f"a malformed header: {error}") from error
    if header.kind not in KINDS:
        raise DecodeError(f"unknown kind of message {header.kind!r}")
    return header, frames[1:]


def payload(frames: Sequence[Any], shapes: Sequence[tuple[tuple[int, ...], str]]) -> list[Array]:
    """The payload frames as read-only arrays of exactly these (shape, dtype). Raises DecodeError otherwise."""
    if len(frames) != len(shapes):
        raise DecodeError(f"{len(frames)} arrays where {len(shapes)} belong")
    found = []
    for frame, (shape, dtype) in zip(frames, shapes, strict=True):
        view = memoryview(frame)
        expected = math.prod(shape) * np.dtype(dtype).itemsize
        if view.nbytes != expected:
            raise DecodeError(f"an array of {view.nbytes} bytes where {expected} belong")
        found.append(np.frombuffer(view, dtype).reshape(shape))
    return found


def _bytes(array: Array) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
