"""Every op on a DTensor: from arguments to payloads, through the runtime, to labelled results.

The arguments are read once. That pass collects the payloads, and the *key*: the op, the token of
each DTensor's state, and each other argument. Under its key the op's *answer* is kept, the states
of its outputs, so that a repeated op asks nobody for placements and makes no state. An answer is
used only for results of the very shapes, strides and dtypes that it was made for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta

from xla_dtensor.call_checks import check_call, is_checked
from xla_dtensor.device_mesh import DeviceMesh
from xla_dtensor.errors import ArgumentTypeError
from xla_dtensor.explaining_labels import note_op
from xla_dtensor.fused_optimizers import FUSED
from xla_dtensor.global_state import GlobalState
from xla_dtensor.known_axes import Known, joint_mesh, split
from xla_dtensor.loss_ops import state_of_loss_op, with_state_of_logits
from xla_dtensor.materializing import made_of_meta
from xla_dtensor.mixing import admit_plain, on_mesh, run_writing_to_both
from xla_dtensor.modes import current_modes
from xla_dtensor.nested import leaves
from xla_dtensor.off_mesh import is_off_mesh, off_mesh_result
from xla_dtensor.process_groups import refuse_collective
from xla_dtensor.product_factors import agreeing_factors, has_factors, may_disagree
from xla_dtensor.product_pins import pin_products
from xla_dtensor.propagation import legal_placements, propagate
from xla_dtensor.runtimes import functional_ops
from xla_dtensor.runtimes.index_bounds import refuse_part
from xla_dtensor.runtimes.op_meta import Meta, ignores_floats, output_meta, raise_torchs_error
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.strided_factors import FACTORED
from xla_dtensor.strict import constrain_output, constrain_written
from xla_dtensor.written import (
    makes_results,
    written_arguments,
    written_targets,
    written_values,
)
from xla_dtensor.written_bases import tell_bases

__all__ = ["dispatch", "new_dtensor", "state_of"]

aten = torch.ops.aten
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
_make: Callable[..., Any] = torch.Tensor._make_wrapper_subclass


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
        checked=is_checked(func),
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
    composed = FUSED.get(func)
    if composed is not None:
        return composed(*args, **kwargs)
    key: list[Any] = [func]
    found: list[Any] = []
    plain: list[Any] = []
    payloads: Any = tuple(_read(cls, args, key, found, plain))
    payload_kwargs: Any = {}
    if kwargs:
        key.extend(kwargs)
        read = _read(cls, kwargs.values(), key, found, plain)
        payload_kwargs = dict(zip(kwargs, read, strict=True))
    if plain:
        admit_plain(func, args, kwargs)
    traits = _traits.get(func) or _traits_of(func)
    if traits.ignores_floats:
        key = [part for part in key if type(part) is not float]
    if traits.checked:
        check_call(func, args, kwargs, key)
    mesh, runtime = found[0]._spec.mesh, get_runtime()
    has_values = runtime.is_payload(found[0]._local_tensor)
    if traits.by_storage and not runtime.has_strides:
        refuse_part(args[0])
    if traits.by_strides and not runtime.has_strides:
        return FACTORED[func](*args, **kwargs)
    if traits.has_factors and may_disagree(mesh, runtime, has_values):
        payloads = tuple(agreeing_factors(func, args, payloads))
    if not has_values:
        made = made_of_meta(func, args, kwargs) if traits.made_like else None
        without = made is None
        result = _run_without_values(func, payloads, payload_kwargs, mesh) if without else made
    elif plain and traits.writes:
        result = run_writing_to_both(func, payloads, payload_kwargs, mesh)
    else:
        result = runtime.run_op(func, payloads, payload_kwargs)
    if traits.returns_written or traits.reshapes:
        return _written(cls, func, traits, args, kwargs)
    is_tensor = isinstance(result, torch.Tensor)
    if not is_tensor and not (isinstance(result, (list, tuple)) and result):
        return result
    whole = tuple(key)
    try:
        state = _answers.get(whole)
        if state is None or not _fits(state, result):
            state = _keep(whole, _answer(func, args, kwargs, found, result))
    except TypeError:  # an argument that has no hash
        state = _answer(func, args, kwargs, found, result)
    modes = current_modes()
    logits = state_of_loss_op(func, args) if modes.loss_parallel else None
    if logits is not None and isinstance(result, torch.Tensor):
        own = state_of(result, logits.mesh, logits.placements, logits.known)
        return new_dtensor(cls, with_state_of_logits(result, own), own)
    if is_tensor and not traits.made_like and not modes.strict and not state.pinned:
        return new_dtensor(cls, result, state)
    return _labelled(cls, traits, result, state, modes.strict)


def _read(cls: Any, values: Any, key: list[Any], found: list[Any], plain: list[Any]) -> list[Any]:
    """Return the payloads of `values`; add to the key, the DTensors and the plain tensors."""
    payloads: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is cls or (kind not in _VALUES and _is_ours(value)):
            state = value._spec
            key.append(state.cached_token or state.token())
            found.append(value)
            payloads.append(value._local_tensor)
        elif kind is list or kind is tuple:
            key.append(kind)
            key.append(len(value))
            read = _read(cls, value, key, found, plain)
            payloads.append(read if kind is list else tuple(read))
        else:
            key.append(kind)
            key.append(value if kind in _VALUES else _described(value, plain))
            payloads.append(value)
    return payloads


def _is_ours(value: Any) -> bool:
    # Not isinstance(value, cls): cls may be one of two subclasses that meet.
    return isinstance(value, TorchDTensor) and isinstance(value._spec, GlobalState)


def _described(value: Any, plain: list[Any]) -> Any:
    if isinstance(value, torch.Tensor):
        if isinstance(value, TorchDTensor):
            _refuse_other_dtensor(value)
        plain.append(value)
        return (value.shape, value.stride(), value.dtype)
    # A number that a compiled step computes: placements do not depend on it.
    return None if isinstance(value, torch.SymFloat) else value


def _refuse_other_dtensor(value: Any) -> None:
    raise ArgumentTypeError(
        "An op was called on a DTensor of xla_dtensor and one of torch.distributed.tensor on "
        f"{value.device_mesh}. Their values lie on devices of different kinds. Pass its "
        "full_tensor() to xla_dtensor.distribute_tensor first."
    )


def _run_without_values(func: Any, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
    """Run an op on DTensors that are abstract, being traced, or on devices of other processes."""
    runtime = get_runtime()
    tensors = [v for v in leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    if any(map(runtime.is_payload, tensors)):
        return runtime.run_op(func, args, kwargs)
    if is_off_mesh(mesh):
        return off_mesh_result(func, args, kwargs)
    return functional_ops.run_traced(func, args, kwargs)


def _written(
    cls: Any, func: Any, traits: _Traits, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    if traits.reshapes and isinstance(args[0], cls):
        return args[0]._reshaped_in_place(func, args, kwargs)
    if current_modes().strict:
        constrain_written(func, args, kwargs)
    tell_bases(func, args, kwargs)
    if traits.uncounted:
        _count_writes(func, args, kwargs)
    return args[0] if traits.returns_first else written_targets(func, args, kwargs)


def _count_writes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Move the version counters, by which local views see that their tensor was written to."""
    for target in leaves(written_values(func, args, kwargs)):
        if isinstance(target, torch.Tensor) and not target.is_inference():
            torch.autograd.graph.increment_version(target)


# ---------------------------------------------------------------- results


def _keep(key: Any, state: Any) -> Any:
    if len(_answers) >= _ANSWERS_LIMIT:
        _answers.clear()
    _answers[key] = state
    return state


def _fits(state: Any, result: Any) -> bool:
    if isinstance(result, torch.Tensor):
        if not isinstance(state, GlobalState):
            return False
        meta: Any = state.tensor_meta
        if result.shape != meta.shape or result.dtype != meta.dtype:
            return False
        return not get_runtime().has_strides or result.stride() == meta.stride
    if isinstance(result, (list, tuple)):
        same = isinstance(state, list) and len(state) == len(result)
        return same and all(map(_fits, state, result))
    return state is None


def _answer(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Sequence[Any], result: Any
) -> Any:
    """Return the state of an op's output, or a list of them: None for what is no tensor."""
    mesh = found[0]._spec.mesh
    joint = joint_mesh(mesh, [tensor._spec for tensor in found])
    states = _states(propagate(func, args, kwargs, joint), result, mesh, joint)
    runtime = get_runtime()
    if not runtime.has_strides:
        meta = output_meta(func, args, kwargs)
        if meta is None and not any(part in func._schema.name for part in _KERNELS_DIFFER):
            raise_torchs_error(func, args, kwargs)
        states = _with_strides(states, meta)
    if runtime.pins_products:
        pin_products(states, func, found)
    return note_op(states, func, found)


def _states(placements: Any, result: Any, mesh: DeviceMesh, joint: DeviceMesh) -> Any:
    if isinstance(result, (list, tuple)):
        each = placements if isinstance(placements, list) else [placements] * len(result)
        each = each if len(each) == len(result) else [each[0]] * len(result)
        return [_states(p, r, mesh, joint) for p, r in zip(each, result, strict=True)]
    if not isinstance(result, torch.Tensor):
        return None
    legal = legal_placements(placements, result.ndim, joint)
    if joint is mesh:
        return state_of(result, mesh, legal)
    own, known = split(legal, joint, mesh)
    return state_of(result, mesh, own, known)


def _with_strides(states: Any, meta: Any) -> Any:
    """Return the states with torch's strides: by them torch tells a copy from a view."""
    if isinstance(states, list) and isinstance(meta, list | tuple) and len(states) == len(meta):
        return [_with_strides(*pair) for pair in zip(states, meta, strict=True)]
    if not isinstance(states, GlobalState) or not isinstance(meta, Meta):
        return states
    # nansum(dim=()) has another shape on the meta device than anywhere else.
    return states.with_stride(meta.stride) if len(meta.shape) == len(states.shape) else states


def _labelled(cls: Any, traits: _Traits, result: Any, state: Any, enforced: bool) -> Any:
    if isinstance(result, (list, tuple)):
        # Not type(result): some are named tuples, which the dispatcher makes from any sequence.
        each = [
            _labelled(cls, traits, on_mesh(r, s), s, enforced)
            for r, s in zip(result, state, strict=True)
        ]
        return each if isinstance(result, list) else tuple(each)
    if not isinstance(result, torch.Tensor):
        return result
    if (traits.made_like and not result.is_meta) or state.pinned:
        result = functional_ops.constrain(result, state.span_layout)
    elif enforced:
        result = constrain_output(result, state, traits.views)
    return new_dtensor(cls, result, state)


def state_of(
    payload: torch.Tensor, mesh: DeviceMesh, placements: tuple[Any, ...], known: Known = ()
) -> GlobalState:
    """Return the state of a DTensor over `payload`; `known` as in :mod:`xla_dtensor.known_axes`."""
    meta = TensorMeta(payload.shape, payload.stride(), payload.dtype)
    state = GlobalState(mesh, placements, tensor_meta=meta)
    if known:
        state.known = known
    return state


def new_dtensor(
    cls: Any, payload: torch.Tensor, state: GlobalState, requires_grad: bool = False
) -> Any:
    """Return a DTensor over `payload`, the runtime's tensor for the whole value."""
    device, extra = payload.device, get_runtime().extra_dispatch_keys
    keys = {} if extra is None or device.type == "meta" else {"_extra_dispatch_keys": extra}
    meta: Any = state.tensor_meta
    self = _make(
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
