"""The two ends of a sample stream on two hosts, each a process: ``python -m srl.bench.load_link END ORDER``.

What is sent are blocks of real Pong frames. The consumer prints what came, second by second, as lines of JSON; whoever
started the two reads that.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from srl import envs
from srl.core.errors import StreamClosed
from srl.core.slab import STEP_FIELDS, BlockSpec
from srl.core.specs import Array, ArraySpec
from srl.envs.base import Observed, StepViews
from srl.services.names import FileNames
from srl.services.network import Keys, Network
from srl.streams.cargo import Mode
from srl.streams.tcp_samples import TcpProducer, TcpSamples
from srl.streams.wait import wait

_BLOCKS, _STEPS, _COPIES = 4, 16, 8
_POLL = 0.1


class Order(msgspec.Struct):
    """What the two are to do."""

    folder: str
    """Where names are kept, and keys."""
    address: str
    """Of the end that is started."""
    seconds: float
    packing: Mode


def spec() -> BlockSpec:
    """Blocks of 3.8 MB: 16 steps of 8 copies of Pong."""
    scalars = {"action": "<i8", "log_prob": "<f4", "value": "<f4"}
    fields = {"obs": ArraySpec((4, 84, 84), "|u1"), **{name: ArraySpec((), dtype) for name, dtype in scalars.items()}}
    return BlockSpec({**fields, **STEP_FIELDS}, _STEPS, _COPIES)


def frames(count: int) -> list[Array]:
    """What Pong shows to someone who acts at random, as observations of ``count`` blocks."""
    env = envs.gym("ALE/Pong-v5").make(_COPIES)
    env.bind([env.agents])
    shape = spec().layout(count).places["obs"][1]
    seen = np.zeros((count * shape[1], *shape[2:]), np.uint8)
    flags: dict[str, Array] = {name: np.zeros(_COPIES, bool) for name in ("first", "acts", "terminated", "truncated")}
    env.reset(1, [Observed({"obs": seen[0]}, flags["first"], flags["acts"])])
    choice = np.random.default_rng(0)
    for after in seen[1:]:
        views = Observed({"obs": after}, flags["first"], flags["acts"])
        ends = np.zeros(_COPIES, np.float32), flags["terminated"], flags["truncated"], np.ones(_COPIES, bool)
        env.step([{"action": choice.integers(0, 6, _COPIES)}], [StepViews(views, *ends)])
    env.close()
    return list(seen.reshape(shape))


def produce(stream: TcpSamples, seconds: float) -> None:
    """Send blocks for so long, or until nobody wants any."""
    shown = frames(4)
    end: TcpProducer = stream.producer(0, 1)
    number, until = 0, time.monotonic() + seconds
    noise = np.random.default_rng(1)
    with contextlib.suppress(StreamClosed):
        while time.monotonic() < until:
            grant = end.acquire()
            if grant is None:
                wait([end.pollable()], _POLL)
                continue
            block = end.slab.block(grant.block)
            block["obs"][...] = shown[number % len(shown)]
            for name in ("log_prob", "value", "reward"):
                block[name][...] = noise.normal(size=block[name].shape)
            block["version"][...] = number
            end.commit(grant.block)
            number += 1
    _tell(sent=number, link=end.packing.link, used=end.packing.used)
    end.close()


def consume(stream: TcpSamples, seconds: float) -> None:
    """Take what comes, and look at it."""
    shown = frames(4)
    end = stream.consumer()
    came, wrong, begin = 0, 0, time.monotonic()
    told, first = begin, 0.0
    while time.monotonic() < begin + seconds:
        end.grant(_BLOCKS, 0)
        taken = end.take(1)
        if taken is None:
            wait([end.pollable()], _POLL)
        else:
            first = first or time.monotonic()
            block = end.slab.block(taken[0].block)
            number = int(block["version"][0, 0])
            wrong += not np.array_equal(block["obs"], shown[number % len(shown)])
            came += 1
            end.release(taken)
        if time.monotonic() - told >= 1:
            told += 1
            _tell(time=time.monotonic() - begin, blocks=came, wrong=wrong)
    end.close()


def _tell(**found: Any) -> None:
    print(msgspec.json.encode(found).decode(), flush=True)


def main() -> None:
    """Be one of the ends."""
    which, order = sys.argv[1], msgspec.json.decode(sys.argv[2], type=Order)
    folder = Path(order.folder)
    names = FileNames(folder / "names", Network(order.address, Keys.load(folder / "keys")))
    stream = TcpSamples("samples", names, spec(), _BLOCKS, 1, packing=order.packing)
    (consume if which == "consumer" else produce)(stream, order.seconds)


if __name__ == "__main__":
    main()
