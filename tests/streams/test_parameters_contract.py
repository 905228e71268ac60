"""What a parameter stream promises, over every transport: the newest version, whole, and never an older one again."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from stream_peers import WEIGHTS, Reader, Writer, eventually, every_moment, never, weights

from srl.core.errors import StreamError
from srl.streams import frames as codec
from srl.streams import parameters as parameters_module
from srl.streams.frames import Header
from srl.streams.parameters import Packing, ParameterBoard
from srl.streams.tcp_parameters import TcpParameters

STREAM = codec.stream_id("parameters")


def encode(header, arrays=()):
    return codec.encode(header, arrays, STREAM)


def decode(frames):
    return codec.decode(frames, STREAM)


TCP = pytest.mark.parametrize("transport", ["tcp"], indirect=True)
ACROSS = pytest.mark.parametrize("transport", ["shm", "tcp"], indirect=True)
LARGE = {"weight": ((300, 301), "<f4"), "bias": ((77,), "<f8")}


def has(reader, version):
    """The reader knows of a version now."""
    return eventually(lambda: reader.newest() == version)


# Versions


def test_parameters_arrive_whole(parameters, ends):
    writer, reader = ends.near(Writer, parameters), ends.far(Reader, parameters)
    for version in (0, 1, 2, 3, 10, 1_000_000):
        writer.put(version)
        has(reader, version)
        assert reader.get() == version


def test_a_reader_elsewhere_and_a_writer_elsewhere_are_the_same(parameters, ends):
    writer, reader = ends.far(Writer, parameters), ends.near(Reader, parameters)
    for version in (4, 5, 6):
        writer.put(version)
        has(reader, version)
        assert reader.get() == version


def test_there_is_nothing_to_read_before_the_first_version(parameters, ends):
    writer, reader = ends.near(Writer, parameters), ends.far(Reader, parameters)
    assert writer.version == -1
    assert reader.newest() == -1
    with pytest.raises(StreamError):
        reader.get()
    writer.put(0)
    has(reader, 0)
    assert reader.get() == 0


def test_versions_never_go_backwards(parameters, ends):
    writer, reader = ends.near(Writer, parameters), ends.far(Reader, parameters)
    writer.put(7)
    for version in (7, 6, 0, -1):
        with pytest.raises(StreamError):
            writer.publish(weights(99), version)
    assert writer.version == 7
    has(reader, 7)
    assert reader.get() == 7


def test_a_new_writer_knows_the_newest_version(parameters, ends):
    """Else a restarted trainer publishes other weights under numbers that were used before."""
    first = ends.far(Writer, parameters)
    first.put(7)
    ends.kill(first)
    second = ends.near(Writer, parameters)
    assert second.version == 7
    with pytest.raises(StreamError):
        second.put(7)


def test_a_readers_version_never_goes_backwards(parameters, ends):
    first, reader = ends.far(Writer, parameters), ends.near(Reader, parameters)
    first.put_many(range(8))
    has(reader, 7)
    ends.kill(first)
    second = ends.near(Writer, parameters)
    for version in (3, 5, 7):  # a trainer that was restored from an older checkpoint
        try:
            second.put(version)
        except StreamError:
            continue
    assert never(lambda: reader.newest() != 7, 0.3)
    assert reader.get() == 7
    second.put(8)
    has(reader, 8)
    assert reader.get() == 8


def test_readers_do_not_disturb_each_other(parameters, ends):
    writer = ends.near(Writer, parameters)
    readers = [ends.near(Reader, parameters), ends.far(Reader, parameters), ends.far(Reader, parameters)]
    for version in (1, 2):
        writer.put(version)
        for reader in readers:
            has(reader, version)
            assert reader.get() == version
            assert reader.get() == version


def test_calls_return_at_once_without_a_writer(parameters, ends):
    reader = ends.near(Reader, parameters)
    begin = time.monotonic()
    for _ in range(20):
        assert reader.newest() == -1
    assert not reader.wait(0.05)[1]
    assert time.monotonic() - begin < 1


# Layouts


OTHER_LAYOUTS = {
    "another shape": {**WEIGHTS, "layer/weight": ((5, 8), "<f4")},
    "another dtype": {**WEIGHTS, "layer/bias": ((8,), "<i4")},
    "another name": {**{name: spec for name, spec in WEIGHTS.items() if name != "half"}, "full": WEIGHTS["half"]},
    "one more": {**WEIGHTS, "more": ((1,), "<f4")},
    "one less": {name: spec for name, spec in WEIGHTS.items() if name != "layer/weight"},
}


@pytest.mark.parametrize("shapes", OTHER_LAYOUTS.values(), ids=OTHER_LAYOUTS)
def test_another_layout_is_an_error_on_both_sides(parameters, ends, shapes):
    writer, reader, other = (
        ends.near(Writer, parameters),
        ends.far(Reader, parameters),
        ends.near(Reader, parameters, shapes),
    )
    writer.put(1)
    has(reader, 1), has(other, 1)
    with pytest.raises(StreamError):
        other.get()
    with pytest.raises(StreamError):
        writer.publish(weights(2, shapes), 2)
    assert reader.get() == 1
    writer.put(3)
    has(reader, 3)
    assert reader.get() == 3


# Torn reads and death


@ACROSS
def test_no_read_is_torn_while_another_process_publishes(parameters, ends):
    writer, reader = ends.far(Writer, parameters, LARGE), ends.near(Reader, parameters, LARGE)
    writer.put(0)
    has(reader, 0)
    writer.tell("put_many", range(1, 400))
    seen = [0]
    while seen[-1] < 399:
        reader.newest()
        seen.append(reader.get())
    assert seen == sorted(seen)
    assert len(set(seen)) > 2
    writer.hear()


def test_no_read_is_torn_while_a_thread_publishes(ends):
    board = ParameterBoard(shared=False)
    writer, reader = ends.near(Writer, board, LARGE), ends.near(Reader, board, LARGE)
    writer.put(0)
    thread = threading.Thread(target=writer.put_many, args=(range(1, 200),))
    thread.start()
    seen = [0]
    while seen[-1] < 199:
        seen.append(reader.get())
    thread.join()
    assert seen == sorted(seen)


@ACROSS
def test_a_writer_killed_at_any_moment_leaves_whole_parameters(parameters, ends):
    reader, newest = ends.near(Reader, parameters, LARGE), -1
    for _ in range(3):
        writer = ends.far(Writer, parameters, LARGE)
        writer.tell("put_for_ever")
        eventually(lambda newest=newest: reader.newest() > newest + 3)
        ends.kill(writer)
        reader.newest()
        assert reader.get() >= newest + 3
        newest = reader.newest()
    last = ends.near(Writer, parameters, LARGE)
    newest = max(newest, last.version) + 1
    last.put(newest)
    has(reader, newest)
    assert reader.get() == newest


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_a_writer_killed_at_any_instruction_leaves_whole_parameters(ahead):
    """A reader must not wait for the dead: whatever was published last can be read."""

    def scenario(kill):
        board = ParameterBoard(shared=False)
        first, reader = Writer(board), Reader(board)
        first.put(4)
        kill(lambda: first.put(4 + ahead))
        assert reader.get() in (4, 4 + ahead)
        assert reader.newest() == reader.get()
        second = Writer(board)
        second.put(second.version + 1)
        assert reader.get() == second.version

    every_moment(parameters_module, scenario)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_a_read_in_the_middle_of_a_publication_is_whole(ahead):
    def scenario(interrupt):
        board = ParameterBoard(shared=False)
        writer, reader, seen = Writer(board), Reader(board), []
        writer.put(4)
        interrupt(lambda: writer.put(4 + ahead), lambda: seen.append(reader.get()))
        assert seen in ([], [4], [4 + ahead])
        assert reader.get() == 4 + ahead

    every_moment(parameters_module, scenario)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_publications_in_the_middle_of_a_read_do_not_tear_it(count):
    def scenario(interrupt):
        board = ParameterBoard(shared=False)
        writer, reader, seen = Writer(board), Reader(board), []
        writer.put(4)
        interrupt(lambda: seen.append(reader.get()), lambda: writer.put_many(range(5, 5 + count)))
        assert seen[0] in range(4, 5 + count)

    every_moment(parameters_module, scenario)


def test_a_writer_killed_during_its_first_version_leaves_none():
    def scenario(kill):
        board = ParameterBoard(shared=False)
        kill(lambda: board.writer().publish(weights(0, LARGE), 0))
        reader = Reader(board)
        if reader.newest() < 0:
            Writer(board).put(0)
            assert reader.get() == 0
        else:
            reader.shapes = LARGE
            assert reader.get() == 0

    every_moment(parameters_module, scenario)


# TCP: only what is new travels


def messages(stranger):
    return [decode(message) for message in iter(stranger.hear, None)]


@TCP
def test_a_late_reader_gets_the_newest_version_only(parameters, ends, stranger):
    writer = ends.near(Writer, parameters)
    writer.put_many(range(6))
    late = stranger("parameters")
    late.say("have", version=-1)
    found = []
    assert eventually(lambda: found.extend(messages(late)) or found)
    assert never(late.hear)
    [(header, frames)] = found
    layout, shape = Packing().of(weights(5))
    assert (header.kind, header.version, header.number) == ("parameters", 5, shape)
    assert [len(frame) for frame in frames] == [layout.nbytes]


@TCP
def test_a_reader_that_has_the_newest_version_is_sent_no_weights_until_there_are_newer(parameters, ends, stranger):
    writer = ends.near(Writer, parameters)
    writer.put(5)
    reader = stranger("parameters")
    for _ in range(3):  # each time a sign of life is all it hears
        reader.say("have", version=5)
        header, payload = decode(eventually(reader.hear))
        assert (header.kind, header.version, payload) == ("hello", 5, [])
    assert never(reader.hear)
    writer.put(6)
    assert decode(eventually(reader.hear))[0].version == 6
    writer.put(7)  # it has not said that it took 6
    assert never(reader.hear)
    reader.say("have", version=6)
    assert decode(eventually(reader.hear))[0].version == 7


@TCP
def test_a_new_version_wakes_the_reader(parameters, ends):
    writer, reader = ends.near(Writer, parameters), ends.far(Reader, parameters)
    writer.put(0)
    has(reader, 0)
    while reader.wait(0.02)[1]:
        reader.newest()
    writer.put(1)
    slept, woken = reader.wait(3)
    assert woken and slept < 2
    has(reader, 1)


@TCP
def test_a_reader_finds_its_writer_on_another_port(parameters, ends, names):
    first, reader = ends.near(Writer, parameters), ends.far(Reader, parameters)
    first.put(1)
    has(reader, 1)
    endpoint = names.resolve("parameters")
    first.close()
    second = ends.near(Writer, parameters)
    assert names.resolve("parameters") != endpoint
    second.put(2)
    has(reader, 2)
    assert reader.get() == 2


@TCP
def test_a_writer_may_start_after_its_readers(parameters, ends):
    reader = ends.far(Reader, parameters)
    assert reader.newest() == -1
    writer = ends.near(Writer, parameters)
    writer.put(0)
    has(reader, 0)
    assert reader.get() == 0


TO_WRITER = {
    "nothing": [b""],
    "wrong magic": [b"SRL9" + encode(Header("have"))[0][4:]],
    "truncated header": [encode(Header("have"))[0][:-2]],
    "text that is no UTF-8": [b"SRL1\x91\xa5\xffello"],
    "unknown kind": encode(Header("explode")),
    "kind of another stream": encode(Header("request")),
    "the writer's own kind": [*encode(Header("parameters", version=9)), b"\x00" * 64],
}


@TCP
@pytest.mark.parametrize("frames", TO_WRITER.values(), ids=TO_WRITER)
def test_a_writer_refuses_garbage_and_goes_on(parameters, ends, stranger, frames):
    writer, reader = ends.near(Writer, parameters), ends.near(Reader, parameters)
    writer.put(1)
    has(reader, 1)
    stranger("parameters").send(*frames)
    eventually(lambda: writer.rejected == 1, 2)
    writer.put(2)
    has(reader, 2)
    assert reader.get() == 2


@TCP
def test_oversize_and_foreign_bytes_do_not_stop_the_writer(parameters, ends, names, stranger, bomb):
    writer, reader = ends.near(Writer, parameters), ends.near(Reader, parameters)
    stranger("parameters").send(*encode(Header("have")), b"\x00" * 10**6)
    for number in (2**63, 2**64 - 1, -(2**63)):
        stranger("parameters").say("have", version=number, sender=number, sequence=number)
    for frames in ([bomb], [b"SRL1" + bomb], [encode(Header("have"))[0] + bomb]):
        stranger("parameters").send(*frames)
    eventually(lambda: writer.rejected >= 3)
    host, port = names.resolve("parameters").removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(bomb + b"\xff" * 1000)
    writer.put(1)
    has(reader, 1)
    assert reader.get() == 1


def published(number, version, shapes=WEIGHTS):
    """The message in which a writer sends :func:`weights`."""
    arrays = weights(number, shapes)
    layout, shape = Packing().of(arrays)
    whole = bytearray(layout.nbytes)
    for name, (offset, _, _) in layout.places.items():
        whole[offset : offset + arrays[name].nbytes] = arrays[name].tobytes()
    return [*encode(Header("parameters", number=shape, version=version)), bytes(whole)]


GOOD = published(9, 9)
TO_READER = {
    "garbage": [b"garbage"],
    "text that is no UTF-8": [b"SRL1\x91\xa5\xffello"],
    "unknown kind": encode(Header("explode")),
    "kind of another stream": encode(Header("credit", version=9)),
    "no payload": GOOD[:1],
    "two payloads": [*GOOD, GOOD[1]],
    "an older version": published(9, 0),
    "the same version": published(9, 1),
    "a payload too short": [GOOD[0], GOOD[1][:-64]],
    "a payload too long": [GOOD[0], GOOD[1] + b"\x00" * 64],
    "a version too large": published(9, 2**63),
}


@pytest.mark.parametrize("frames", TO_READER.values(), ids=TO_READER)
def test_a_reader_refuses_what_cannot_be_parameters_and_goes_on(ends, names, fake_server, frames, bomb):
    server, reader = fake_server("parameters"), ends.near(Reader, TcpParameters("parameters", names))
    eventually(lambda: reader.newest() >= 0 or server.socket.poll(0))
    identity, *asked = server.hear()
    assert decode(asked)[0] == Header("have", version=-1)
    server.send(identity, *published(1, 1))
    has(reader, 1)
    server.send(identity, *frames)
    server.send(identity, bomb)
    assert never(lambda: reader.newest() != 1)
    assert reader.get() == 1
    server.send(identity, *published(2, 2))
    has(reader, 2)
    assert reader.get() == 2
