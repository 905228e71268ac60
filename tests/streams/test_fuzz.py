"""The decoder of frames under fire: whatever comes, it says DecodeError or gives a header, at once, in little room."""

from __future__ import annotations

import random
import resource
import time

import numpy as np
import pytest

from srl.core.errors import DecodeError
from srl.core.slab import BlockSpec, Slab
from srl.core.specs import ArraySpec
from srl.streams.cargo import Cargo, codec, pack
from srl.streams.frames import KINDS, MAGIC, Header, decode, encode, payload, stream_id

STREAM = stream_id("samples")
SHAPES = [((3, 2), "<f4"), ((4,), "|u1"), ((), "<i8")]
INPUTS = 1_000_000
LIMIT = 2**62


def messages(rng):
    """Messages without end: noise, damaged messages, and headers that promise more than there is."""
    kinds = sorted(KINDS)
    whole = [encode(Header(kind, 1, 2, 3, 4, 5), stream=STREAM)[0] for kind in kinds]
    numbers = (-1, 0, 1, 2**31, LIMIT, LIMIT + 1, 2**63 - 1, -(2**63), 2**64 - 1)
    promise = [b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
    while True:
        way = rng.randrange(6)
        if way == 0:
            yield [rng.randbytes(rng.randrange(160))]
        elif way == 1:
            yield [MAGIC + STREAM + rng.randbytes(rng.randrange(40))]
        elif way == 2:
            damaged = bytearray(rng.choice(whole))
            for _ in range(rng.randrange(1, 4)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            yield [bytes(damaged), rng.randbytes(rng.choice((0, 1, 8, 24)))]
        elif way == 3:
            yield [rng.choice(whole)[: rng.randrange(30)]]
        elif way == 4:
            yield [MAGIC + STREAM + rng.choice(promise) + rng.randbytes(rng.randrange(20))]
        else:
            size = rng.choice(numbers).to_bytes(9, "big", signed=True)[1:]
            yield [rng.choice(whole)[:-1] + rng.choice((b"\xcf", b"\xd3")) + size, b"", b"\x00" * 4, b"\x00" * 8]


@pytest.mark.timeout(180)
def test_a_million_messages_are_refused_or_understood():
    refused = understood = 0
    longest = 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _, frames in zip(range(INPUTS), messages(random.Random(20240507)), strict=False):
        begin = time.thread_time()
        try:
            header, rest = decode(frames, STREAM)
            understood += 1
            assert header.kind in KINDS
            assert all(-1 <= number <= LIMIT for number in (header.sender, header.sequence, header.number))
            payload(rest, SHAPES)
        except DecodeError:
            refused += 1
        longest = max(longest, time.thread_time() - begin)
    assert refused > INPUTS * 0.9 and understood > 1000
    assert longest < 0.1, "a message kept the decoder busy"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "kB more than before"


COMPRESSED = 300_000
FIELDS = {"obs": ArraySpec((64, 1024), "|u1"), "action": ArraySpec((), "<i8"), "reward": ArraySpec((), "<f4")}


def damaged(rng, packed):
    """Compressed frames without end that are not what they should be: cut, changed, longer, noise, and bombs."""
    # One literal, then a copy of it of as many bytes as wanted: 255 for each byte, so 4 MB for every 16 kB.
    bomb = bytes([0x1F, 0x00, 0x01, 0x00]) + b"\xff" * 16_000 + b"\x00"
    while True:
        way = rng.randrange(6)
        if way == 0:
            yield packed[: rng.randrange(len(packed))]
        elif way in (1, 2):
            changed = bytearray(packed)
            for _ in range(rng.randrange(1, 4)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            yield bytes(changed)
        elif way == 3:
            yield packed + rng.randbytes(rng.randrange(1, 9))
        elif way == 4:
            yield rng.randbytes(rng.randrange(200))
        else:
            yield bomb[: rng.randrange(5, len(bomb))] + rng.randbytes(rng.randrange(3))


@pytest.mark.skipif(codec() is None, reason="needs the package lz4")
def test_compressed_frames_become_exactly_the_bytes_there_must_be_or_are_refused():
    """What is changed but still of the right length cannot be told from what is not; it never gets beyond its frame."""
    cargo = Cargo(Slab(BlockSpec(FIELDS, 0, 1), 1, shared=False))
    small, large = (bytes(size) for size in cargo.sizes)
    shown = np.random.default_rng(0).integers(0, 4, len(large), np.uint8)
    assert np.array_equal(cargo.check([small, pack(shown)], 0b10)[1], shown)
    for frames, packed in (([small, large + b"0"], 0b10), ([small, pack(shown)], 0b110), ([small, pack(shown)], 0)):
        with pytest.raises(DecodeError):
            cargo.check(frames, packed)
    pieces = np.zeros(len(large), np.uint8)
    pieces[:: 1 << 12] = 1
    refused = understood = 0
    longest = 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _, frame in zip(range(COMPRESSED), damaged(random.Random(7), pack(pieces)), strict=False):
        begin = time.thread_time()
        try:
            [_, found] = cargo.check([small, frame], 0b10)
            understood += 1
            assert found.nbytes == len(large)
        except DecodeError:
            refused += 1
        longest = max(longest, time.thread_time() - begin)
    assert refused > COMPRESSED * 0.5 and understood > 100
    assert longest < 0.1, "a frame kept the decoder busy"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "kB more than before"
