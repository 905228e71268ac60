"""What an inference stream promises, over every transport: one batch of all that is pending, and an answer to everybody
who lives to hear it."""

from __future__ import annotations

import contextlib
import socket
import time

import numpy as np
import pytest
from stream_peers import SPEC, Client, Server, answer, answer_to, contents, eventually, every_moment, never

from srl.core.errors import ConfigError
from srl.core.slab import Slab
from srl.streams import frames as codec
from srl.streams import inference as inference_module
from srl.streams import sockets
from srl.streams.frames import Header
from srl.streams.inference import LocalInference
from srl.streams.tcp_inference import TcpInference

STREAM = codec.stream_id("inference/0")


def encode(header, arrays=()):
    return codec.encode(header, arrays, STREAM)


def decode(frames):
    return codec.decode(frames, STREAM)


TCP = pytest.mark.parametrize("transport", ["tcp"], indirect=True)
INLINE = pytest.mark.parametrize("transport", ["inline"], indirect=True)
BOARDS = pytest.mark.parametrize("transport", ["inline", "shm"], indirect=True)


def check_answer(client, step, number, version):
    """The outputs beside ``step`` are those for the observations of ``number``, to the last element."""
    found = client.outputs(step)
    for name, value in answer_to(number).items():
        np.testing.assert_array_equal(found[name], value, err_msg=name, strict=True)
    assert (found["version"] == version).all()


def pending(server, clients, count):
    """The requests of ``count`` clients, as soon as all have come."""

    def come():
        for client in clients:
            assert not client.ready()
        requests = server.take()
        return requests if requests and len(requests.clients) == count else None

    return eventually(come)


def served(server, client, version=0):
    """Serve until the client has its answer."""

    def done():
        server.serve(version)
        return client.ready()

    eventually(done)


# Questions and answers


def test_observations_and_outputs_arrive_whole(inference, ends):
    stream = inference()
    server, client = ends.near(Server, stream), ends.far(Client, stream)
    for step, number in ((0, 3), (7, 4), (15, 5)):
        client.ask(step, number)
        requests = pending(server, [client], 1)
        for name in SPEC.observations:
            np.testing.assert_array_equal(requests.obs[name], contents(SPEC, number)[name][0], strict=True)
        server.reply(requests, answer(requests.obs), 10 + step)
        eventually(client.ready)
        check_answer(client, step, number, 10 + step)


def test_an_answer_changes_nothing_but_its_own_step(inference, ends):
    stream = inference()
    server, client = ends.near(Server, stream), ends.far(Client, stream)
    for step in (4, 5, 6):
        client.scribble(step, 1)
    before = {step: client.outputs(step) for step in (4, 6)}
    client.ask(5, 3)
    served(server, client, version=9)
    check_answer(client, 5, 3, 9)
    for step, outputs in before.items():
        for name, value in client.outputs(step).items():
            np.testing.assert_array_equal(value, outputs[name])


def test_nothing_is_pending_before_a_request_and_after_its_answer(inference, ends):
    stream = inference()
    server, client = ends.near(Server, stream), ends.far(Client, stream)
    assert server.take() is None
    assert client.ready() and not client.waiting()
    client.ask(0, 1)
    assert client.waiting()
    requests = pending(server, [client], 1)
    assert never(client.ready)
    assert client.waiting()
    server.reply(requests, answer(requests.obs), 0)
    eventually(client.ready)
    assert not client.waiting()
    assert never(server.take)


def test_all_that_is_pending_is_one_batch(inference, ends):
    stream = inference(clients=3)
    server, clients = ends.near(Server, stream), [ends.far(Client, stream, index) for index in range(3)]
    for index, client in enumerate(clients):
        client.ask(4 * index, 10 + index, index)
    requests = pending(server, clients, 3)
    assert requests.clients.tolist() == [0, 1, 2]
    assert requests.version == 2
    for name in SPEC.observations:
        expected = np.concatenate([contents(SPEC, 10 + index)[name][0] for index in range(3)])
        np.testing.assert_array_equal(requests.obs[name], expected, strict=True)
    server.reply(requests, answer(requests.obs), 2)
    for index, client in enumerate(clients):
        eventually(client.ready)
        check_answer(client, 4 * index, 10 + index, 2)


def test_a_request_that_stays_unanswered_is_taken_again(inference, ends):
    """A policy worker that lacks the version asked for lets the batch lie."""
    stream = inference(clients=2)
    server, clients = ends.near(Server, stream), [ends.far(Client, stream, index) for index in range(2)]
    clients[0].ask(0, 1, 8)
    assert pending(server, clients[:1], 1).version == 8
    clients[1].ask(4, 2)
    requests = pending(server, clients, 2)
    assert requests.version == 8
    server.reply(requests, answer(requests.obs), 8)
    for index, client in enumerate(clients):
        eventually(client.ready)
        check_answer(client, 4 * index, 1 + index, 8)


def test_nobody_waits_for_the_answers_of_others(inference, ends):
    stream = inference(clients=2)
    server, clients = ends.near(Server, stream), [ends.far(Client, stream, index) for index in range(2)]
    clients[1].ask(4, 2)
    requests = pending(server, clients[1:], 1)
    clients[0].ask(0, 1)
    server.reply(requests, answer(requests.obs), 0)
    eventually(clients[1].ready)
    check_answer(clients[1], 4, 2, 0)
    assert not clients[0].ready()


def test_each_server_serves_its_own_clients(inference, ends):
    stream = inference(clients=3, servers=2)
    servers = [ends.near(Server, stream, index) for index in range(2)]
    clients = [ends.far(Client, stream, index) for index in range(3)]
    for index, client in enumerate(clients):
        client.ask(4 * index, index)
    for server, mine in zip(servers, ([0, 2], [1]), strict=True):
        requests = pending(server, [clients[index] for index in mine], len(mine))
        assert requests.clients.tolist() == mine
        server.reply(requests, answer(requests.obs), 0)
    for index, client in enumerate(clients):
        eventually(client.ready)
        check_answer(client, 4 * index, index, 0)


# Waiting


def test_a_request_wakes_the_server_and_an_answer_the_client(inference, ends):
    stream = inference()
    server, client = ends.near(Server, stream), ends.far(Client, stream)
    client.ask(0, 1)
    served(server, client)
    while server.wait(0.02)[1] or client.wait(0.02)[1]:
        client.ready()
    client.ask(1, 2)
    slept, woken = server.wait(3)
    assert woken and slept < 2
    assert server.serve() == 1
    slept, woken = client.wait(3)
    assert woken and slept < 2
    eventually(client.ready)


def test_waiting_ends_in_time_when_nothing_comes(inference, ends):
    stream = inference()
    server, client = ends.near(Server, stream), ends.far(Client, stream)
    client.ask(0, 1)
    served(server, client)
    for end in (server, client):
        while end.wait(0.01)[1]:
            server.take(), client.ready()
        slept, woken = end.wait(0.05)
        assert not woken
        assert 0.04 < slept < 0.5


# Death


def test_a_killed_servers_requests_are_served_by_the_next(inference, ends):
    stream = inference(clients=2)
    first, clients = ends.far(Server, stream), [ends.near(Client, stream, index) for index in range(2)]
    clients[0].ask(0, 1)
    served(first, clients[0])
    for index, client in enumerate(clients):
        client.ask(4 * index + 1, 5 + index)
    pending(first, clients, 2)
    ends.kill(first)
    second = ends.near(Server, stream)

    def done():
        second.serve(3)
        return sum(client.ready() for client in clients) == 2

    eventually(done)
    for index, client in enumerate(clients):
        check_answer(client, 4 * index + 1, 5 + index, 3)


def test_nobody_hangs_while_there_is_no_server(inference, ends):
    stream = inference()
    client = ends.near(Client, stream)
    begin = time.monotonic()
    client.ask(0, 1)
    assert not client.ready()
    client.wait(0.05)
    assert time.monotonic() - begin < 1
    server = ends.near(Server, stream)
    served(server, client)
    check_answer(client, 0, 1, 0)


def test_a_killed_clients_successor_gets_its_own_answer(inference, ends):
    stream = inference()
    server, dead = ends.near(Server, stream), ends.far(Client, stream, 0, 1)
    dead.ask(0, 1)
    requests = pending(server, [dead], 1)
    ends.kill(dead)
    client = ends.far(Client, stream, 0, 2)
    client.ask(3, 2)
    server.reply(requests, answer(requests.obs), 0)
    served(server, client, version=1)
    check_answer(client, 3, 2, 1)
    assert server.take() is None


@BOARDS
def test_a_dead_clients_request_is_not_answered_into_a_block_that_others_fill(inference, ends):
    """Its block goes to another producer as soon as its successor is there."""
    stream = inference(clients=2, servers=2)
    dead = ends.far(Client, stream, 0, 1)
    dead.ask(3, 1)
    ends.kill(dead)  # and its policy worker is down as well
    ends.far(Client, stream, 0, 2)
    other, busy = ends.far(Client, stream, 1, 1), ends.near(Server, stream, 1)
    other.ask(3, 2)
    served(busy, other, version=5)
    late = ends.near(Server, stream, 0)
    late.serve(version=4)
    check_answer(other, 3, 2, 5)


@INLINE
@pytest.mark.parametrize("method", ["take", "reply", "submit", "start"])
def test_a_worker_killed_at_any_instruction_leaves_a_working_stream(inference, method):
    def scenario(kill):
        board = inference(clients=2)
        server, clients = Server(board), [Client(board, index) for index in range(2)]
        clients[0].ask(0, 1)
        if method == "submit":
            kill(lambda: clients[1].submit(4, 7))
        elif method == "start":
            kill(lambda: Client(board, 1, 2))
        else:
            clients[1].ask(4, 2)
            requests = server.take()
            outputs = answer(requests.obs)
            kill({"take": server.take, "reply": lambda: server.reply(requests, outputs, 1)}[method])
        if method in ("take", "reply"):
            server = Server(board)
        else:
            clients[1] = Client(board, 1, 3)
            clients[1].ask(4, 2)
        server.serve(1)
        for index, client in enumerate(clients):
            assert client.ready()
            check_answer(client, 4 * index, 1 + index, 1)
        assert server.take() is None

    every_moment(inference_module, scenario)


CALLS = {
    "serve": lambda server, clients: server.serve(1),
    "ask": lambda server, clients: clients[1].ask(4, 2),
    "look": lambda server, clients: clients[0].ready() and check_answer(clients[0], 0, 1, 1),
}


@INLINE
@pytest.mark.parametrize(("call", "meanwhile"), [("serve", "ask"), ("ask", "serve"), ("serve", "look")])
def test_whatever_happens_in_the_middle_of_a_call_everybody_is_answered(inference, call, meanwhile):
    def scenario(interrupt):
        board = inference(clients=2)
        server, clients = Server(board), [Client(board, index) for index in range(2)]
        clients[0].ask(0, 1)
        interrupt(lambda: CALLS[call](server, clients), lambda: CALLS[meanwhile](server, clients))
        server.serve(1)
        check_answer(clients[0], 0, 1, 1)
        if board.asked[1]:
            check_answer(clients[1], 4, 2, 1)
        assert not any(client.waiting() for client in clients)

    every_moment(inference_module, scenario)


# The policy inside the actor


@pytest.mark.parametrize("bell", [None, object()])
def test_inline_inference_answers_at_once_in_the_block_itself(bell):
    slab = Slab(SPEC, 1, shared=False)
    client = LocalInference(slab, lambda obs, kind, version: (answer(obs), version + 3), lambda: bell)
    assert client.ready() and not client.waiting()
    for name in SPEC.observations:
        slab.steps[name][2] = contents(SPEC, 6)[name][0]
    client.submit(2, 4)
    assert client.waiting()
    assert client.ready() and not client.waiting()
    for name, value in answer_to(6).items():
        np.testing.assert_array_equal(slab.steps[name][2], value)
    assert (slab.steps["version"][2] == 7).all()
    assert (slab.steps["version"][[0, 1, 3]] == 0).all()
    assert client.pollable() is bell


def test_inline_inference_waits_for_the_version_it_was_asked_for():
    slab, there = Slab(SPEC, 1, shared=False), [0]

    def act(obs, kind, version):
        return (answer(obs), there[-1]) if version in there else None

    client = LocalInference(slab, act)
    client.submit(0, 2)
    for newest in (1, 2):
        assert not client.ready()
        assert client.waiting()
        there.append(newest)
    assert client.ready()
    assert (slab.steps["version"][0] == 2).all()


# TCP: the same stream over a bad network


def request(number, sender=0, incarnation=1, sequence=1, version=0):
    first = contents(SPEC, number)
    header = Header("request", sender, incarnation, sequence, version=version)
    return encode(header, [first[name][0] for name in SPEC.observations])


def reply(number, sequence=1, version=0):
    return encode(Header("reply", sequence=sequence, version=version), answer_to(number).values())


@TCP
def test_a_request_that_comes_twice_is_answered_twice_and_computed_once(inference, ends, stranger):
    server, client = ends.near(Server, inference()), stranger("inference/0")
    client.send(*request(1))
    client.send(*request(1))
    requests = eventually(server.take)
    assert len(requests.clients) == 1
    server.reply(requests, answer(requests.obs), 6)
    client.send(*request(1))
    answers = []

    def answered():
        assert server.take() is None, "the request was computed again"
        answers.extend(iter(client.hear, None))
        return len(answers) in (2, 3)  # three if the second came late: it is then answered by itself

    eventually(answered)
    for message in answers:
        header, frames = decode(message)
        assert (header.kind, header.sequence, header.version) == ("reply", 1, 6)
        assert frames == [value.tobytes() for value in answer_to(1).values()]


@TCP
def test_requests_of_an_older_incarnation_are_ignored(inference, ends, stranger):
    server, old, new = ends.near(Server, inference()), stranger("inference/0"), stranger("inference/0")
    new.send(*request(2, incarnation=5))
    eventually(server.serve)
    old.send(*request(1, incarnation=4, sequence=9))
    old.say("nonsense")
    requests = []
    eventually(lambda: requests.append(server.take()) or server.rejected)  # so all of the above has been seen
    assert requests == [None] * len(requests)
    assert old.hear() is None
    new.send(*request(3, incarnation=5, sequence=2))
    assert len(eventually(server.take).clients) == 1


@TCP
def test_a_client_finds_its_server_on_another_port(inference, ends, names):
    stream = inference()
    first, client = ends.near(Server, stream), ends.far(Client, stream)
    client.ask(0, 1)
    served(first, client)
    endpoint = names.resolve("inference/0")
    client.ask(1, 2)
    first.close()
    second = ends.near(Server, stream)
    assert names.resolve("inference/0") != endpoint
    served(second, client, version=2)
    check_answer(client, 1, 2, 2)


def test_a_client_does_not_take_the_server_of_another_stream_for_its_own(ends, names, monkeypatch):
    """The port of a server that died may be given to the next one that asks for a port."""
    mine, other = (TcpInference(name, names, SPEC, 1, 1) for name in ("mine", "other"))
    first, client = ends.near(Server, mine), ends.near(Client, mine)
    client.ask(0, 1)
    served(first, client)
    monkeypatch.setattr(sockets, "SILENCE", 1.0)
    other.port = int(names.resolve("mine/0").rsplit(":", 1)[1])
    first.close()

    def on_its_port():
        with contextlib.suppress(ConfigError):  # the system has not freed it yet
            return ends.near(Server, other)

    wrong = eventually(on_its_port)
    right = ends.near(Server, mine)
    client.ask(1, 2)

    def done():
        wrong.serve(version=66)
        right.serve(version=2)
        return client.ready()

    eventually(done)
    check_answer(client, 1, 2, 2)


NEXT = request(1, sequence=3)
GARBAGE = {
    "nothing": [b""],
    "wrong magic": [b"SRL9" + request(1)[0][4:], *request(1)[1:]],
    "truncated header": [request(1)[0][:-2], *request(1)[1:]],
    "text that is no UTF-8": [b"SRL1\x91\xa5\xffello"],
    "unknown kind": encode(Header("explode")),
    "kind of another stream": encode(Header("block")),
    "sender too large": request(1, sender=2),
    "sender negative": request(1, sender=-1),
    "no arrays": NEXT[:1],
    "an array too few": NEXT[:-1],
    "an array too many": [*NEXT, b"more"],
    "a short array": [*NEXT[:-1], b"short"],
    "arrays in another order": [NEXT[0], *NEXT[:0:-1]],
    "a newer incarnation with bad arrays": request(1, incarnation=99)[:-1],
    "a far sequence with bad arrays": request(1, sequence=99)[:-1],
    "a number too large for incarnation": request(1, sender=1, incarnation=2**63),
    "a number too large for sequence": request(1, sender=1, sequence=2**64 - 1),
    "a number too large for version": request(1, sender=1, version=2**63),
}


@TCP
@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_refused_and_changes_nothing(inference, ends, stranger, frames, monkeypatch):
    monkeypatch.setattr(sockets, "SILENCE", 60.0)  # nothing gets well by being asked again
    stream = inference(clients=2)
    server, client = ends.near(Server, stream), ends.near(Client, stream)
    client.ask(0, 1)
    served(server, client)
    client.ask(1, 2)
    pending(server, [client], 1)
    stranger("inference/0").send(*frames)

    def refused():
        requests = server.take()
        assert requests is not None, "garbage took away a request"
        assert requests.clients.tolist() == [0], "garbage was taken for a request"
        return server.rejected == 1

    eventually(refused)
    assert server.serve(1) == 1
    eventually(client.ready, 2)
    check_answer(client, 1, 2, 1)
    client.ask(2, 3)
    assert eventually(lambda: server.serve(2), 2) == 1
    eventually(client.ready, 2)
    check_answer(client, 2, 3, 2)


@TCP
def test_oversize_and_foreign_bytes_do_not_stop_the_server(inference, ends, names, stranger, bomb):
    stream = inference()
    server, client = ends.near(Server, stream), ends.near(Client, stream)
    header, *arrays = request(1)
    stranger("inference/0").send(header, *arrays[:-1], b"\x00" * 10**6)
    for frames in ([bomb], [b"SRL1" + bomb], [*request(1, sequence=9)[:-1], bomb]):
        stranger("inference/0").send(*frames)
    host, port = names.resolve("inference/0").removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(bomb + b"\xff" * 1000)
    client.ask(0, 1)
    served(server, client)
    check_answer(client, 0, 1, 0)
    eventually(lambda: server.serve() or server.rejected == 3)


def test_a_client_takes_only_the_answer_to_its_question(ends, names, fake_server, bomb):
    server, stream = fake_server("inference/0"), TcpInference("inference", names, SPEC, 1, 1)
    client = ends.near(Client, stream)
    for step in range(16):
        client.scribble(step, 1)
    untouched = client.outputs(5)
    client.ask(5, 1)
    eventually(lambda: client.ready() or server.socket.poll(0))
    identity, *asked = server.hear()
    assert [bytes(frame) for frame in asked] == [bytes(frame) for frame in request(1)]
    refused = (
        [b"garbage"],
        [bomb],
        encode(Header("explode")),
        encode(Header("credit", sequence=1)),
        reply(9, sequence=0),
        reply(9, sequence=2),
        reply(9)[:-1],
        [*reply(9), b"more"],
        [*reply(9)[:-1], b"short"],
        [*reply(9)[:-1], bomb],
    )
    for frames in refused:
        server.send(identity, *frames)
    assert never(client.ready)
    for name, value in client.outputs(5).items():
        np.testing.assert_array_equal(value, untouched[name])
    server.send(identity, *reply(1, version=4))
    eventually(client.ready)
    check_answer(client, 5, 1, 4)
    server.send(identity, *reply(9, version=5))  # an answer that comes twice
    assert client.wait(3)[1]
    assert client.ready()
    check_answer(client, 5, 1, 4)
