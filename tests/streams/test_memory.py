"""Memory that other processes can map, doorbells that wake them, and nothing left behind."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from stream_peers import SPEC, Holder, Peer, contents, eventually, never, number_of, write

from srl.core.errors import ConfigError, SrlError
from srl.core.memory import Doorbell, Segment, available_memory
from srl.core.slab import Batch, Layout, Slab
from srl.core.specs import ArraySpec
from srl.streams.wait import wait


@pytest.fixture
def peer(idle_peers):
    """A process that holds something."""
    found = idle_peers.pop() if idle_peers else Peer()
    yield lambda thing: found.hold(Holder, thing)
    found.hold(None)
    idle_peers.append(found)


def open_files():
    """What this process has open, by descriptor."""
    gc.collect()
    return {entry.name: os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}


# Segments


@pytest.mark.parametrize("shared", [False, True])
def test_a_segment_is_zeroed_and_its_views_are_the_memory_itself(shared):
    segment = Segment(64, shared=shared)
    assert not segment.array(0, (64,), "|u1").any()
    segment.array(8, (2, 3), "<i4")[1, 2] = 5
    assert segment.array(8 + 5 * 4, (1,), "<i4")[0] == 5


def test_another_process_sees_what_is_written_and_the_other_way_round(peer):
    segment = Segment(64, shared=True)
    segment.array(16, (2,), "<i8")[:] = 3, 4
    other = peer(segment)
    assert other.read(16, 2) == [3, 4]
    other.write(32, [7])
    assert segment.array(32, (1,), "<i8")[0] == 7


def test_a_segment_can_be_attached_twice_and_outlives_its_copies():
    segment = Segment(8, shared=True)
    copies = [pickle.loads(pickle.dumps(segment)) for _ in range(2)]
    copies[0].array(0, (1,), "<i8")[0] = 9
    assert copies[1].array(0, (1,), "<i8")[0] == segment.array(0, (1,), "<i8")[0] == 9
    del copies
    gc.collect()
    assert pickle.loads(pickle.dumps(segment)).array(0, (1,), "<i8")[0] == 9


def test_private_memory_refuses_to_be_sent():
    for private in (Segment(8, shared=False), Slab(SPEC, 1, shared=False)):
        with pytest.raises(SrlError, match="private"):
            pickle.dumps(private)


def test_a_segment_grows_for_everybody_and_old_views_stay(peer):
    segment = Segment(0, shared=True)
    other = peer(segment)
    segment.resize(16)
    early = segment.array(0, (2,), "<i8")
    early[:] = 1, 2
    other.grow(64)
    other.write(0, [1, 2, 3, 4, 5, 6, 7, 8])
    segment.resize(64)
    assert segment.array(0, (8,), "<i8").tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    other.write(0, [9])
    assert early.tolist() == [9, 2]
    segment.resize(8)
    assert segment.nbytes == 64


def test_a_segment_smaller_than_it_should_be_is_refused():
    small, large = Segment(8, shared=True), Segment(1 << 16, shared=True)
    attach, (_, nbytes) = large.__reduce__()
    with pytest.raises(SrlError, match="smaller"):
        attach(small.handle, nbytes)


def test_more_memory_than_there_is_is_an_error_with_a_name():
    with pytest.raises(ConfigError, match="MiB"):
        Segment(1 << 60, shared=False)


def test_available_memory_is_what_this_machine_could_have():
    assert 1 << 20 < available_memory() < 1 << 50


def test_nothing_stays_open_when_segments_and_bells_are_gone(peer):
    before = open_files()
    segment, bell, slab = Segment(4096, shared=True), Doorbell(), Slab(SPEC, 2, shared=True)
    copies = pickle.loads(pickle.dumps([segment, bell, slab]))
    assert len(open_files()) > len(before)
    del segment, bell, slab, copies
    assert open_files() == before


def test_a_view_outlives_its_segment():
    view = Segment(8, shared=True).array(0, (1,), "<i8")
    gc.collect()
    view[0] = 5
    assert view[0] == 5


LITTER = """
import os, signal, sys
from srl.core.memory import Doorbell, Segment
from srl.core.slab import BlockSpec, STEP_FIELDS
from srl.streams.inference import InferenceBoard
from srl.streams.parameters import ParameterBoard
from srl.streams.samples import SampleBoard
bells = [Doorbell(), Doorbell()]
board = SampleBoard(BlockSpec({"action": STEP_FIELDS["reward"], **STEP_FIELDS}, 8, 4), 8, bells, shared=True)
others = [InferenceBoard(board.slab, bells, 2, shared=True), ParameterBoard(shared=True), Segment(99, shared=True)]
print("there", flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["killed", "returned"])
def test_a_process_leaves_no_file_behind_however_it_ends(end, tmp_path):
    def shared():
        return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("srl", "psm_", "sem."))}

    before = shared()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", LITTER, end], env=environment, capture_output=True, timeout=20)
    assert done.stdout == b"there\n"
    assert done.returncode == (-9 if end == "killed" else 0)
    assert list(tmp_path.iterdir()) == []
    assert shared() <= before


# Doorbells


def test_a_ring_wakes_another_process(peer):
    bell = Doorbell()
    other = peer(bell)
    assert other.rung(0) is False
    other.tell("rung", 3)
    bell.ring()
    assert other.hear() is True


def test_another_process_can_ring(peer):
    bell = Doorbell()
    other = peer(bell)
    assert not bell.wait(0)
    other.ring()
    assert bell.wait(3)


def test_a_ring_before_the_wait_is_not_lost(peer):
    bell = Doorbell()
    bell.ring()
    other = peer(bell)
    assert other.waited(3)[0] is True
    assert other.waited(0.02)[0] is False


def test_a_waiting_thread_is_woken():
    bell, woken = Doorbell(), []
    thread = threading.Thread(target=lambda: woken.append(wait([None, bell], 5)))
    thread.start()
    bell.ring()
    thread.join(4)
    assert woken == [True]


@pytest.mark.parametrize("rings", [1, 2, 5000, 70_000])
def test_rings_that_nobody_heard_are_one_ring(rings):
    bell = Doorbell()
    for _ in range(rings):
        bell.ring()  # never blocks, however full the pipe is
    assert bell.wait(0)
    bell.clear()
    assert not bell.wait(0), "rings are left over"
    bell.clear()
    bell.ring()
    assert bell.wait(0)


@pytest.mark.parametrize("timeout", [0, 0.05, 0.2])
def test_waiting_takes_no_longer_than_asked(timeout):
    bell = Doorbell()
    for sleep in (bell.wait, lambda seconds: wait([bell, None], seconds), lambda seconds: wait([], seconds)):
        begin = time.monotonic()
        assert sleep(timeout) is False
        assert timeout * 0.9 <= time.monotonic() - begin < timeout + 0.5


def test_wait_clears_only_the_bells_that_rang_and_looks_at_all():
    first, second = Doorbell(), Doorbell()
    first.ring()
    assert wait([first, second], 1)
    assert not first.wait(0)
    second.ring()
    assert wait([first], 0.01) is False
    assert second.wait(0)
    assert wait([first, second], 1)


def test_a_bell_outlives_a_killed_listener():
    bell, listener = Doorbell(), Peer()
    listener.hold(Holder, bell)
    listener.tell("rung", 60)
    listener.kill()
    bell.ring()
    assert bell.wait(0)
    bell.clear()
    assert never(lambda: bell.wait(0), 0.02)


# Layouts and slabs


def test_arrays_of_a_layout_are_aligned_and_apart():
    layout = Layout.of({"a": ((3,), "|u1"), "b": ((), "<f8"), "empty": ((0, 2), "<f4"), "c": ((2, 5), "<i8")})
    views = layout.views(Segment(layout.nbytes, shared=False))
    for value, view in enumerate(views.values(), 1):
        view[...] = value
        assert view.ctypes.data % 64 == 0
    for value, view in enumerate(views.values(), 1):
        assert (view == value).all()
    assert layout.nbytes == sum(-(-view.nbytes // 64) * 64 for view in views.values())


def test_a_slab_is_one_memory_for_all_processes(peer):
    slab = Slab(SPEC, 3, shared=True)
    other = peer(slab)
    write(slab, 0, 5)
    assert other.block(0) == 5
    other.fill(2, 6)
    assert number_of(slab, 2) == 6
    assert not slab.arrays["obs/camera/left"][1].any()


def test_blocks_steps_and_rows_are_views_of_the_same_field():
    slab = Slab(SPEC, 3, shared=False)
    steps, rows = SPEC.horizon + 1, SPEC.rows
    slab.block(2)["obs/position"][1, 1] = 1, 2, 3
    np.testing.assert_array_equal(slab.steps["obs/position"][2 * steps + 1, 1], [1, 2, 3])
    np.testing.assert_array_equal(slab.flat["obs/position"][(2 * steps + 1) * rows + 1], [1, 2, 3])


def test_a_block_spec_knows_observations_from_outputs():
    assert SPEC.observations == ("obs/camera/left", "obs/position", "obs/mask", "obs/clock")
    assert SPEC.outputs == ("action", "action/throttle", "memory", "explored")


def test_a_batch_finds_every_step_of_its_blocks_time_first():
    slab = Slab(SPEC, 4, shared=False)
    for block in range(4):
        write(slab, block, block)
    batch = Batch(slab, [3, 1])
    for name in ("reward", "obs/camera/left"):
        expected = np.stack([contents(SPEC, block)[name][:-1] for block in (3, 1)], axis=1)
        np.testing.assert_array_equal(slab.flat[name][batch.positions], expected.reshape(-1, *expected.shape[3:]))
    reward = np.concatenate([contents(SPEC, block)["reward"] for block in (3, 1)], axis=1)
    np.testing.assert_array_equal(batch.small("reward"), reward)


@pytest.mark.parametrize("dtype", ["O", "<U3", "<M8[s]", "<c8"])
def test_a_dtype_that_cannot_be_shared_is_refused(dtype):
    with pytest.raises(ConfigError, match="dtype"):
        ArraySpec((2,), dtype)


def test_a_peer_that_fails_says_so(peer):
    """The other tests rest on this."""
    bell = Doorbell()  # others open it when they first use it, so it must live
    other = peer(bell)
    with pytest.raises(AttributeError):
        other.read(0, 1)
    assert eventually(lambda: other.rung(0) is False)
