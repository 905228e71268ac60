"""Rules of the code base that a reviewer should not have to watch: import direction, no unsafe loaders, small files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "srl"
FILES = sorted(SOURCE.rglob("*.py"))

# What each part may import of this package.
ALLOWED = {
    "core": {"core"},
    "services": {"core", "services"},
    "streams": {"core", "services", "streams"},
    "algorithms": {"core", "algorithms", "policies"},
    "policies": {"core", "algorithms", "policies", "streams.protocols"},
    "envs": {"core", "envs"},
    "workers": {"core", "services", "streams", "algorithms", "policies", "envs", "workers"},
    "monitor": {"core", "monitor"},
}


def imports(path):
    """Every srl module a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "srl":
            names = [node.module] if node.module != "srl" else [f"srl.{alias.name}" for alias in node.names]
            yield from (name.removeprefix("srl.") for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("srl.") for alias in node.names if alias.name.startswith("srl"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    part = path.relative_to(SOURCE).parts[0]
    for name in imports(path):
        allowed = ALLOWED.get(part)
        if allowed is not None:
            assert any(name == each or name.startswith(each + ".") for each in allowed), f"{path} imports srl.{name}"


def test_no_unsafe_loader_but_for_the_controllers_own_children():
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            name = ""
            if isinstance(node, ast.Import):
                name = next(
                    (a.name for a in node.names if a.name in ("pickle", "cloudpickle", "marshal", "shelve")), ""
                )
            elif isinstance(node, ast.ImportFrom):
                name = node.module if node.module in ("pickle", "cloudpickle", "marshal", "shelve") else ""
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                name = called if called in ("eval", "exec", "torch.load", "yaml.load", "np.load", "numpy.load") else ""
            if name:
                found.add(f"{path.relative_to(SOURCE)}: {name}")
    # The controller hands a node to the process it has just forked, over that process's own pipe, or to Ray.
    assert found == {"launch/child.py: pickle", "launch/local.py: pickle", "launch/ray.py: pickle"}


def test_only_the_tcp_transport_opens_sockets_and_only_on_loopback_unless_told_otherwise():
    from srl.services.network import Network

    assert Network().address == "127.0.0.1"
    users = {str(path.relative_to(SOURCE)) for path in FILES if ".bind(" in path.read_text()}
    assert users == {
        "streams/sockets.py",
        "streams/relay.py",  # a name that nobody sends to: who binds it has the host
        "check.py",
        "launch/run.py",
        "workers/actor.py",
        "workers/player.py",
        "bench/stream_peers.py",
        "bench/parts.py",
        "bench/load_link.py",  # the same word for the agents of an environment
        "bench/hide_and_seek.py",
        "envs/hide_and_seek/vector.py",
        "envs/hide_and_seek/zoo.py",
        "bench/wire.py",  # to network cards, of namespaces made for a benchmark
    }


def test_wire_fits_on_two_screens():
    import inspect

    from srl.experiment import wire

    assert len(inspect.getsource(wire).splitlines()) <= 60
