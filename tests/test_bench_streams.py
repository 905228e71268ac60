"""``srl bench streams`` measures all it says it does, judges it rightly, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from running import eventually, group_of
from srl.bench.stream_peers import Case, Held, Lane, alternate, peers
from srl.bench.streams import judge
from srl.core.errors import SrlError

TINY = """
from srl import cli
from srl.bench import streams

streams.QUICK = streams.Settings(2, 1, 0.005, 0.01, (10_000, 1_000_000), (1,), (1, 2), (10_000_000,))
cli.main()
"""
LANES = {
    "sample": {"memcpy, hot", "memcpy, own", "memcpy", "shm", "shm + gather", "mp.Queue"}
    | {"ZeroMQ", "ZeroMQ, kept", "ZeroMQ, anew", "tcp", "ZeroMQ, keys", "tcp, keys"},
    "inference": {"doorbell", "shm", "ZeroMQ", "tcp", "mp.Queue"},
    "parameters": {"memcpy, hot", "memcpy", "shm view", "shm copy", "ZeroMQ", "tcp view", "tcp copy"},
}
QUANTITIES = {
    "sample": {"GB/s", "sender_us", "receiver_us"},
    "inference": {"p50_us", "p99_us", "requests/s", "cpu_us"},
    "parameters": {"us", "sender_us", "receiver_us"},
}


@pytest.fixture
def litter():
    with tempfile.TemporaryDirectory(prefix="srl-") as folder:  # short: a Unix socket's path must fit
        yield Path(folder)


def test_every_lane_is_measured_and_nothing_is_left(tmp_path, litter):
    path = tmp_path / "streams.json"
    command = [sys.executable, "-c", TINY, "bench", "streams", "--quick", "--json", str(path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, start_new_session=True, env={**os.environ, "TMPDIR": str(litter)})
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert err == ""
    assert "not measured: give --ray PYTHON" in out
    eventually(lambda: not group_of(process.pid), 5, "the end of all its processes")
    assert list(litter.iterdir()) == []

    whole = json.loads(path.read_text())
    assert whole["machine"]["cores"] and whole["options"]["quick"] is True
    assert [len(whole[name]) for name in LANES] == [2, 2, 1]
    for name, lanes in LANES.items():
        for case in whole[name]:
            pinned = {lane for lane in case["lanes"] if lane.endswith((" core", " cores"))}
            assert set(case["lanes"]) - pinned == lanes
            assert not pinned or case["about"] == {"rows": 1, "clients": 1}
            for lane, quantities in case["lanes"].items():
                assert set(quantities) == QUANTITIES[name]
                for quantity, values in quantities.items():
                    nothing = quantity == "receiver_us" and lane.startswith("memcpy")  # it has no other side
                    assert len(values) == 2 and all(v == 0 if nothing else v > 0 for v in values), (
                        name,
                        lane,
                        quantity,
                    )
    for case in whole["inference"]:
        for values in case["lanes"].values():
            assert all(p50 <= p99 for p50, p99 in zip(values["p50_us"], values["p99_us"], strict=True))
    assert len(whole["targets"]) == 8


def case(about, **lanes):
    return Case(about, {lane.replace("_", " "): values for lane, values in lanes.items()})


def test_a_ratio_compares_within_rounds():
    found = case({}, shm={"us": [2.0, 40.0, 6.0]}, memcpy={"us": [1.0, 10.0, 3.0]})
    assert found.ratio("shm", "memcpy", "us") == 2.0
    assert found.ratio("shm", "Ray", "us") is None
    assert found.median("shm", "us") == 6.0
    assert found.median("Ray", "us") is None


@pytest.mark.parametrize(("rate", "met"), [(7.9, False), (8.0, True)])
def test_a_target_is_met_only_if_every_large_block_meets_it(rate, met):
    about = [{"bytes": asked, "asked": asked} for asked in (10_000, 1_000_000, 8_000_000)]
    rates = [1.0, 9.0, rate]
    cases = [case(a, shm={"GB/s": [r]}, memcpy={"GB/s": [10.0]}) for a, r in zip(about, rates, strict=True)]
    assert next(target["met"] for target in judge({"sample": cases})) is met


def test_a_round_trip_is_compared_with_one_between_the_same_cores():
    trips = {"doorbell": 10.0, "shm": 90.0, "doorbell, two cores": 40.0, "shm, two cores": 100.0}
    found = Case({"rows": 1, "clients": 1}, {lane: {"p50_us": [value]} for lane, value in trips.items()})
    assert [(target["found"], target["met"]) for target in judge({"inference": [found]})] == [("2.50", True)]


@pytest.mark.parametrize(("trip", "met"), [(30.0, True), (31.0, False)])
def test_the_round_trip_is_judged_at_one_row_and_one_client(trip, met):
    one = case({"rows": 1, "clients": 1}, shm={"p50_us": [trip]}, doorbell={"p50_us": [10.0]})
    many = case({"rows": 1, "clients": 16}, shm={"p50_us": [900.0]}, doorbell={"p50_us": [10.0]})
    assert [target["met"] for target in judge({"inference": [one, many]})] == [met]


class Failing(Held):
    def one(self):
        raise ValueError("no")

    def die(self):
        os._exit(3)


@pytest.mark.parametrize(("method", "message"), [("one", "failed: ValueError: no"), ("die", "has died")])
def test_what_goes_wrong_in_another_process_ends_the_benchmark(method, message):
    with pytest.raises(SrlError, match=message), peers(1) as (peer,):
        end = peer.make(Failing)
        alternate(Case({}), [Lane("failing", lambda: end.call(method), [end])], 1)


def test_an_interpreter_that_is_not_there_is_refused_at_once(srl_command):
    code, _, err = srl_command("bench", "streams", "--ray", "/no/such/python").finish()
    assert code == 2
    assert err == "srl: --ray /no/such/python: there is no such interpreter\n"
