"""torch.compile of code with DTensors: what torch asks of a tensor subclass.

A DTensor enters a graph as its payload; mesh and placements are constants of the graph, and
guarded: a call with others compiles anew. AOTAutograd traces the very code that runs eagerly, on
stand-ins for payloads (see :mod:`xla_dtensor.runtimes.functional`), so a compiled function
gives what the eager one gives::

    @torch.compile(backend="aot_eager", fullgraph=True)
    def f(x):
        return x.redistribute(mesh, [Shard(0), Replicate()]).relu()

    graph:  %c = xla_dtensor.constrain(%payload, "(dp, -) on (dp=2, tp=4) #0");  aten.relu(%c)

Inductor, torch.compile's default backend, and others write kernels that read a tensor's memory, of
which a payload has none here. A function that meets a DTensor is not theirs: it runs op by op, in a
step of ``xla_dtensor.compile`` as a part of the program.

Gradients: a compiled backward expects of each incoming gradient the placements that its output had.
A gradient is a whole value, so one with other placements is only labelled anew; no data moves.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate
from torch.utils import _pytree as pytree

from xla_dtensor.core.errors import DistributeError
from xla_dtensor.dtensor.labels import OuterCuts, Placements
from xla_dtensor.dtensor.mesh import DeviceMesh, mesh_text
from xla_dtensor.runtimes.functional import Names

if TYPE_CHECKING:
    from xla_dtensor.dtensor.dtensor import DTensor

__all__ = [
    "called_in_graph",
    "coerced_tangent",
    "distribute_in_graph",
    "flatten",
    "leave_to_python",
    "never_read",
    "one_call",
    "unflatten",
]

logger = logging.getLogger("xla_dtensor")
_told: set[str] = set()  # of which backends a user has been warned


# ----------------------------------------------- Functions of one tensor that Dynamo records whole
#
# One call in its graph, of a tensor and a text.
#
# Dynamo cannot read what most of our functions do with meshes and placements. Marked here, a
# function is a single call in the graph; everything but the tensor is a constant that the text
# names, and is guarded: a call with another mesh compiles anew. The function itself runs when
# AOTAutograd traces the graph::
#
#     @one_call
#     def psum(x, axis): ...
#
#     graph:  %psum = call(%view, "psum #0")

P = ParamSpec("P")
T = TypeVar("T")
_functions: dict[str, Callable[..., Any]] = {}
_calls = Names("call")


def one_call(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function, as a decorator. Its first argument is the tensor.

    Args:
        function: Takes constants (numbers, texts, meshes, placements) besides.

    Returns:
        A function that does the same, and can be called in compiled code.
    """
    name, first = function.__name__, next(iter(inspect.signature(function).parameters))
    _functions[name] = function

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        if args:
            return called_in_graph(name, args[0], args[1:], kwargs)
        options = {key: option for key, option in kwargs.items() if key != first}
        return called_in_graph(name, kwargs[first], (), options)

    return called


def called_in_graph(name: str, tensor: Any, args: Any, kwargs: Any) -> Any:
    """Call a marked function in code that Dynamo reads.

    Args:
        name: The function's name.
        tensor: Its first argument.
        args: The other positional arguments.
        kwargs: The keyword arguments.
    """
    return _call(tensor, _named(name, args, kwargs))


def _named(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Run, not traced, by Dynamo, which guards on the arguments."""
    torch.compiler.allow_in_graph(_call)
    call = _real((name, tuple(args), dict(kwargs)))
    return _calls.name(call, name, _key(call))


# What torch.compiler.assume_constant_result does, without importing Dynamo for it.
_named._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _call(tensor: Any, call: str) -> Any:
    name, args, kwargs = _calls.value(call)
    return _functions[name](tensor, *args, **kwargs)


def real_mesh(mesh: Any) -> Any:
    """Return the mesh behind the stand-in that newer versions of torch trace with."""
    return getattr(mesh, "real_obj", mesh)


def _real(argument: Any) -> Any:
    if isinstance(argument, Mapping):
        return {key: _real(element) for key, element in argument.items()}
    if type(argument) in (tuple, list):
        return type(argument)(map(_real, argument))
    return real_mesh(argument)


def _key(argument: Any) -> Hashable:
    """Return what tells constants apart: 1 and 1.0, and in torch 2.9 kinds of Shard, are equal."""
    if isinstance(argument, Mapping):
        return (dict, tuple((key, _key(element)) for key, element in argument.items()))
    if type(argument) in (tuple, list):
        return (type(argument), tuple(map(_key, argument)))
    return (type(argument), argument)


# ------------------------------------------------------------- torch.compile of code with DTensors

# torch >= 2.10 knows DeviceMesh as an object that graphs may hold, and wants it beside the payload.
_MESH_IS_OPAQUE = find_spec("torch._library.opaque_object") is not None


_targets = Names("mesh and placements")


class FlatState:
    """What a compiled graph has to know of a DTensor beside its payload."""

    def __init__(self, spec: Any, requires_grad: bool) -> None:
        self.mesh: DeviceMesh = spec.mesh
        self.placements: Placements = spec.placements
        self.outer_cuts: OuterCuts = spec.outer_cuts
        self.requires_grad = requires_grad
        # In torch 2.9 a _StridedShard equals the Shard of its dim, so types are compared as well.
        kinds = tuple(map(type, self.placements))
        self._key = (self.mesh, self.placements, kinds, self.outer_cuts, requires_grad)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlatState) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"FlatState({self.placements} on {mesh_text(self.mesh.value)})"


class _Parts(tuple[Any, ...]):
    """The same beside a mesh: the four parts that torch insists on, and what they do not say.

    Args:
        parts: Placements, meta, shard order, and whether a gradient is required.
        outer_cuts: Which of the axes that the mesh lacks cut which dim.
    """

    outer_cuts: OuterCuts

    def __new__(cls, parts: tuple[Any, ...], outer_cuts: OuterCuts = ()) -> _Parts:
        self = super().__new__(cls, parts)
        self.outer_cuts = outer_cuts
        return self

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and self.outer_cuts == getattr(other, "outer_cuts", ())

    def __hash__(self) -> int:
        return hash((tuple(self), self.outer_cuts))

    def __reduce__(self) -> Any:
        return (_Parts, (tuple(self), self.outer_cuts))


_frames: Any = torch._C._dynamo.eval_frame  # pyright: ignore[reportAttributeAccessIssue]
_SKIPPED = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
_READS_MEMORY = ("inductor", "cudagraphs")


def leave_to_python() -> None:
    """Let Dynamo leave code alone that meets a tensor on a mesh, and would go to Inductor.

    Raises:
        Exception: Of Dynamo's, which runs the code then, and does not look at what that calls.
            With ``fullgraph=True`` it is an error.
    """
    tracers: Any = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        tracer = tracers.InstructionTranslator.current_tx()
        backend = getattr(tracer.output.compiler_fn, "__name__", "")
    except AttributeError:  # Dynamo is not here, or reads nothing at present.
        return
    if backend not in _READS_MEMORY:
        return
    text = (
        f"torch.compile with backend={backend!r} met a tensor on a mesh. It would write kernels "
        "that read the tensor's memory, which lies on the mesh's devices."
    )
    if backend not in _told and not tracer.one_graph:
        _told.add(backend)
        logger.warning("%s Such code runs op by op. xla_dtensor.compile(step) compiles.", text)
    from torch._dynamo.exc import Unsupported

    error: Any = Unsupported(
        f"{text} Leave fullgraph=True out, and call xla_dtensor.compile on the whole step, or pass "
        "backend='aot_eager'."
    )
    if not tracer.one_graph:
        error.frame_exec_strategy = _SKIPPED  # which torch 2.9 does not ask
    raise error


def never_read(function: Any) -> None:
    """Let Dynamo skip a function, and what it calls, where that runs beside a graph."""
    _frames.set_code_exec_strategy(function.__code__, _SKIPPED)


def flatten(tensor: DTensor) -> tuple[list[str], Any]:
    """Return the names of the inner tensors, and what else is needed to put them together."""
    leave_to_python()
    spec = tensor._spec
    if _MESH_IS_OPAQUE:
        order = getattr(spec, "shard_order", None)
        parts = (spec.placements, spec.tensor_meta, order, tensor.requires_grad)
        return ["_local_tensor", "device_mesh"], _Parts(parts, spec.outer_cuts)
    return ["_local_tensor"], FlatState(spec, tensor.requires_grad)


def unflatten(
    kind: type[DTensor], inner: dict[str, Any], state: Any, stride: Sequence[int]
) -> DTensor:
    """Put together what :func:`flatten` took apart."""
    if isinstance(state, FlatState):
        mesh, placements, requires_grad = state.mesh, state.placements, state.requires_grad
        outer_cuts = state.outer_cuts
    else:
        mesh, placements, requires_grad = real_mesh(inner["device_mesh"]), state[0], state[3]
        outer_cuts = getattr(state, "outer_cuts", ())
    payload = inner["_local_tensor"]
    return kind._wrapping(payload, mesh, placements, requires_grad, outer_cuts, tuple(stride))


def coerced_tangent(tensor: DTensor, state: Any = None, expected_type: type | None = None) -> Any:
    """Return an incoming gradient as a compiled backward expects it.

    Args:
        tensor: The gradient.
        state: What :func:`flatten` gave for the expected one; None: only nothing may be pending.
        expected_type: Its type, where that is not the gradient's.

    Returns:
        The gradient over the same payload; None where no such is possible.
    """
    kind, spec = type(tensor), tensor._spec
    if expected_type is torch.Tensor:
        return tensor.full_tensor()
    if expected_type is not None:
        if not issubclass(expected_type, TorchDTensor):
            return None
        kind: Any = expected_type
    if state is None:
        placements = tuple(Replicate() if p.is_partial() else p for p in spec.placements)
        return (
            tensor
            if placements == spec.placements
            else kind._wrapping(
                tensor._local_tensor, spec.mesh, placements, outer_cuts=spec.outer_cuts
            )
        )
    mesh = state.mesh if isinstance(state, FlatState) else spec.mesh
    placements = state.placements if isinstance(state, FlatState) else state[0]
    outer_cuts = getattr(state, "outer_cuts", ())
    return kind._wrapping(tensor._local_tensor, mesh, placements, outer_cuts=outer_cuts)


def distribute_in_graph(tensor: torch.Tensor, device_mesh: Any, placements: Any) -> DTensor:
    """Do what distribute_tensor does, in a function that Dynamo reads: one call with one tensor."""
    return _distribute(tensor, _target(device_mesh, placements))


def _target(device_mesh: Any, placements: Any) -> str:
    """Run, not traced, by Dynamo, which guards on the arguments."""
    torch.compiler.allow_in_graph(_distribute)
    # Not checked here: Dynamo would report an error as one of its own.
    mesh = real_mesh(device_mesh)
    placements = None if placements is None else tuple(placements)
    kinds = None if placements is None else tuple(map(type, placements))
    target = (mesh, placements)
    return _targets.name(target, f"{placements} on {mesh}", (*target, kinds))


# What torch.compiler.assume_constant_result does, without importing Dynamo for it.
_target._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _distribute(tensor: torch.Tensor, target: str) -> DTensor:
    from xla_dtensor.dtensor.api import distribute_tensor

    if tensor.requires_grad:
        raise DistributeError(
            f"distribute_tensor was called inside torch.compile with a tensor of "
            f"shape={tuple(tensor.shape)} that requires grad. The DTensor would be a leaf of its "
            "own, which a compiled function cannot return. Distribute parameters outside of it."
        )
    mesh, placements = _targets.value(target)
    if mesh is None:
        raise DistributeError(
            "distribute_tensor was called without a mesh inside torch.compile. A compiled function "
            "would go on using the mesh of the block that is open now. Pass device_mesh=."
        )
    return distribute_tensor(tensor, mesh, placements)


if not _MESH_IS_OPAQUE:
    # What register_constant does for Dynamo. Not all of it: a mesh among arguments that torch
    # flattens (local_map's, for one) has to stay a leaf.
    pytree.CONSTANT_NODES.add(DeviceMesh)
