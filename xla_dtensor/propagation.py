"""Placements of op outputs: PyTorch's own ShardingPropagator, asked on a shadow mesh.

Ops run on global tensors, so their values are right whatever the placements; what PyTorch would
have said of the output is a *label*. It is computed by PyTorch's propagator on a shadow mesh of
device type "cpu" (the propagator consults device handles that "xla" does not have, and only shapes
matter), and it is never enforced.

An op without a rule gets Replicate, with one log line per op; where a rule exists but refuses the
placements on all mesh axes together, each axis is asked about alone. Answers are cached per op,
argument description and mesh.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

from mesh_utils import Mesh
from xla_dtensor.core import Layout, LayoutError
from xla_dtensor.device_mesh import DeviceMesh, as_device_mesh
from xla_dtensor.known_axes import Known, known_placements, placements_on
from xla_dtensor.nested import leaves, map_nested
from xla_dtensor.strided_labels import with_strides
from xla_dtensor.whole_op_labels import WHOLE_OP_LABELS

__all__ = ["Placements", "legal_placements", "propagate"]

Placements = tuple[Any, ...]
logger = logging.getLogger("xla_dtensor")
aten = torch.ops.aten

_SAME_AS_FIRST = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.contiguous.default,
}
_MANY = 16
_cache: dict[Any, Any] = {}
_CACHE_LIMIT = 50_000
_logged: set[Any] = set()


def propagate(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: DeviceMesh) -> Any:
    """Return the placements of the op's outputs.

    Args:
        func: An ``OpOverload``.
        args: Its arguments, DTensors in place.
        kwargs: Its keyword arguments.
        mesh: The mesh to express the answer on.

    Returns:
        One tuple of placements for all outputs, or a list with one (or None) per output.
    """
    if func in _SAME_AS_FIRST:
        return _placements(args[0], mesh)
    described_args, described_kwargs = map_nested(
        lambda v: _describe(v, mesh), (tuple(args), dict(kwargs))
    )
    try:
        key = (func, mesh, _hashable(described_args), _hashable(described_kwargs))
        hash(key)
    except TypeError:
        return _ask(func, described_args, described_kwargs, mesh)
    if key not in _cache:
        if len(_cache) >= _CACHE_LIMIT:
            _cache.clear()
        _cache[key] = _ask(func, described_args, described_kwargs, mesh)
    return _cache[key]


def known_of_results(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    given: Sequence[Known],
    span: Mesh,
    result: Any,
) -> list[Known]:
    """Return what is known of each result of an op on LocalViews, besides what is in their region.

    Args:
        func: An ``OpOverload``.
        args: Its arguments, LocalViews in place.
        kwargs: Its keyword arguments.
        given: What is known of each view.
        span: The mesh over all devices.
        result: A tensor or a sequence of results.
    """
    named = {axis for known in given for axis, _ in known}
    mesh = as_device_mesh(span[tuple(axis for axis in span.axis_names if axis in named)])
    several = not isinstance(result, torch.Tensor)
    placements = propagate(func, args, kwargs, mesh)
    results = list(result) if several else [result]
    each = placements if isinstance(placements, list) else [placements] * len(results)
    each = each if len(each) == len(results) else [each[0]] * len(results)
    found: list[Known] = []
    for answer, one in zip(each, results, strict=True):
        ndim = one.ndim if isinstance(one, torch.Tensor) else 0
        legal = legal_placements(answer, ndim, mesh)
        pairs = zip(mesh.value.axis_names, legal, strict=True)
        found.append(tuple((axis, p.dim) for axis, p in pairs if type(p) is Shard))
    return found


def _placements(value: torch.Tensor, mesh: DeviceMesh) -> Placements:
    if isinstance(value, TorchDTensor):
        return placements_on(value._spec, mesh)  # pyright: ignore[reportArgumentType]
    return known_placements(getattr(value, "_known", ()), mesh)


class _Described(tuple):
    """(placements, shape, stride, dtype) of one DTensor argument."""

    __slots__ = ()


def _describe(value: Any, mesh: DeviceMesh) -> Any:
    if isinstance(value, TorchDTensor):
        placements = _placements(value, mesh)
        return _Described((placements, value.shape, value.stride(), value.dtype))
    if isinstance(value, torch.Tensor):
        placements = _placements(value, mesh)
        return _Described((placements, value.shape, value.stride(), value.dtype))
    if isinstance(value, torch.SymFloat):
        return 0.5
    return value


def _hashable(value: Any) -> Any:
    if isinstance(value, _Described):
        # In torch 2.9 a _StridedShard equals the Shard of its dim, and has its hash.
        return (*map(type, value[0]), *value)
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *map(_hashable, value))
    if isinstance(value, dict):
        return tuple((k, _hashable(v)) for k, v in value.items())
    return (type(value), value)


def _ask(func: Any, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
    replicated = (Replicate(),) * mesh.ndim
    described = [v for v in leaves((args, kwargs)) if isinstance(v, _Described)]
    # torch's rules for views do not end on empty shapes, of which there is nothing to place.
    if all(d[0] == replicated for d in described) or any(0 in d[1] for d in described):
        return replicated
    if func in WHOLE_OP_LABELS:
        return WHOLE_OP_LABELS[func](mesh.ndim, args)
    if func is aten.stack.default and len(args[0]) > _MANY and not any(d[1] for d in described):
        return _ask_by_parts(args, kwargs, mesh)
    # The propagator raises half a dozen types for ops and shapes that it has no rule for. A label
    # is never needed for a right value, so none of them may stop the program.
    try:
        # torch.compile may be tracing; the question is answered outside of its graph.
        with _disable_current_modes():
            return _from_propagator(func, args, kwargs, mesh)
    except NotImplementedError as error:
        _log_once(func, error)
        return replicated
    except Exception as error:
        return _axis_by_axis(func, args, kwargs, mesh, error)


def _ask_by_parts(args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
    """Ask about a stack of many 0-dim tensors, the norms of all gradients, in a few at a time.

    torch goes through the operands and keeps what they have come to, so that may stand for those
    before. Asked about all at once torch 2.9 compares each with each: a second for 400.
    """
    operands, *rest = args
    answer = _ask(aten.stack.default, (operands[:_MANY], *rest), kwargs, mesh)
    for start in range(_MANY, len(operands), _MANY):
        before = _Described((answer, *operands[0][1:]))
        part = [before, *operands[start : start + _MANY]]
        answer = _ask(aten.stack.default, (part, *rest), kwargs, mesh)
    return answer


def _axis_by_axis(func: Any, args: Any, kwargs: Any, mesh: DeviceMesh, error: Exception) -> Any:
    """Ask about one mesh axis at a time, the others replicated; put the answers together."""
    answers = []
    for axis in range(mesh.ndim):

        def only(value: Any, axis: int = axis) -> Any:
            if not isinstance(value, _Described):
                return value
            placements = [Replicate()] * mesh.ndim
            placements[axis] = value[0][axis]
            return _Described((tuple(placements), *value[1:]))

        alone_args, alone_kwargs = map_nested(only, (args, kwargs))
        try:
            with _disable_current_modes():
                answers.append(_from_propagator(func, alone_args, alone_kwargs, mesh))
        except Exception:
            answers.append(None)
    given = next((a for a in answers if a is not None), None)
    if given is None:
        _log_once(func, error)
    if isinstance(given, list):
        return [_merged([a and a[i] for a in answers]) for i in range(len(given))]
    return _merged(answers)


def _merged(answers: Sequence[Any]) -> Placements:
    """Take from each axis's answer the placement on that axis."""
    return tuple(
        Replicate() if answer is None or len(answer) != len(answers) else answer[axis]
        for axis, answer in enumerate(answers)
    )


def legal_placements(placements: Any, ndim: int, mesh: DeviceMesh) -> Placements:
    """Return a label that says something of a tensor with `ndim` dims on `mesh`.

    Some of torch's rules answer for another number of axes (constant_pad_nd in 2.9) or dims (norm
    in 2.13), some with a Partial that carries state of torch's own run (embedding), and some keep a
    stride that has lost its meaning (view in 2.13). Such placements become plain, or Replicate.

    Args:
        placements: torch's answer; None where it has none.
        ndim: The output's number of dims.
        mesh: The mesh that the label refers to.

    Returns:
        One placement per mesh axis, which together are a tiling of the tensor.
    """
    if isinstance(placements, list):
        placements = placements[0]
    if placements is None or len(placements) != mesh.ndim:
        return (Replicate(),) * mesh.ndim
    legal = tuple([_legal(placement, ndim) for placement in placements])
    if any(isinstance(p, _StridedShard) for p in legal) and not _is_tiling(legal, ndim, mesh):
        return tuple(Replicate() if isinstance(p, _StridedShard) else p for p in legal)
    return legal


def _legal(placement: Any, ndim: int) -> Any:
    if placement.is_partial():
        return placement if type(placement) is Partial else Partial(placement.reduce_op)
    return placement if getattr(placement, "dim", -1) < ndim else Replicate()


def _is_tiling(placements: Placements, ndim: int, mesh: DeviceMesh) -> bool:
    try:
        Layout.from_placements(placements, ndim, mesh.value).op_sharding()
    except LayoutError:
        return False
    return True


def _log_once(func: Any, error: Exception) -> None:
    if func not in _logged:
        _logged.add(func)
        logger.info(
            "No placement rule for %s (%s); its outputs are labelled Replicate. Values are not "
            "affected.",
            func,
            type(error).__name__,
        )


def _from_propagator(func: Any, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
    shadow = _shadow_mesh(mesh.value)
    propagator = TorchDTensor._op_dispatcher.sharding_propagator

    def to_spec(value: Any) -> Any:
        if not isinstance(value, _Described):
            return value
        placements, shape, stride, dtype = value
        return DTensorSpec(shadow, placements, tensor_meta=TensorMeta(shape, stride, dtype))

    schema_args, schema_kwargs = map_nested(to_spec, (args, kwargs))
    info = propagator.op_to_schema_info.get(func)
    info = info or getattr(propagator, "op_to_schema_info_for_single_dim_strategy", {}).get(func)
    schema = OpSchema(func, schema_args, schema_kwargs, schema_info=info)
    output = propagator.propagate_op_sharding_non_cached(schema).output_spec
    if output is None:
        return (Replicate(),) * mesh.ndim
    given = [v[0] for v in leaves((args, kwargs)) if isinstance(v, _Described)]
    if isinstance(output, DTensorSpec):
        return with_strides(output.placements, given)
    return with_strides([None if spec is None else spec.placements for spec in output], given)


@lru_cache(maxsize=64)
def _shadow_mesh(mesh: Mesh) -> TorchDeviceMesh:
    # torch skips process groups for "xla" only; the type is changed afterwards.
    shadow = TorchDeviceMesh("xla", torch.arange(mesh.size()).reshape(mesh.mesh_shape))
    name = "_device_type" if "_device_type" in vars(shadow) else "device_type"
    vars(shadow)[name] = "cpu"
    shadow._coordinate_on_dim = [0] * mesh.ndim  # pyright: ignore
    shadow._dim_group_names = []  # pyright: ignore
    shadow._rank = 0  # pyright: ignore
    _prepare_cost_model(shadow)
    return shadow


def _prepare_cost_model(shadow: TorchDeviceMesh) -> None:
    """Let torch compute (and cache) the mesh's topology without a process group."""
    from torch.distributed.device_mesh import _mesh_resources
    from torch.distributed.tensor._collective_utils import MeshTopoInfo

    answers: dict[str, Callable[[str], int]] = {
        "num_hosts": lambda _: 1,
        "num_devices_per_host": lambda _: shadow.size(),
    }
    _mesh_resources.__dict__.update(answers)
    try:
        MeshTopoInfo.build_from_mesh(shadow)
    finally:
        for name in answers:
            del _mesh_resources.__dict__[name]
