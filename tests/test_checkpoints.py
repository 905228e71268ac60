"""Checkpoints: whole or not there at all, tagged, and tidied up."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import resource
import signal
import time

import numpy as np
import pytest

from srl.core.errors import CheckpointError
from srl.core.worker import State
from srl.services import checkpoints
from srl.services.checkpoints import CheckpointStore


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", "an experiment", keep=3)


def state(number):
    arrays = {"weights": np.full((3, 2), number, np.float32), "count": np.float64(number)[()].reshape(())}
    return State(arrays, {"version": number, "big": 2**120})


def test_what_is_saved_is_loaded(store):
    store.save(7, "default", state(7))
    found = store.load("latest")
    assert found.values == {"version": 7, "big": 2**120}
    assert np.array_equal(found.arrays["weights"], state(7).arrays["weights"])
    assert found.arrays["count"].shape == ()


def test_old_versions_go_and_tagged_ones_stay(store):
    for version in range(1, 9):
        store.save(version, "default", state(version))
        if version == 2:
            store.tag("best", 2)
    assert store.versions() == [2, 6, 7, 8]
    assert store.tags() == {"latest": 8, "best": 2}
    assert store.load("best").values["version"] == 2
    assert store.load("v7").values["version"] == 7


def test_a_trainer_whose_place_another_has_taken_saves_nothing(store):
    first = store.claimed()
    first.save(7, "default", state(7))
    second = store.claimed()
    with pytest.raises(CheckpointError, match="another trainer has taken over"):
        first.save(8, "default", state(8))
    second.save(8, "default", state(9))
    assert store.load("latest").arrays["weights"][0, 0] == 9
    assert not list(store.folder.glob(".partial*"))


def rewrite(manifest, about):
    """A manifest somebody has changed on purpose."""
    about.pop("sha256")
    manifest.write_text(json.dumps({**about, "sha256": checkpoints._own_digest(about)}))


class Killed(BaseException):
    """Stands for the end of the process."""


STEPS = ("save_file", "_digest", "_sync", "rename", "tag")


@pytest.mark.parametrize("step", STEPS)
def test_killed_while_saving_the_one_before_is_whole_and_found(store, monkeypatch, step):
    store.save(1, "default", state(1))

    def die(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        if step == "rename":
            patch.setattr(type(store.folder), "rename", die)
        elif step == "tag":
            patch.setattr(CheckpointStore, "tag", die)
        else:
            patch.setattr(checkpoints, step, die)
        with pytest.raises(Killed):
            store.save(2, "default", state(2))
    assert store.load("latest").values["version"] == 1
    store.save(2, "default", state(2))  # and the next save works
    assert store.load("latest").values["version"] == 2
    assert not [name for name in os.listdir(store.folder) if name.startswith(".partial")]


def test_damaged_tags_fall_back_to_the_newest_version(store):
    store.save(3, "default", state(3))
    (store.folder / "tags.json").write_text('{"latest":')
    assert store.load("latest").values["version"] == 3


def test_file_that_the_manifest_did_not_name_is_not_opened(store):
    store.save(1, "default", state(1))
    manifest = store.folder / "v000000001" / "manifest.json"
    about = json.loads(manifest.read_text())
    about["files"]["../../elsewhere"] = about["files"]["arrays.safetensors"]
    rewrite(manifest, about)
    with pytest.raises(CheckpointError, match="damaged"):
        store.load("latest")


def test_pickle_in_the_place_of_arrays_is_never_run(store, tmp_path):
    import hashlib
    import pickle

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    store.save(1, "default", state(1))
    folder = store.folder / "v000000001"
    payload = pickle.dumps(Evil())
    (folder / "arrays.safetensors").write_bytes(payload)
    about = json.loads((folder / "manifest.json").read_text())
    about["files"]["arrays.safetensors"]["sha256"] = hashlib.sha256(payload).hexdigest()
    rewrite(folder / "manifest.json", about)
    with pytest.raises(CheckpointError, match="damaged"):
        store.load("latest")
    assert not (tmp_path / "owned").exists()


def save_for_ever(store, pipe):
    large = np.arange(2_000_000, dtype=np.float32)
    for version in itertools.count(1):
        store.save(version, "default", State({"weights": large + version}, {"version": version}))
        pipe.send(version)


def test_a_trainer_killed_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path):
    fork = multiprocessing.get_context("fork")
    took = 0.1
    for point in range(24):
        store = CheckpointStore(tmp_path / str(point), "an experiment", keep=2)
        ours, theirs = fork.Pipe()
        child = fork.Process(target=save_for_ever, args=(store, theirs))
        child.start()
        assert ours.poll(20)
        begin = time.monotonic()
        if point == 0:  # how long one takes, so that the others die at 23 points of it
            done = [ours.recv() for _ in range(4)][-1]
            took = (time.monotonic() - begin) / 3
        else:
            done = ours.recv()
            time.sleep(took * point / 23)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        while ours.poll():
            try:
                done = ours.recv()
            except EOFError:
                break
        warnings = []
        found = store.load("latest", warnings.append)
        assert found.values["version"] in (done, done + 1) and not warnings
        assert np.array_equal(found.arrays["weights"], np.arange(2_000_000, dtype=np.float32) + found.values["version"])
        store.save(done + 2, "default", state(done + 2))  # and its successor can go on
        assert store.load("latest").values["version"] == done + 2


FILES = ("arrays.safetensors", "manifest.json")


def second(store, name):
    """A file of the second of two checkpoints, and its content."""
    for version in (1, 2):
        store.save(version, "default", state(version))
    path = store.folder / "v000000002" / name
    return path, path.read_bytes()


@pytest.mark.parametrize("name", FILES)
def test_one_bit_anywhere_is_noticed_and_the_one_before_is_loaded(store, name):
    path, whole = second(store, name)
    for place in range(0, 8 * len(whole), 37 if name == "manifest.json" else 7):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        warnings = []
        found = store.load("latest", warnings.append)
        if found.values["version"] == 2:  # white space of the manifest
            assert name == "manifest.json" and found.values == state(2).values and not warnings
        else:
            assert found.values["version"] == 1
            assert len(warnings) == 1 and "going on from the one before, v1" in warnings[0]
        with pytest.raises(CheckpointError, match="no checkpoint"):
            store.load("v3", warnings.append)


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_short_is_noticed_and_the_one_before_is_loaded(store, name):
    path, whole = second(store, name)
    for length in {0, 1, len(whole) // 2, len(whole) - 2}:
        path.write_bytes(whole[:length])
        warnings = []
        assert store.load("latest", warnings.append).values["version"] == 1
        assert len(warnings) == 1 and "damaged" in warnings[0]
    path.unlink()
    assert store.load("latest", warnings.append).values["version"] == 1


def test_who_asks_for_a_damaged_version_by_its_number_does_not_get_another(store):
    store.save(1, "default", state(1))
    store.save(2, "default", state(2))
    (store.folder / "v000000002" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="use --tag v1"):
        store.load("v2", lambda _: pytest.fail("another one was loaded"))


def test_a_full_disk_leaves_the_one_before_and_nothing_half_written(store):
    store.save(1, "default", state(1))
    large = State({"weights": np.zeros(200_000, np.float32)}, {"version": 2})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # writing fails half-way, as on a full disk
        with pytest.raises(CheckpointError, match="cannot write checkpoint"):
            store.save(2, "default", large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert sorted(os.listdir(store.folder)) == [".tags.json.lock", "tags.json", "v000000001"]
    assert store.load("latest").values["version"] == 1


def test_checkpoints_written_before_manifests_had_a_digest_can_be_read(store):
    store.save(1, "default", state(1))
    manifest = store.folder / "v000000001" / "manifest.json"
    about = json.loads(manifest.read_text())
    del about["sha256"]
    manifest.write_text(json.dumps({**about, "format": "srl-checkpoint-1"}))
    assert store.load("latest").values == state(1).values
