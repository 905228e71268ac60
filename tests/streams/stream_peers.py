"""What the stream tests share: known contents for blocks, ends of streams that live in other processes, ways to die.

Nothing here imports pytest, so that the other processes start fast.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time

import numpy as np

from srl.core.slab import STEP_FIELDS, BlockSpec, Slab
from srl.core.specs import ArraySpec
from srl.streams import sockets
from srl.streams.wait import wait

SILENCE = 0.1
"""Clients look for a server that does not answer this often, instead of once a second."""

TRANSPORTS = ["inline", "shm", "tcp", "tcp with keys"]
SPEC = BlockSpec(
    {
        "obs/camera/left": ArraySpec((6, 5, 3), "|u1"),
        "obs/position": ArraySpec((3,), "<f4"),
        "obs/mask": ArraySpec((4,), "|b1"),
        "obs/clock": ArraySpec((), "<i8"),
        "action": ArraySpec((), "<i8"),
        "action/throttle": ArraySpec((2,), "<f4"),
        "memory": ArraySpec((7,), "<f2"),
        "explored": ArraySpec((), "|b1"),
        **STEP_FIELDS,
    },
    horizon=3,
    rows=2,
)


def eventually(condition, seconds=5.0):
    """What ``condition`` returns as soon as that is true; fails if it never is."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)
    return found


def never(condition, seconds=0.1):
    """Whether ``condition`` stays false for a while."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return False
        time.sleep(0.001)
    return True


def contents(spec, number):
    """The fields of the block number ``number``: random, but always the same."""
    rng = np.random.default_rng(number)
    found = {}
    for name, field in spec.fields.items():
        shape, kind = (spec.horizon + 1, spec.rows, *field.shape), np.dtype(field.dtype).kind
        value = rng.standard_normal(shape) if kind == "f" else rng.integers(0, 2 if kind == "b" else 256, shape)
        found[name] = value.astype(field.dtype)
    found["action"][...] = number
    return found


def write(slab, block, number):
    """Fill a block with known contents."""
    for name, value in contents(slab.spec, number).items():
        slab.arrays[name][block] = value


def number_of(slab, block):
    """Which known contents a block has; fails if a single element differs."""
    number = int(slab.arrays["action"][block].flat[0])
    for name, value in contents(slab.spec, number).items():
        np.testing.assert_array_equal(slab.arrays[name][block], value, err_msg=f"{name} of block {number}")
    return number


class End:
    """An end of a stream, with what the tests do to it. May be held by a :class:`Peer`."""

    end = None

    def __getattr__(self, name):
        return getattr(self.end, name)

    def wait(self, timeout):
        """How long it slept, and whether it was woken."""
        begin = time.monotonic()
        woken = wait([self.end.pollable()], timeout)
        return time.monotonic() - begin, woken


class Producer(End):
    def __init__(self, stream, index=0, incarnation=1):
        self.end = stream.producer(index, incarnation)
        assert self.end.acquire() is None, "a block was granted to somebody not there yet"

    def fill(self, block, number):
        write(self.end.slab, block, number)

    def half_fill(self, block):
        """Scribble, as one who will not live to finish."""
        for field in self.end.slab.block(block).values():
            field[:2] = 77

    def produce(self, number):
        """Fill one block, if one is granted."""
        grant = self.end.acquire()
        if grant is not None:
            self.fill(grant.block, number)
            self.end.commit(grant.block)
        return grant

    def produce_all(self, numbers, seconds=5.0):
        """Fill one block for every number."""
        deadline = time.monotonic() + seconds
        for number in numbers:
            while self.produce(number) is None:
                assert time.monotonic() < deadline, "no block was granted in time"
                wait([self.end.pollable()], 0.02)

    def commit_and_close(self, blocks):
        for block in blocks:
            self.end.commit(block)
        self.end.close()


class Consumer(End):
    def __init__(self, stream):
        self.end = stream.consumer()

    def next(self):
        """The next full block as (what it is called, number of its contents), held."""
        taken = self.end.take(1)
        if taken is None:
            return None
        return taken[0], number_of(self.end.slab, taken[0].block)

    def drain(self):
        """All full blocks, released again."""
        found = []
        while (full := self.next()) is not None:
            self.end.release([full[0]])
            found.append(full)
        return found


class Client(End):
    def __init__(self, stream, index=0, incarnation=1, blocks=4):
        self.slab = getattr(stream, "slab", None) or Slab(SPEC, blocks, shared=False)
        self.end = stream.client(index, self.slab, incarnation)

    def ask(self, step, number, version=0):
        """Ask for actions for the (known) observations of the first step of block ``number``."""
        for name in SPEC.observations:
            self.slab.steps[name][step] = contents(SPEC, number)[name][0]
        self.end.submit(step, version)

    def scribble(self, step, value):
        for name in (*SPEC.outputs, "version"):
            self.slab.steps[name][step] = value

    def outputs(self, step):
        return {name: self.slab.steps[name][step].copy() for name in (*SPEC.outputs, "version")}


class Server(End):
    def __init__(self, stream, index=0):
        self.end = stream.server(index)

    def serve(self, version=0):
        """Answer everything pending; the number of requests, or None."""
        requests = self.end.take()
        if requests is None:
            return None
        self.end.reply(requests, answer(requests.obs), version)
        return len(requests.clients)


def answer(obs):
    """What the policy of these tests makes of observations: every element follows from the row's clock."""
    clock = obs["obs/clock"]
    found = {}
    for name in SPEC.outputs:
        field = SPEC.fields[name]
        value = (clock + len(name)).reshape(-1, *[1] * len(field.shape))
        found[name] = np.broadcast_to(value % 2 if field.dtype == "|b1" else value, (len(clock), *field.shape)).astype(
            field.dtype
        )
    return found


def answer_to(number):
    """What :func:`answer` makes of the observations that :meth:`Client.ask` writes for ``number``."""
    first = contents(SPEC, number)
    return answer({name: first[name][0] for name in SPEC.observations})


WEIGHTS = {
    "layer/weight": ((8, 5), "<f4"),
    "layer/bias": ((8,), "<f4"),
    "half": ((3,), "<f2"),
    "steps": ((), "<i8"),
    "mask": ((5,), "|b1"),
    "bytes": ((2, 3), "|u1"),
    "empty": ((0, 4), "<f4"),
}


def weights(number, shapes=WEIGHTS):
    """Parameters that are all ``number``."""
    return {
        name: np.full(shape, number % (2 if dtype == "|b1" else 100), dtype) for name, (shape, dtype) in shapes.items()
    }


class Writer(End):
    def __init__(self, stream, shapes=WEIGHTS):
        self.end, self.shapes = stream.writer(), shapes

    def put(self, version):
        self.end.publish(weights(version, self.shapes), version)

    def put_many(self, versions):
        for version in versions:
            self.put(version)

    def put_for_ever(self):
        while True:
            self.put(self.end.version + 1)


class Reader(End):
    def __init__(self, stream, shapes=WEIGHTS):
        self.end, self.shapes = stream.reader(), shapes

    def get(self):
        """The version read; fails unless all parameters are those of one version, the one that read() names."""
        like, seen, loads = weights(0, self.shapes), {}, 0

        def load(arrays):
            nonlocal loads
            loads += 1
            assert loads < 10_000, "read() does not come to an end"
            seen.update({name: array.copy() for name, array in arrays.items()})

        version = self.end.read(like, load)
        for name, value in weights(version, self.shapes).items():
            np.testing.assert_array_equal(seen[name], value, err_msg=f"{name} of version {version}", strict=True)
        return version


class Holder:
    """Does things to memory, in another process."""

    def __init__(self, thing):
        self.thing = thing

    def read(self, offset, count):
        return self.thing.array(offset, (count,), "<i8").tolist()

    def write(self, offset, values):
        self.thing.array(offset, (len(values),), "<i8")[:] = values

    def grow(self, nbytes):
        self.thing.resize(nbytes)

    def ring(self, count=1):
        for _ in range(count):
            self.thing.ring()

    def rung(self, timeout):
        return self.thing.wait(timeout)

    def block(self, index):
        return number_of(self.thing, index)

    def fill(self, index, number):
        write(self.thing, index, number)

    def waited(self, timeout):
        begin = time.monotonic()
        return wait([self.thing], timeout), time.monotonic() - begin


def hold(pipe):
    """The life of a peer: make what it is told to make, then call its methods."""
    sockets.SILENCE = SILENCE
    held = None
    while True:
        try:
            call, name, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if name == "hold":
                held = None  # first let go of what was held
                make, *arguments = arguments
                held = make(*arguments) if make else None
                pipe.send((call, None, None))
            else:
                pipe.send((call, getattr(held, name)(*arguments), None))
        except Exception as error:
            pipe.send((call, None, error))


class Peer:
    """Another process. It holds one end of a stream and does with it what it is told."""

    context = multiprocessing.get_context("forkserver")

    def __init__(self):
        self.context.set_forkserver_preload(["__main__", "stream_peers", "srl.streams.tcp_samples"])
        self.pipe, theirs = self.context.Pipe()
        self.process = self.context.Process(target=hold, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.calls = 0

    def hold(self, make, *arguments):
        self.call("hold", make, *arguments)
        return self

    def tell(self, name, *arguments):
        """Have a method called; the answer comes later."""
        self.calls += 1
        self.pipe.send((self.calls, name, arguments))

    def hear(self, seconds=5.0):
        """The answer to the last call; answers nobody waited for are dropped."""
        call = 0
        while call != self.calls:
            assert self.pipe.poll(seconds), "the peer hangs"
            call, found, error = self.pipe.recv()
        if error is not None:
            raise error
        return found

    def call(self, name, *arguments):
        self.tell(name, *arguments)
        return self.hear()

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments: self.call(name, *arguments)

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.end()

    def end(self):
        self.pipe.close()
        self.process.join(5)
        self.process.close()


class Killed(BaseException):
    """Death at some instruction. No ``except Exception`` outlives it."""


def die():
    raise Killed


def interrupted(instruction, module, function, action):
    """Call ``function``, with ``action`` before the n-th bytecode it runs in ``module``; False if it returned before.

    Another process can do something, and this one can be killed, between any two writes to shared memory.
    """
    left = instruction

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == -1:
                action()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    with contextlib.suppress(Killed):
        try:
            function()
        finally:
            sys.settrace(before)
    return left < 0


def every_moment(module, scenario):
    """Run ``scenario(interrupt)`` once for every instruction in ``module`` that its one call can be interrupted at.

    The call is ``interrupt(function, action)``.
    """
    instruction, more = 0, True
    while more:
        more = None

        def interrupt(function, action=die, instruction=instruction):
            nonlocal more
            more = interrupted(instruction, module, function, action)

        scenario(interrupt)
        instruction += 1
    assert instruction > 5, "nothing was interrupted"
