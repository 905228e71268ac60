"""Checkpoints: whole or not there at all, tagged, and tidied up."""

from __future__ import annotations

import json
import os

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
    manifest.write_text(json.dumps(about))
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
    (folder / "manifest.json").write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match="damaged"):
        store.load("latest")
    assert not (tmp_path / "owned").exists()
