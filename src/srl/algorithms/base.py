"""What an algorithm is to the rest of the system.

An :class:`Algorithm` is a frozen dataclass of hyper-parameters that can build a policy and a learner. The module it
lives in must not import torch at the top: the controller and light actors read hyper-parameters and block fields
from it and never load torch. See ``ppo.py`` for a whole one.
"""

from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from srl.core.errors import ConfigError
from srl.core.slab import STEP_FIELDS, Batch, BlockSpec
from srl.core.specs import Array, Arrays, ArraySpec, Spaces
from srl.core.worker import State

if TYPE_CHECKING:
    import torch

    from srl.algorithms.adam import Adam

Interrupted = Callable[[], bool]
"""Says whether an update should be abandoned half-way because the run is ending."""


class Peers(Protocol):
    """All trainers of a policy, as one of them sees them. They make the same calls in the same order."""

    size: int
    """How many there are."""

    def sum(self, *tensors: torch.Tensor) -> None:
        """Add up each of ``tensors`` over all trainers, in place."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """What all trainers gave, one after the other."""


class Learner(ABC):
    """Changes a policy by training on batches. Lives in the trainer."""

    policy: torch.nn.Module
    peers: Peers | None = None
    """The policy's trainers, if there are several: each trains on its share of every minibatch (see `parallel`)."""
    version: int = 0
    """Of the weights it is about to change; the trainer says so before every update."""
    priorities: Array | None = None
    """How much is still to be learned from each sample of the last batch; goes back to a prioritized buffer."""

    @abstractmethod
    def prepare(self, batch: Batch) -> Any:
        """What can be computed before it is the batch's turn; may run in another thread, changes nothing."""

    @abstractmethod
    def train(self, prepared: Any, steps: int, interrupted: Interrupted) -> dict[str, float] | None:
        """One update; ``steps`` were trained on before. Returns metrics, or None if it was abandoned."""

    @abstractmethod
    def state(self) -> State:
        """Copies of all that changes: weights under ``policy/``, optimiser, random generators, normalisers."""

    @abstractmethod
    def load_state(self, state: State) -> None:
        """Go on where ``state`` was taken."""


@dataclass(frozen=True)
class Replay:
    """What a buffer worker between actors and trainer is to do."""

    kind: str = "uniform"
    """fifo: pass every block on once. uniform, prioritized: keep samples and draw from them."""
    capacity: int = 50_000
    """Steps kept; the oldest go first."""
    warmup: int = 1_000
    """Steps there must be before any is drawn."""
    batch: int = 64
    """Samples drawn at a time: the rows of one block for the trainer."""
    samples_per_insert: float = 0.0
    """How often a step is drawn, on average (0: as it comes). Both sides are held back to keep it."""
    n_step: int = 1
    """Rewards summed up before the value of what follows is used."""
    gamma: float = 0.99
    """Discount of these rewards."""
    window: int = 0
    """Steps of a sample, as they were, with a memory's state before the first (0: one step, and what became of it)."""
    stride: int = 1
    """Steps between the starts of two windows of a block."""
    burn_in: int = 0
    """Steps of a window that only serve to remember."""
    teams: bool = False
    """Whether the agents of one copy of the environment are drawn together."""
    alpha: float = 0.6
    """prioritized: a sample is drawn with a probability proportional to its priority to this power."""
    beta: float = 0.4
    """prioritized: how much of the bias of that is corrected (1: all)."""
    errors: bool = False
    """prioritized: whether actors write ``q_taken`` and ``q_best``, from which a new sample gets its priority."""
    relabel: str = ""
    """module:function that changes a block ``{field: [horizon + 1, rows, …]}`` in place before it is used."""
    keep: bool = False
    """Save the samples with the run, so that a resumed run goes on with them."""


@dataclass(frozen=True)
class Algorithm(ABC):
    """Hyper-parameters, and how to build what they describe."""

    name: ClassVar[str]
    parallel: ClassVar[bool] = False
    """Whether its learner can be one of several: it then sums gradients over :attr:`Learner.peers`."""

    horizon: int = 128
    """Steps in a block: what an actor collects before handing over."""
    max_staleness: int = 1
    """How many versions old samples may be when trained on. 0: synchronous, 1: collect while training."""
    reuse: int = 1
    """How many updates each batch is used for."""
    relabel: str = ""
    """module:function that changes a block ``{field: [horizon + 1, rows, …]}`` in place before it is trained on."""

    def check(self, spaces: Spaces, batch_steps: int) -> None:
        """Raise ConfigError if these hyper-parameters make no sense for such spaces and batches."""
        self.check_least(horizon=1, max_staleness=0, reuse=1)
        if self.relabel:
            load_object(self.relabel, f"{self.name}.relabel")

    def check_least(self, **least: float) -> None:
        """Raise ConfigError if one of the named fields is less than it may be."""
        for field, bound in least.items():
            if getattr(self, field) < bound:
                raise ConfigError(f"{self.name}.{field} must be at least {bound}, got {getattr(self, field)}")

    def check_above(self, *fields: str) -> None:
        """Raise ConfigError if one of the named fields is not greater than 0."""
        for field in fields:
            if getattr(self, field) <= 0:
                raise ConfigError(f"{self.name}.{field} must be greater than 0, got {getattr(self, field)}")

    def check_share(self, *fields: str) -> None:
        """Raise ConfigError if one of the named fields is not between 0 and 1."""
        for field in fields:
            if not 0 <= getattr(self, field) <= 1:
                raise ConfigError(f"{self.name}.{field} must be between 0 and 1, got {getattr(self, field)}")

    def check_choice(self, field: str, *known: str) -> None:
        """Raise ConfigError if the field is none of the known words."""
        if getattr(self, field) not in known:
            words = ", ".join(repr(word) for word in known)
            raise ConfigError(f"{self.name}.{field} must be one of {words}, got {getattr(self, field)!r}")

    @abstractmethod
    def outputs(self) -> dict[str, ArraySpec]:
        """Fields the policy writes beside the action."""

    def memory_spec(self) -> dict[str, ArraySpec]:
        """The memory of a recurrent policy, fields ``state/…``; kept every :attr:`chunk_steps` steps."""
        return {}

    @property
    def chunk_steps(self) -> int:
        """Steps between two places where a block keeps the policy's memory."""
        return self.horizon

    def replay(self) -> Replay | None:
        """What a buffer worker between actors and trainer does; None: there is none."""
        return Replay("fifo", relabel=self.relabel) if self.relabel else None

    @abstractmethod
    def policy(self, spaces: Spaces) -> torch.nn.Module:
        """A policy: a module with ``act(inputs, generator) -> {field: tensor}`` for the action and :meth:`outputs`.

        A recurrent one finds its memory among the inputs and returns it moved on.
        """

    @abstractmethod
    def learner(self, spaces: Spaces, seed: int, device: str) -> Learner:
        """A learner with a freshly initialised policy."""

    def block(self, spaces: Spaces, rows: int) -> BlockSpec:
        """The shape of this algorithm's blocks."""
        seen = {**spaces.observation_spec(), **spaces.mask_spec()}
        fields = {**seen, **spaces.action_spec(), **self.outputs(), **self.memory_spec(), **STEP_FIELDS}
        chunk = self.chunk_steps if self.memory_spec() else 0
        return BlockSpec(fields, self.horizon, rows, chunk, spaces.agents)


@dataclass(frozen=True)
class NetworkOptions:
    """Hyper-parameters of the networks that come with SRL."""

    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers."""
    activation: str = "tanh"
    """tanh, relu or elu."""
    precision: str = "float32"
    """Of the network's encoders: float32, bfloat16, or auto (bfloat16 where the processor is fast at it)."""
    network: str = ""
    """module:Class of a network of one's own that turns observations into features."""
    memory: str = ""
    """Recurrent layer after the encoder: lstm, gru, or none."""
    memory_size: int = 64
    """Width of the recurrent layer."""
    chunk: int = 16
    """With memory: steps gradients flow back through; a block is trained on in chunks of as many."""

    @property
    def own_network(self) -> bool:
        """Whether the network is one of SRL's own, which change nothing in themselves when they are used."""
        return not self.network or self.network.startswith("srl.")

    def check_network(self, algorithm: Algorithm) -> None:
        """Raise ConfigError if one of these makes no sense."""
        algorithm.check_choice("activation", "tanh", "relu", "elu")
        algorithm.check_choice("precision", "float32", "bfloat16", "auto")
        algorithm.check_choice("memory", "", "lstm", "gru")
        if self.network:
            load_object(self.network, f"{algorithm.name}.network")
        if self.memory and (self.chunk < 1 or algorithm.horizon % self.chunk):
            name, horizon = algorithm.name, algorithm.horizon
            raise ConfigError(f"{name}.horizon {horizon} must be a multiple of {name}.chunk {self.chunk}")

    def memory_fields(self) -> dict[str, ArraySpec]:
        """What the recurrent layer remembers."""
        parts = {"": (), "gru": ("h",), "lstm": ("h", "c")}[self.memory]
        return {f"state/{part}": ArraySpec((self.memory_size,), "<f4") for part in parts}


def load_object(path: str, what: str) -> Any:
    """What ``module:name`` stands for."""
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{what} {path!r} cannot be imported as module:name: {error}") from error
    return found


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Makes what torch draws by itself, such as first weights, follow from ``seed``, and nothing else."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class TorchLearner(Learner):
    """A learner with one optimiser and one random generator; what a checkpoint needs of it."""

    networks: ClassVar[tuple[str, ...]] = ("policy",)
    """Names of its networks, which a checkpoint needs."""
    optimizers: ClassVar[tuple[str, ...]] = ("optimizer",)
    """Names of its optimisers."""

    optimizer: Adam | torch.optim.Optimizer
    generator: torch.Generator
    device: str

    def anneal(self, lr: float, over: int, steps: int) -> float:
        """Set the learning rate, lowered linearly to 0 over ``over`` steps (0: as it is); which share is left."""
        if not over:
            return 1.0
        left = max(0.0, 1 - steps / over)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * left
        return left

    def stops(self, interrupted: Interrupted) -> bool:
        """Whether to stop half-way, which all trainers of the policy decide together."""
        import torch

        stop = interrupted()
        return stop if self.peers is None else bool(self.peers.gather(torch.tensor(stop, dtype=torch.uint8)).any())

    def gather(self, batch: Batch, rows: Array, fields: Sequence[str]) -> dict[str, torch.Tensor]:
        """These entries of the batch as tensors."""
        import torch

        where = torch.from_numpy(batch.positions[rows])
        return {name: torch.from_numpy(batch.slab.flat[name]).index_select(0, where).to(self.device) for name in fields}

    def state(self) -> State:
        """See :class:`Learner`."""
        from srl.policies.host import arrays_of

        state = State({"generator": self.generator.get_state().numpy().copy()})
        for name in self.networks:
            state.put(name, State({key: array.copy() for key, array in arrays_of(getattr(self, name)).items()}))
        for name in self.optimizers:
            state.put(name, State(optimizer_state(getattr(self, name))))
        return state

    def load_state(self, state: State) -> None:
        """See :class:`Learner`."""
        import torch

        from srl.policies.host import load_arrays

        for name in self.networks:
            load_arrays(getattr(self, name), state.under(name).arrays)
        for name in self.optimizers:
            load_optimizer_state(getattr(self, name), state.under(name).arrays)
        self.generator.set_state(torch.from_numpy(state.arrays["generator"].copy()))


def optimizer_state(optimizer: Adam | torch.optim.Optimizer) -> Arrays:
    """The optimiser's moments as arrays (copies)."""
    import torch

    found = {}
    for index, moments in optimizer.state_dict()["state"].items():
        for name, value in moments.items():
            found[f"{index}/{name}"] = torch.as_tensor(value).detach().cpu().numpy().copy()
    return found


def load_optimizer_state(optimizer: Adam | torch.optim.Optimizer, arrays: Arrays) -> None:
    """Put back what :func:`optimizer_state` saved; learning rates stay as configured."""
    import torch

    moments: dict[int, dict[str, torch.Tensor]] = {}
    for path, value in arrays.items():
        index, name = path.split("/")
        moments.setdefault(int(index), {})[name] = torch.from_numpy(value.copy())
    state = optimizer.state_dict()
    state["state"] = moments
    optimizer.load_state_dict(state)
