"""``srl export``: a saved policy as an ONNX file, for programs that know neither SRL nor torch.

The file maps observations to the likeliest actions: fields ``obs…`` (and ``mask…`` where actions are masked) go in,
fields ``action…`` come out, each ``[batch, …]`` with any batch size. A recurrent policy also takes its memory
``state/…`` and ``first`` (True where an episode begins) and gives the memory for the next step as ``next_state/…``.
Normalisers are inside. Before the file appears it is run by onnxruntime and compared with torch.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from srl import config
from srl.core.errors import ConfigError, SrlError, UnknownName
from srl.core.specs import Array, Arrays, ArraySpec, choices_of, leaves
from srl.monitor.exporters import optional
from srl.plan import Plan, check, checkpoint_store
from srl.policies.host import load_arrays

if TYPE_CHECKING:
    from srl.algorithms.base import Algorithm

BATCHES = (1, 2, 7, 64)
"""Batch sizes the file is checked with."""
TOLERANCE = 1e-5
"""How far numbers that are not whole may differ from torch's."""
_FAR = 10.0
"""Observations the file is checked with are not larger."""
_EXAMPLE = 3
"""Batch size the policy is traced with: not 1, which would be taken for a constant."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    policy: str
    version: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    samples: int
    """Random observations whose actions were the same as torch's."""


class Greedy(torch.nn.Module):
    """A policy as a plain function of arrays: its inputs in order, the likeliest actions and the memory out."""

    def __init__(self, policy: torch.nn.Module, plan: Plan) -> None:
        super().__init__()
        self.policy, spaces = policy, plan.spaces
        self.memory = plan.algorithm.memory_spec()
        first = {"first": ArraySpec((), "|b1")} if self.memory else {}
        self.inputs = {**spaces.observation_spec(), **spaces.mask_spec(), **self.memory, **first}
        self.actions = {name: _torch_type(spec) for name, spec in spaces.action_spec().items()}
        self.outputs = (*self.actions, *(f"next_{name}" for name in self.memory))

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Outputs for ``values`` in the order of :attr:`inputs`."""
        inputs = dict(zip(self.inputs, values, strict=True))
        for name, spec in self.memory.items():
            begins = inputs["first"].reshape(-1, *[1] * len(spec.shape))
            inputs[name] = torch.where(begins, torch.zeros_like(inputs[name]), inputs[name])
        found = self.policy.act(inputs, None)  # type: ignore[operator]
        return (*(found[name].to(kind) for name, kind in self.actions.items()), *(found[n] for n in self.memory))


def export(run_dir: str | Path, path: str | Path, *, tag: str = "latest", policy: str = "") -> Exported:
    """Write a saved policy of a run (the first unless ``policy`` names one) to the ONNX file ``path``, checked."""
    for module in ("onnx", "onnxscript", "onnxruntime"):
        optional(module, "onnx", "an ONNX file")
    run_dir, path = Path(run_dir), Path(path)
    plan = _plan(run_dir, policy)
    state = checkpoint_store(run_dir, plan).load(tag)
    built = _in_float32(plan.algorithm).policy(plan.spaces)
    load_arrays(built, state.under("learner").under("policy").arrays)
    greedy, version = Greedy(built, plan).eval(), int(state.values["version"])
    about = {"policy": plan.policy, "version": version, "algorithm": plan.algorithm.name, "run": run_dir.name}
    model = _onnx(greedy, plan, {f"srl.{name}": str(value) for name, value in about.items()})
    samples = _compare(model, greedy, plan)
    _write(model, path)
    return Exported(path, plan.policy, version, tuple(greedy.inputs), greedy.outputs, samples)


def _plan(run_dir: Path, policy: str) -> Plan:
    plans = {plan.policy: plan for plan in check(config.load(run_dir)) if plan.opponent is None}
    if policy and policy not in plans:
        raise UnknownName("policy", policy, plans)
    return plans[policy or next(iter(plans))]


def _in_float32(algorithm: Algorithm) -> Algorithm:
    """The same network in the precision that every ONNX runtime has."""
    known = {field.name for field in fields(algorithm)}
    changed: dict[str, Any] = {"precision": "float32"} if "precision" in known else {}
    return replace(algorithm, **changed)


def _torch_type(spec: ArraySpec) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, spec.dtype)).dtype


def _onnx(greedy: Greedy, plan: Plan, about: dict[str, str]) -> Any:
    """The policy as an ONNX model."""
    example = tuple(_tensors(_random(plan, greedy, _EXAMPLE, np.random.default_rng(0))).values())
    batch = torch.export.Dim("batch", min=1)
    shapes = {"values": tuple({0: batch} for _ in example)}
    try:
        with _quiet(), torch.no_grad():
            # Strict, because it understands len(tensor); without it the batch size would become a constant.
            traced = torch.export.export(greedy, example, dynamic_shapes=shapes, strict=True)
            names = {"input_names": list(greedy.inputs), "output_names": list(greedy.outputs)}
            program = torch.onnx.export(traced, (), None, **names, dynamo=True, verbose=False)  # type: ignore[arg-type]
    except Exception as error:  # of torch.export, in many kinds
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"the network of policy {plan.policy!r} cannot be exported: {first} (torch.export must be able to trace it)"
        ) from error
    model = program.model_proto  # type: ignore[union-attr]
    _name_batch(model)
    for name, value in about.items():
        model.metadata_props.add(key=name, value=value)
    return model


def _name_batch(model: Any) -> None:
    """Call the first dimension of every input and output ``batch``."""
    ours = {value.type.tensor_type.shape.dim[0].dim_param for value in (*model.graph.input, *model.graph.output)}
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param and size.dim_param in ours:
                size.dim_param = "batch"


def _compare(model: Any, greedy: Greedy, plan: Plan) -> int:
    """Run the model beside torch on random observations; how many were the same."""
    runtime = optional("onnxruntime", "onnx", "an ONNX file")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        session = runtime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        rng = np.random.default_rng(1)
        for count in BATCHES:
            inputs = _random(plan, greedy, count, rng)
            with torch.inference_mode():
                wanted = greedy(*_tensors(inputs).values())
            found = session.run(list(greedy.outputs), inputs)
            for name, theirs, ours in zip(greedy.outputs, found, wanted, strict=True):
                _same(name, theirs, ours.numpy())
    except SrlError:
        raise
    except Exception as error:  # of onnxruntime, which has no common base for them
        raise SrlError(f"onnxruntime cannot run the exported policy: {' '.join(str(error).split())}") from error
    return sum(BATCHES)


def _same(name: str, theirs: Array, ours: Array) -> None:
    exact = ours.dtype.kind != "f"
    if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        raise SrlError(f"onnxruntime gives {theirs.shape} {theirs.dtype} for {name!r}, torch {ours.shape} {ours.dtype}")
    if not (np.array_equal(theirs, ours) if exact else np.allclose(theirs, ours, TOLERANCE, TOLERANCE)):
        apart = np.abs(theirs.astype(np.float64) - ours.astype(np.float64)).max()
        raise SrlError(f"onnxruntime and torch differ in {name!r} by {apart:.2g}; nothing was written")


def _random(plan: Plan, greedy: Greedy, count: int, rng: np.random.Generator) -> Arrays:
    """Random inputs: observations from the space, some actions masked out, some episodes at their beginning."""
    spaces, found = plan.spaces, {}
    spaces.observation.seed(int(rng.integers(1 << 31)))
    seen = [spaces.observation.sample() for _ in range(count)]
    for name, _, pick in leaves("obs", spaces.observation):
        values = np.stack([np.asarray(pick(each)) for each in seen])
        values = values.clip(-_FAR, _FAR) if values.dtype.kind == "f" else values  # bounds may be 1e38
        found[name] = values.astype(greedy.inputs[name].dtype)
    for name, leaf, _ in leaves("mask", spaces.action) if spaces.masked else []:
        if choices_of(leaf):
            found[name] = rng.random((count, sum(choices_of(leaf)))) < 0.6
    for name, spec in greedy.memory.items():
        found[name] = rng.normal(0, 0.5, (count, *spec.shape)).astype(spec.dtype)
    if greedy.memory:
        found["first"] = rng.random(count) < 0.3
    return {name: found[name] for name in greedy.inputs}


def _tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _write(model: Any, path: Path) -> None:
    partial = path.with_name(f".partial-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(model.SerializeToString())
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's notes to its own developers from the user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
