"""Every op on a DTensor: from arguments to payloads, through the runtime, to labelled results.

The arguments are read once. That pass collects the payloads, and the *key*: the op, the token of
each DTensor's state, and each other argument. Under its key the op's *answer* is kept, the states
of its outputs, so that a repeated op asks nobody for placements and makes no state. An answer is
used only for results of the very shapes, strides and dtypes that it was made for.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.utils.hooks import unserializable_hook

from xla_dtensor.core import Layout
from xla_dtensor.core.errors import (
    ArgumentTypeError,
    MixedTensorsError,
    RuntimeSetupError,
    UnsupportedOpError,
    WriteError,
)
from xla_dtensor.dtensor.labels import (
    GlobalState,
    OuterCuts,
    joint_mesh,
    labels_of_outputs,
    legal_placements,
    note_op,
    propagate,
    split,
)
from xla_dtensor.dtensor.mesh import DeviceMesh, is_off_mesh, off_mesh_result, refuse_collective
from xla_dtensor.dtensor.modes import (
    constrain_output,
    constrain_written,
    current_modes,
    state_of_loss_op,
    with_state_of_logits,
)
from xla_dtensor.dtensor.products import (
    FUSED,
    agreeing_factors,
    has_factors,
    may_disagree,
    pin_products,
)
from xla_dtensor.runtimes import functional, scalars
from xla_dtensor.runtimes.bounds import refuse_part
from xla_dtensor.runtimes.functional import FACTORED
from xla_dtensor.runtimes.nested import leaves, map_nested
from xla_dtensor.runtimes.op_meta import (
    Meta,
    error_of,
    ignores_floats,
    output_meta,
    raise_torchs_error,
    small,
)
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.torch_own import make_wrapper
from xla_dtensor.runtimes.written import (
    makes_results,
    refuse_overlap,
    written_arguments,
    written_targets,
    written_values,
)

__all__ = ["check_dispatch", "dispatch", "new_dtensor", "state_of", "tell_outer_cuts"]


# ----------------------------------------------------------------------------------- Dispatch check
#
# Does this torch hand a DTensor subclass's ops to the subclass? Asked once, at import.
#
# From torch 2.10 on, ops on DTensors are dispatched in C++. Versions 2.10 to 2.12 take that path
# for subclasses too, past an overridden ``__torch_dispatch__``: every op would then run PyTorch's
# own DTensor logic on a global tensor that it believes to be local, and be wrong without an error.
# A version number does not tell builds apart, so a probe decides.


def check_dispatch(base: type[torch.Tensor] = TorchDTensor) -> None:
    """Raise unless an op on a subclass of `base` reaches the subclass.

    Raises:
        RuntimeSetupError: It does not.
    """
    calls: list[Any] = []

    class Probe(base):
        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(func)
            return torch.zeros(())

    probe = torch.Tensor._make_wrapper_subclass(Probe, (), dtype=torch.float32)
    try:
        torch.ops.aten.neg.default(probe)
    except Exception:
        calls.clear()  # the other path ran, and stumbled over a probe without a spec
    if not calls:
        raise RuntimeSetupError(
            f"xla_dtensor was imported with torch {torch.__version__}. This torch dispatches ops "
            "on DTensor subclasses in C++, past the subclass, and results would be wrong without "
            "an error. Install torch 2.9 (with torch_xla) or torch 2.13 or newer."
        )


# ----------------------------------------- A DTensor with values, made like one on the meta device
#
# What module.to_empty() asks for.
#
# A model too large for one host is built on the meta device, its parameters are distributed there,
# and then get their memory, shard by shard::
#
#     with torch.device("meta"):
#         model = Model()
#     distribute_module(model, mesh, partition_fn)      shapes and placements, no values
#     model.to_empty(device="xla")                      memory on the mesh, nothing on the host
#     load_or_initialize(model)

aten = torch.ops.aten
_FILLS = {
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.empty_like.default: 0,
    aten.rand_like.default: "uniform",
    aten.randn_like.default: "normal",
}


def made_of_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Make a payload that lies like a DTensor on the meta device; None where it has no values."""
    like, device = args[0], kwargs.get("device")
    if device is None or torch.device(device).type == "meta" or is_off_mesh(like._spec.mesh):
        return None
    if not like._local_tensor.is_meta or functional.is_traced(like._local_tensor):
        return None
    fill = args[1] if func is aten.full_like.default else _FILLS[func]
    dtype = kwargs.get("dtype") or like.dtype
    return get_runtime().make(fill, tuple(like.shape), dtype, like._spec.layout)


# ------------------------------------------ Plain tensors among the arguments of an op on DTensors
#
# DTensors are global here, so a plain tensor beside one has a single meaning: its value, the same
# on every device. Masks, position ids and caches made inside a model's forward are such tensors.
# They enter as Replicate, with one log line per op. ``implicit_replication(False)`` gives PyTorch's
# rule instead, under which only tensors of one element pass.

logger = logging.getLogger("xla_dtensor")
_logged: set[Any] = set()


def admit_plain(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Let plain tensors among an op's arguments pass, with a log line, or refuse them."""
    if not current_modes().implicit and not torch._C._get_dtensor_allow_implicit_replication():
        _apply_torchs_rule(func, args, kwargs)
    elif func not in _logged:
        _log(func, args, kwargs)


def _apply_torchs_rule(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for place, tensor in _plain_tensors(func, args, kwargs):
        if tensor.numel() != 1:
            raise MixedTensorsError(
                f"{func} was called on DTensors and a plain torch.Tensor of "
                f"shape={tuple(tensor.shape)} as {place}. This is "
                "implicit_replication(False), which is PyTorch's rule: got mixed torch.Tensor and "
                "DTensor. Pass distribute_tensor(tensor, mesh), or allow it with "
                "implicit_replication()."
            )
        if tensor.ndim == 1:
            warnings.warn(
                f"{func}: found a non-scalar tensor with numel=1 and ndim!=0 as {place}, we are "
                "implicitly creating a replicated DTensor for it. Change it to a scalar tensor or "
                "create a DTensor explicitly.",
                UserWarning,
                stacklevel=5,
            )


def _log(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    # One element is a number in a tensor's clothing: PyTorch lets it pass without a word.
    arrays = [pair for pair in _plain_tensors(func, args, kwargs) if pair[1].numel() != 1]
    if arrays:
        _logged.add(func)
        place, tensor = arrays[0]
        logger.info(
            "%s was called on DTensors and a plain torch.Tensor of shape=%s as %s; it counts as "
            "Replicate: its value, the same on every device.",
            func,
            tuple(tensor.shape),
            place,
        )


def _plain_tensors(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each plain tensor with a description of the argument that it is."""
    # On a device with a backend of its own, torch itself makes plain tensors of numbers, for
    # instance for x[:, 2] = 7.0.
    runtime = get_runtime()
    if func is torch.ops.aten.copy_.default and torch.device(runtime.torch_device).type != "cpu":
        args = [None if i and runtime.is_payload(v) else v for i, v in enumerate(args)]
    names = [argument.name for argument in func._schema.arguments]
    for position, argument in enumerate(args):
        name = names[position] if position < len(names) else "?"
        yield from _plain_in(argument, f"argument {position} ({name!r})")
    for name, argument in kwargs.items():
        yield from _plain_in(argument, f"argument {name!r}")


def _plain_in(argument: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(argument, (list, tuple)):
        for index, element in enumerate(argument):
            yield from _plain_in(element, f"item {index} of {place}")
    elif isinstance(argument, torch.Tensor) and not isinstance(argument, TorchDTensor):
        yield place, argument


def run_writing_to_both(cls: Any, func: Any, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
    """Run an op that writes, with plain tensors among its arguments.

    A runtime writes to payloads, or to plain tensors. Where an op such as ``_foreach_add_`` writes
    to both, plain ones are written to by way of payloads of their own.
    """
    runtime = get_runtime()
    written = [t for t in leaves(written_values(func, args, kwargs)) if t is not None]
    host = [t for t in written if not runtime.is_payload(t)]
    put = partial(_replicated, cls, mesh=mesh)
    missed = [tensor for tensor in host if runtime.note_write_to_host(tensor, put)]
    if missed:
        returned = written[: len(func._schema.returns)]
        return returned[0] if len(returned) == 1 else tuple(returned) or None
    if not host or len(host) == len(written):
        return runtime.run_op(func, args, kwargs)

    stand_ins = {id(tensor): _replicated(cls, tensor, mesh)._local_tensor for tensor in host}
    args, kwargs = map_nested(lambda v: stand_ins.get(id(v), v), (args, kwargs))
    output = runtime.run_op(func, args, kwargs)
    for tensor in host:
        runtime.run_op(torch.ops.aten.copy_.default, (tensor, stand_ins[id(tensor)]), {})
    return output


def _take_plain_gradients(dtensors: Sequence[Any]) -> None:
    """Where plain tensors are written to, the gradients of what is written come back plain."""
    for source in dtensors if torch.is_grad_enabled() else ():
        hooks = (source._backward_hooks or {}).values()
        if source.requires_grad and not any(getattr(h, "func", 0) is _gradient_on for h in hooks):
            hook = partial(_gradient_on, type(source), source._spec.mesh)
            source.register_hook(unserializable_hook(hook))  # saving it needs no warning


def _gradient_on(cls: Any, mesh: DeviceMesh, gradient: torch.Tensor) -> torch.Tensor:
    if isinstance(gradient, TorchDTensor):
        return gradient
    return cls.from_local(gradient, mesh, (Replicate(),) * mesh.ndim)


def _replicated(cls: Any, tensor: torch.Tensor, mesh: DeviceMesh) -> Any:
    placements = (Replicate(),) * mesh.ndim
    layout = Layout.from_placements(placements, tensor.ndim, mesh.value)
    payload = get_runtime().put(tensor, layout)
    return new_dtensor(cls, payload, state_of(payload, mesh, placements))


def on_mesh(output: Any, state: GlobalState | None) -> Any:
    """Return one of an op's results as a payload.

    A ``_foreach_`` op gives plain results for the plain tensors in its lists.
    """
    if type(output) is not torch.Tensor or state is None or output.device.type != "cpu":
        return output
    if get_runtime().is_payload(output) or torch._is_functional_tensor(output):  # pyright: ignore
        return output
    return get_runtime().put(output, state.span_layout)


# --------------------------------- Does PyTorch take a call? Asked of PyTorch itself, on stand-ins
#
# XLA takes calls that PyTorch refuses::
#
#     x.fill_(300)        of int8; and 1j written to float32: a number that the dtype does not hold
#     x ** -1             of whole numbers
#     mask - x            of bools
#     x.add_(wider)       whose result does not fit its destination
#     maximum(x, y)       of complex numbers, and x.abs_()
#
# In-place ops and ops with ``out=`` keep their destination: the object, its shape, dtype and
# placements. PyTorch makes ``out`` another shape, with a warning, where that does not fit: here
# that is an error too, because ``out`` lies on the mesh as it was told to.
#
# Each description of arguments is asked about once.

# Ops that write to nothing, of which PyTorch refuses some bools and numbers.
_CHECKED = {
    *(aten.sub, aten.rsub, aten.neg, aten.clamp, aten.masked_fill, aten.index_fill, aten.scatter),
    *(aten.full_like, aten.heaviside, aten.new_full, aten.pow),
    *(aten.maximum, aten.minimum, aten.fmax, aten.fmin),
}
# What PyTorch raises of a destination; a stand-in may raise other things that do not matter.
_OF_RESULTS = ("can't be cast to", "doesn't match the broadcast shape")
_OF_ARGUMENTS = (
    "without overflow",
    "a bool tensor is not supported",
    "Converting complex Scalar",
    "for tensors with different dtypes",
    "negative integer powers",
)
_OF_COMPLEX = ("not implemented for complex", "not supported for complex")
_checked: set[Any] = set()
_CHECKED_LIMIT = 50_000


def check_call(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], key: Sequence[Any]
) -> None:
    """Raise where PyTorch does not take a call that XLA would.

    `key` tells the call apart from others, shapes and dtypes included: each is asked about once.
    """
    try:
        cache_key = tuple(key)
        if cache_key in _checked:
            return
    except TypeError:  # an argument that has no hash
        cache_key = None
    _check(func, args, kwargs)
    if cache_key is not None:
        if len(_checked) >= _CHECKED_LIMIT:
            _checked.clear()
        _checked.add(cache_key)


def _check(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if func._schema.is_mutable:
        # torch_xla adds up what is written to elements that share a place.
        refuse_overlap(func, args, kwargs, fills=get_runtime().has_strides)
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return
    outs = {a.name: kwargs[a.name] for a in func._schema.arguments if a.is_out and a.name in kwargs}
    # PyTorch's meta kernels know of shapes, and cast where those for values refuse. An op may raise
    # anything on values that are not its own: such errors say nothing.
    for stand_in in (_on_meta, small) if func._schema.is_mutable else (small,):
        stand_ins = map_nested(stand_in, (tuple(args), dict(kwargs)))
        # An empty destination takes any shape without a warning.
        empty = map_nested(lambda v, make=stand_in: _emptied(make(v)), outs)
        error = error_of(func, stand_ins[0], {**stand_ins[1], **empty})
        text = str(error)
        if any(refusal in text for refusal in _OF_RESULTS):
            raise WriteError(
                f"{func} was called on DTensors: {error}. An op that writes keeps the shape and "
                "dtype of its destination. Use the op that returns its result, or cast first."
            )
        if error is not None and any(refusal in text for refusal in _OF_COMPLEX):
            raise error
        if any(refusal in text for refusal in _OF_ARGUMENTS):
            kind = WriteError if func._schema.is_mutable else UnsupportedOpError
            raise kind(
                f"{func} was called on DTensors of dtypes that do not go with it: "
                f"{text.rstrip('.')}. Plain PyTorch refuses it too. Convert the tensor first, or "
                "pass a number that its dtype holds."
            )
        if error is None and stand_in is _on_meta:
            for name, out in outs.items():
                _check_shapes(func, f"{name}=", out, empty[name])
            if not outs and torch.Tag.inplace_view not in func.tags:
                destinations = written_values(func, args, kwargs)
                _check_shapes(func, "a destination", destinations, written_values(func, *stand_ins))


def _check_shapes(func: Any, name: str, destination: Any, output: Any) -> None:
    if isinstance(destination, (list, tuple)):
        for pair in zip(destination, output, strict=True):
            _check_shapes(func, name, *pair)
    elif isinstance(destination, torch.Tensor) and destination.shape != output.shape:
        raise WriteError(
            f"{func} was called with {name} of shape={tuple(destination.shape)}, and its result "
            f"has shape={tuple(output.shape)}. A destination lies on the mesh as it was told to, "
            "and keeps its shape. Pass one of the result's shape, or use the result without out=."
        )


def _on_meta(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def _emptied(leaf: Any) -> Any:
    return leaf.new_empty(0) if isinstance(leaf, torch.Tensor) else leaf


# ---------------------------------------------------------------- Writes through views of DTensors
#
# What the base is labelled is told to the runtime.
#
# On a runtime whose write through a view answers with a new value for the base, nothing says any
# more how that lies, and XLA may leave it replicated. The base's label says it::
#
#     y = x * 2          [Shard(0)], never annotated: XLA chose
#     y.view(-1)[3] = 1  y has a new value, of which y's label is all that is known


def tell_bases(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Tell the runtime how the bases of the views lie that an op wrote to.

    A label without a Shard is left out: it may only mean that nothing is known.
    """
    targets = [args[i] if i < len(args) else kwargs.get(name) for i, name in _written_places(func)]
    for target in leaves(targets):
        base = target._base if isinstance(target, torch.Tensor) else None
        state = None if base is None else getattr(base, "_spec", None)
        if base is None or not isinstance(state, GlobalState) or not _says_something(state):
            continue
        payload, runtime = base._local_tensor, get_runtime()  # pyright: ignore
        if runtime.is_payload(payload):
            runtime.annotate_written(payload, state.span_layout)


@lru_cache(4096)
def _written_places(func: Any) -> tuple[tuple[int, str], ...]:
    """The places and names of the arguments that an op writes to."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write)


def tell_outer_cuts(tensor: Any) -> None:
    """Tell the runtime how a DTensor lies of which more is known than its mesh says."""
    state, runtime = tensor._spec, get_runtime()
    if state.outer_cuts and _says_something(state) and runtime.is_payload(tensor._local_tensor):
        runtime.annotate_written(tensor._local_tensor, state.span_layout)


def _says_something(state: GlobalState) -> bool:
    placements = state.placements
    is_sharded = bool(state.outer_cuts) or any(isinstance(p, Shard) for p in placements)
    return is_sharded and not any(p.is_partial() for p in placements)


# --------------------------------------------------------------------------- Every op on a DTensor

_MADE_LIKE = frozenset(
    {
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
        aten.rand_like.default,
        aten.randn_like.default,
        aten.randint_like.default,
        aten.randint_like.low_dtype,
    }
)
# Which read or write a tensor by its storage, beyond it where it is a view of a larger one.
_BY_STORAGE = frozenset(
    {aten.as_strided.default, aten.as_strided_.default, aten.as_strided_scatter.default}
)
# What tells ops apart by its value. 1, 1.0 and True are equal, so the type goes with it.
_VALUES = frozenset({int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout})
_answers: dict[Any, Any] = {}
_ANSWERS_LIMIT = 50_000


@dataclass(frozen=True)
class _Traits:
    """What dispatch asks of an op's schema, which takes microseconds to answer.

    Args:
        writes: It writes to arguments.
        returns_written: It returns what it wrote to, or nothing.
        returns_first: It returns its first argument.
        reshapes: It changes the shape of its first argument.
        views: What it returns shares its values with an argument.
        made_like: It makes a tensor that lies as its first argument.
        uncounted: torch does not count the write on every device type.
        ignores_floats: How its outputs lie does not depend on the value of a float, which may be
            another in each step of a training.
        has_factors: It is a product of two tensors.
        by_storage: It goes by the storage of its first argument.
        by_strides: Its results depend on the strides of its first argument.
        checked: Calls of it have to be checked.
    """

    writes: bool
    returns_written: bool
    returns_first: bool
    reshapes: bool
    views: bool
    made_like: bool
    uncounted: bool
    ignores_floats: bool
    has_factors: bool
    by_storage: bool
    by_strides: bool
    checked: bool


_traits: dict[Any, _Traits] = {}
# What these refuse depends on the device: which kernel of attention there is, targets of uint8.
_KERNELS_DIFFER = ("attention", "nll_loss", "view_copy")


def _traits_of(func: Any) -> _Traits:
    refuse_collective(func)
    schema, written = func._schema, written_arguments(func)
    returns_written = schema.is_mutable and not makes_results(func)
    first = schema.arguments[0].name if schema.arguments else ""
    traits = _Traits(
        writes=schema.is_mutable,
        returns_written=returns_written,
        returns_first=returns_written and bool(schema.returns) and written == [first],
        reshapes=torch.Tag.inplace_view in func.tags,
        views=not schema.is_mutable and any(r.alias_info is not None for r in schema.returns),
        made_like=func in _MADE_LIKE,
        uncounted=schema.is_mutable and schema.name.startswith("aten::_foreach_"),
        ignores_floats=ignores_floats(func),
        has_factors=has_factors(func),
        by_storage=func in _BY_STORAGE,
        by_strides=func in FACTORED,
        checked=schema.is_mutable or func.overloadpacket in _CHECKED,
    )
    return _traits.setdefault(func, traits)


def dispatch(cls: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one op, below autograd.

    Args:
        cls: The DTensor class, for the arguments and the results.
        func: An ``OpOverload``.
        args: Its arguments, with a DTensor among them.
        kwargs: Its keyword arguments.

    Returns:
        What PyTorch returns, with DTensors in place of tensors.
    """
    if scalars.in_use:
        args, kwargs = scalars.settled(func, args, kwargs)
    composed = FUSED.get(func)
    if composed is not None:
        return composed(*args, **kwargs)
    key: list[Any] = [func]
    dtensors: list[Any] = []
    plain: list[Any] = []
    payloads: Any = tuple(_read(cls, args, key, dtensors, plain))
    payload_kwargs: Any = {}
    if kwargs:
        key.extend(kwargs)
        argument_payloads = _read(cls, kwargs.values(), key, dtensors, plain)
        payload_kwargs = dict(zip(kwargs, argument_payloads, strict=True))
    if plain:
        admit_plain(func, args, kwargs)
    traits = _traits.get(func) or _traits_of(func)
    if traits.ignores_floats:
        key = [part for part in key if type(part) is not float]
    if traits.checked:
        check_call(func, args, kwargs, key)
    mesh, runtime = dtensors[0]._spec.mesh, get_runtime()
    has_values = runtime.is_payload(dtensors[0]._local_tensor)
    if traits.by_storage and not runtime.has_strides:
        refuse_part(args[0])
    if traits.by_strides and not runtime.has_strides:
        return FACTORED[func](*args, **kwargs)
    if traits.has_factors and may_disagree(mesh, runtime, has_values):
        payloads = tuple(agreeing_factors(func, args, payloads))
    if not has_values:
        output = made_of_meta(func, args, kwargs) if traits.made_like else None
        if output is None:
            output = _run_without_values(func, payloads, payload_kwargs, mesh)
    elif plain and traits.writes:
        _take_plain_gradients(dtensors)
        output = run_writing_to_both(cls, func, payloads, payload_kwargs, mesh)
    else:
        output = runtime.run_op(func, payloads, payload_kwargs)
    if traits.returns_written or traits.reshapes:
        return _finish_write(cls, func, traits, args, kwargs)
    is_tensor = isinstance(output, torch.Tensor)
    if not is_tensor and not (isinstance(output, (list, tuple)) and output):
        return output
    cache_key = tuple(key)
    try:
        state = _answers.get(cache_key)
        if state is None or not _fits(state, output):
            state = _answer(func, args, kwargs, dtensors, output)
            if len(_answers) >= _ANSWERS_LIMIT:
                _answers.clear()
            _answers[cache_key] = state
    except TypeError:  # an argument that has no hash
        state = _answer(func, args, kwargs, dtensors, output)
    modes = current_modes()
    logits = state_of_loss_op(func, args) if modes.loss_parallel else None
    if logits is not None and isinstance(output, torch.Tensor):
        state = state_of(output, logits.mesh, logits.placements, logits.outer_cuts)
        return new_dtensor(cls, with_state_of_logits(output, state), state)
    if is_tensor and not traits.made_like and not modes.strict and not state.pinned:
        return new_dtensor(cls, output, state)
    return _wrap_outputs(cls, traits, output, state, modes.strict)


def _read(
    cls: Any, arguments: Any, key: list[Any], dtensors: list[Any], plain: list[Any]
) -> list[Any]:
    """Return the payloads of `arguments`; add to the key, the DTensors and the plain tensors."""
    payloads: list[Any] = []
    for argument in arguments:
        kind = type(argument)
        # Not isinstance(argument, cls): cls may be one of two subclasses that meet.
        is_dtensor = kind is cls or (
            kind not in _VALUES
            and isinstance(argument, TorchDTensor)
            and isinstance(argument._spec, GlobalState)
        )
        if is_dtensor:
            state: Any = argument._spec
            key.append(state.cached_token or state.token())
            dtensors.append(argument)
            payloads.append(argument._local_tensor)
        elif kind is list or kind is tuple:
            key.append(kind)
            key.append(len(argument))
            elements = _read(cls, argument, key, dtensors, plain)
            payloads.append(elements if kind is list else tuple(elements))
        else:
            key.append(kind)
            key.append(argument if kind in _VALUES else _describe_argument(argument, plain))
            payloads.append(argument)
    return payloads


def _describe_argument(argument: Any, plain: list[Any]) -> Any:
    if isinstance(argument, torch.Tensor):
        if isinstance(argument, TorchDTensor):
            raise ArgumentTypeError(
                "An op was called on a DTensor of xla_dtensor and one of torch.distributed.tensor "
                f"on {argument.device_mesh}. Their values lie on devices of different kinds. Pass "
                "its full_tensor() to xla_dtensor.distribute_tensor first."
            )
        plain.append(argument)
        return (argument.shape, argument.stride(), argument.dtype)
    # A number that a compiled step computes: placements do not depend on it.
    return scalars.stand_in(argument)


def _run_without_values(func: Any, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
    """Run an op on DTensors that are abstract, being traced, or on devices of other processes."""
    runtime = get_runtime()
    tensors = [v for v in leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    if any(map(runtime.is_payload, tensors)):
        return runtime.run_op(func, args, kwargs)
    if is_off_mesh(mesh):
        return off_mesh_result(func, args, kwargs)
    return functional.run_traced(func, args, kwargs)


def _finish_write(
    cls: Any, func: Any, traits: _Traits, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    if traits.reshapes and isinstance(args[0], cls):
        return args[0]._reshaped_in_place(func, args, kwargs)
    if current_modes().strict:
        constrain_written(func, args, kwargs)
    tell_bases(func, args, kwargs)
    if traits.uncounted:
        # By their version counters local views see that their tensors were written to.
        for target in leaves(written_values(func, args, kwargs)):
            if isinstance(target, torch.Tensor) and not target.is_inference():
                torch.autograd.graph.increment_version(target)
    return args[0] if traits.returns_first else written_targets(func, args, kwargs)


# ---------------------------------------------------------------- results


def _fits(state: Any, output: Any) -> bool:
    if isinstance(output, torch.Tensor):
        if not isinstance(state, GlobalState):
            return False
        meta: Any = state.tensor_meta
        if output.shape != meta.shape or output.dtype != meta.dtype:
            return False
        return not get_runtime().has_strides or output.stride() == meta.stride
    if isinstance(output, (list, tuple)):
        is_as_long = isinstance(state, list) and len(state) == len(output)
        return is_as_long and all(map(_fits, state, output))
    return state is None


def _answer(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtensors: Sequence[Any], output: Any
) -> Any:
    """Return the state of an op's output, or a list of them: None for what is no tensor."""
    mesh = dtensors[0]._spec.mesh
    joint = joint_mesh(mesh, [tensor._spec for tensor in dtensors])
    states = _states(propagate(func, args, kwargs, joint), output, mesh, joint)
    runtime = get_runtime()
    if not runtime.has_strides:
        meta = output_meta(func, args, kwargs)
        if meta is None and not any(part in func._schema.name for part in _KERNELS_DIFFER):
            raise_torchs_error(func, args, kwargs)
        states = _with_strides(states, meta)
    if runtime.pins_products:
        pin_products(states, func, dtensors)
    return note_op(states, func, dtensors)


def _states(placements: Any, output: Any, mesh: DeviceMesh, joint: DeviceMesh) -> Any:
    if isinstance(output, (list, tuple)):
        labels = labels_of_outputs(placements, len(output))
        return [_states(p, r, mesh, joint) for p, r in zip(labels, output, strict=True)]
    if not isinstance(output, torch.Tensor):
        return None
    legal = legal_placements(placements, output.ndim, joint)
    if joint is mesh:
        return state_of(output, mesh, legal)
    label, outer_cuts = split(legal, joint, mesh)
    return state_of(output, mesh, label, outer_cuts)


def _with_strides(states: Any, meta: Any) -> Any:
    """Return the states with torch's strides: by them torch tells a copy from a view."""
    if isinstance(states, list) and isinstance(meta, list | tuple) and len(states) == len(meta):
        return [_with_strides(*pair) for pair in zip(states, meta, strict=True)]
    if not isinstance(states, GlobalState) or not isinstance(meta, Meta):
        return states
    # nansum(dim=()) has another shape on the meta device than anywhere else.
    return states.with_stride(meta.stride) if len(meta.shape) == len(states.shape) else states


def _wrap_outputs(cls: Any, traits: _Traits, output: Any, state: Any, enforced: bool) -> Any:
    if isinstance(output, (list, tuple)):
        # Not type(result): some are named tuples, which the dispatcher makes from any sequence.
        dtensors = [
            _wrap_outputs(cls, traits, on_mesh(r, s), s, enforced)
            for r, s in zip(output, state, strict=True)
        ]
        return dtensors if isinstance(output, list) else tuple(dtensors)
    if not isinstance(output, torch.Tensor):
        return output
    if (traits.made_like and not output.is_meta) or state.pinned:
        output = functional.constrain(output, state.span_layout, is_new=traits.made_like)
    elif enforced:
        output = constrain_output(output, state, traits.views)
    return new_dtensor(cls, output, state)


def state_of(
    payload: torch.Tensor, mesh: DeviceMesh, placements: tuple[Any, ...], outer_cuts: OuterCuts = ()
) -> GlobalState:
    """Return the state of a DTensor over `payload`; `outer_cuts` as in GlobalState."""
    meta = TensorMeta(payload.shape, payload.stride(), payload.dtype)
    state = GlobalState(mesh, placements, tensor_meta=meta)
    if outer_cuts:
        state.outer_cuts = outer_cuts
    return state


def new_dtensor(
    cls: Any, payload: torch.Tensor, state: GlobalState, requires_grad: bool = False
) -> Any:
    """Return a DTensor over `payload`, the runtime's tensor for the whole value."""
    device, extra = payload.device, get_runtime().extra_dispatch_keys
    keys = {} if extra is None or device.type == "meta" else {"_extra_dispatch_keys": extra}
    meta: Any = state.tensor_meta
    self = make_wrapper(
        cls,
        payload.shape,
        strides=meta.stride,
        storage_offset=payload.storage_offset(),
        dtype=payload.dtype,
        layout=payload.layout,
        device=device,
        requires_grad=requires_grad,
        **keys,
    )
    self._spec = state
    self._local_tensor = payload
    return self
