"""Sinks that hand a run's numbers to other programs: Weights & Biases, and Prometheus.

Both need a package that is not installed by default. They are made before a run and begin with it::

    srl.run(experiment, "runs/mine", sinks=[WandB("project"), Prometheus(9100)])
"""

from __future__ import annotations

import contextlib
import importlib
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from srl.core.errors import ConfigError
from srl.monitor.monitor import Row, Sink

_ID = "run-id"
"""File in the folder of W&B that keeps the id, so that a resumed run goes on with it."""


def optional(module: str, extra: str, what: str) -> Any:
    """Import a package that ``what`` needs and the extra ``extra`` brings, or say in one line how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{what} needs the package {module.split('.')[0]}: pip install 'reallyscalablerl[{extra}]'"
        ) from error


class Exporter(ABC):
    """A sink that wants to know about the run before the first row comes."""

    @abstractmethod
    def begin(self, run_dir: Path, config: dict[str, Any]) -> None:
        """The run ``config`` (as in ``config.json``) begins. Raises ConfigError, and leaves nothing, if it cannot."""

    @abstractmethod
    def write(self, row: Row) -> None:
        """See :class:`~srl.monitor.monitor.Sink`."""

    def say(self, text: str) -> None:
        """See :class:`~srl.monitor.monitor.Sink`."""

    @abstractmethod
    def close(self) -> None:
        """See :class:`~srl.monitor.monitor.Sink`. May be called twice."""


@contextlib.contextmanager
def exporting(sinks: Sequence[Sink], run_dir: Path, config: dict[str, Any]) -> Iterator[None]:
    """Begin those of ``sinks`` that want to; all of them are closed in the end, whatever happens."""
    with contextlib.ExitStack() as ends:
        for sink in sinks:
            if isinstance(sink, Exporter):
                sink.begin(run_dir, config)
                ends.callback(sink.close)
        yield


class WandB(Exporter):
    """Weights & Biases: every row with its steps. Its files lie in ``wandb/`` in the run's folder.

    ``WANDB_MODE=offline`` in the environment keeps it off the network; ``wandb sync`` uploads later.
    """

    def __init__(self, project: str) -> None:
        self.project, self._last = project, 0
        self._run: Any = None
        self._wandb = optional("wandb", "wandb", "--wandb")

    def begin(self, run_dir: Path, config: dict[str, Any]) -> None:
        """See :class:`Exporter`."""
        folder = run_dir / "wandb"
        new = [path for path in (folder, run_dir) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)  # W&B would take another folder if there were none
        id_ = (folder / _ID).read_text() if (folder / _ID).is_file() else None
        settings = self._wandb.Settings(silent=True, console="off", save_code=False)
        try:
            self._run = self._wandb.init(
                project=self.project,
                name=run_dir.name,
                dir=str(run_dir),
                config=config,
                id=id_,
                resume="allow" if id_ else None,
                reinit="create_new",
                settings=settings,
            )
        except Exception as error:  # no key, no network, a project that may not be written to
            for path in new:
                shutil.rmtree(path, ignore_errors=True)
            raise ConfigError(
                f"W&B did not begin: {error}; log in with `wandb login`, or set WANDB_MODE=offline"
            ) from error
        (folder / _ID).write_text(self._run.id)
        self._last = 0

    def write(self, row: Row) -> None:
        """See :class:`~srl.monitor.monitor.Sink`."""
        self._last = max(self._last, int(row.values["steps"]))  # W&B refuses to go back, as after a trainer's restart
        self._run.log({**row.values, "bottleneck": row.bottleneck}, step=self._last)

    def close(self) -> None:
        """See :class:`~srl.monitor.monitor.Sink`."""
        if self._run is not None:
            self._run.finish()
            self._run = None


class Prometheus(Exporter):
    """Gauges ``srl_<metric>`` at ``http://127.0.0.1:<port>/metrics`` while a run goes on (port 0: any free one).

    A slash in a metric's name becomes an underscore; a policy's name becomes the label ``policy``.
    """

    def __init__(self, port: int = 0) -> None:
        if not 0 <= port <= 65535:
            raise ConfigError(f"--prometheus needs a port between 1 and 65535, got {port}")
        self.port = port
        self._client = optional("prometheus_client", "prometheus", "--prometheus")
        self._core = optional("prometheus_client.core", "prometheus", "--prometheus")
        self._values: dict[str, float] = {}
        self._policies: Collection[str] = ()
        self._about: dict[str, str] = {}
        self._server: Any = None

    def begin(self, run_dir: Path, config: dict[str, Any]) -> None:
        """See :class:`Exporter`."""
        self._policies = {*config["algorithm"], *config["opponents"]}
        self._about = {"run": str(run_dir), "env": str(next(iter(config["env"].values())))}
        self._values = {}
        registry = self._client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = self._client.start_http_server(self.port, "127.0.0.1", registry)
        except OSError as error:
            raise ConfigError(f"--prometheus cannot use port {self.port}: {error}") from error
        self.port = self._server.server_port

    def collect(self) -> Iterator[Any]:
        """What the endpoint shows; called by the server's threads."""
        about = self._core.Metric("srl_run_info", "What runs.", "gauge")
        about.add_sample("srl_run_info", self._about, 1.0)
        yield about
        for name, by_policy in gauges(self._values, self._policies).items():
            gauge = self._core.Metric(name, "See docs/metrics.md.", "gauge")
            for policy, value in by_policy.items():
                gauge.add_sample(name, {"policy": policy} if policy else {}, value)
            yield gauge

    def write(self, row: Row) -> None:
        """See :class:`~srl.monitor.monitor.Sink`."""
        self._values = row.values  # a row is never changed, so a server's thread may read it meanwhile

    def close(self) -> None:
        """See :class:`~srl.monitor.monitor.Sink`."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None


def gauges(values: dict[str, float], policies: Collection[str]) -> dict[str, dict[str, float]]:
    """A row's values as ``{gauge: {policy: value}}``; what belongs to no policy has the policy ``""``."""
    found: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        metric, _, last = name.rpartition("/")
        if not metric or last not in policies:
            metric, last = name, ""
        found.setdefault("srl_" + re.sub(r"\W", "_", metric, flags=re.ASCII), {})[last] = value
    return found
