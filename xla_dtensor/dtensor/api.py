"""distribute_tensor and distribute_module: put tensors and modules on a mesh."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from xla_dtensor.core import Layout, layout_of_op_sharding, local_shape
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import ArgumentTypeError, DistributeError, UnsupportedOpError
from xla_dtensor.dtensor import dynamo
from xla_dtensor.dtensor.dispatch import new_dtensor, state_of
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.local import LocalView
from xla_dtensor.dtensor.mesh import (
    DeviceMesh,
    as_device_mesh,
    current_mesh,
    is_off_mesh,
    mesh_text,
)
from xla_dtensor.dtensor.redistribute import checked_placements, torch_placements
from xla_dtensor.runtimes import functional
from xla_dtensor.runtimes.registry import get_runtime

__all__ = [
    "compute_local_shape_and_global_offset",
    "distribute_module",
    "distribute_tensor",
    "follow_parameters",
    "map_parts",
    "parameter_in_place_of",
    "parts_of",
]


# What runs eagerly beside a graph is no code of the user's.
for _method in (DTensor.__torch_dispatch__, LocalView.__torch_dispatch__):
    dynamo.never_read(_method)


# --------------------------------------------------------- distribute_tensor and distribute_module

_MARK = "_distribute_module_applied"


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Put a tensor on the mesh.

    Args:
        tensor: A leaf tensor, equal in every process. It is copied, never changed. A meta tensor
            stays abstract. One that is made of tensors, as torchao's quantized ones are, stays what
            it is, of DTensors.
        device_mesh: The mesh; that of the open ``with mesh:`` block when None.
        placements: One per mesh axis (Shard, Replicate), or one alias entry per tensor dim, e.g.
            ``("dp", None)``. None replicates.
        src_data_rank: Accepted for torch's signature: every process passes the same values.

    Returns:
        A DTensor that requires grad if `tensor` does.

    Raises:
        DistributeError: Wrong mesh or placements, or a DTensor that lies otherwise.
        ArgumentTypeError: Not a tensor, or no mesh.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> from torch.distributed.tensor import Shard
        >>> mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        >>> xd.distribute_tensor(torch.arange(16), mesh, [Shard(0)])
        DTensor(shape=(16,), dtype=int64, placements=(S(0)), mesh=(dp=8), local_shape=(2,))
    """
    if torch.compiler.is_dynamo_compiling():
        return dynamo.distribute_in_graph(tensor, device_mesh, placements)
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(
            f"distribute_tensor was called with an object of type={type(tensor).__name__}. Only a "
            "tensor can be put on a mesh. Pass torch.as_tensor(value)."
        )
    mesh = current_mesh("distribute_tensor") if device_mesh is None else as_device_mesh(device_mesh)
    canonical = checked_placements(
        "distribute_tensor", placements, mesh, tensor.ndim, partial=False
    )
    if isinstance(tensor, DTensor):
        return _check_distributed(tensor, mesh, canonical)
    if not tensor.is_leaf:
        raise DistributeError(
            f"distribute_tensor was called with a tensor of shape={tuple(tensor.shape)} that has "
            "an autograd history. Its gradient would end at the copy, in silence. Pass a leaf "
            "tensor, or tensor.detach()."
        )
    if parts_of(tensor):
        return _distribute_parts(tensor, mesh, canonical)
    layout = Layout.from_placements(canonical, tensor.ndim, mesh.value)
    payload = _put(tensor.detach(), layout, mesh)
    state = state_of(payload, mesh, canonical)
    return new_dtensor(DTensor, payload, state, tensor.requires_grad)


def _put(tensor: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    runtime = get_runtime()
    if (tensor.is_meta and not runtime.is_abstract) or is_off_mesh(mesh):
        return torch.empty_like(tensor, device="meta")
    if runtime.is_payload(tensor):
        return runtime.constrain(tensor, layout)
    if functional.is_traced(tensor):
        return functional.put(tensor, layout)
    if tensor.device.type not in ("cpu", "meta") or tensor.layout != torch.strided:
        raise DistributeError(
            f"distribute_tensor was called with a tensor on device={tensor.device}, "
            f"layout={tensor.layout}. Values are taken from dense host memory. Pass tensor.cpu(), "
            "or tensor.to_dense()."
        )
    return runtime.put(tensor, layout)


def _check_distributed(tensor: DTensor, mesh: DeviceMesh, placements: tuple[Any, ...]) -> DTensor:
    # By layout: in torch 2.9 a _StridedShard equals the Shard of its dim.
    layout = Layout.from_placements(placements, tensor.ndim, mesh.value)
    if tensor.device_mesh == mesh and tensor.mesh_layout == layout:
        return tensor
    raise DistributeError(
        f"distribute_tensor was called with {tensor!r} and placements={list(placements)} on the "
        f"mesh {mesh_text(mesh.value)}. It lies on a mesh already, otherwise than asked. Call "
        "tensor.redistribute(mesh, placements) to move it."
    )


# ---------------------------------------------------------------- Tensors that are made of tensors
#
# torchao.quantize_ puts such a tensor in the place of a weight. It computes with its parts, so it
# works on a mesh once they are DTensors, and it lies as they do:
#
#     Int8Tensor (N, K)   told (tp, fsdp)     cut over N by tp, over K by fsdp
#       qdata    (N, K)   int8                (tp, fsdp)
#       scale    (N, 1)   float32, of a row   (tp, -)
#       scale    (N, G)   of groups in a row  (tp, fsdp) where fsdp divides G, else (tp, -)
#
# torch has it the other way around, a DTensor of Int8Tensors: it cuts tensors of one process each.


def parts_of(tensor: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a tensor of another library's is made of, by name.

    Args:
        tensor: A tensor, or anything else.

    Returns:
        Its parts; none for a plain tensor, a DTensor or what is no tensor.

    Example:
        >>> parts_of(torch.ones(2))
        {}
    """
    is_other = isinstance(tensor, torch.Tensor) and tensor.layout != torch.strided  # nested
    if is_other or isinstance(tensor, TorchDTensor | LocalView):
        return {}
    if not is_traceable_wrapper_subclass(tensor):
        return {}
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def map_parts(function: Callable[[torch.Tensor], torch.Tensor], tensor: Any) -> torch.Tensor:
    """Return the tensor with other parts.

    Args:
        function: Is given each part, and returns what takes its place.
        tensor: A tensor with parts, see :func:`parts_of`.
    """
    _, form = tensor.__tensor_flatten__()
    parts = {name: function(part) for name, part in parts_of(tensor).items()}
    return type(tensor).__tensor_unflatten__(parts, form, tensor.size(), tensor.stride())


def _distribute_parts(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> Any:
    layout = Layout.from_placements(placements, tensor.ndim, mesh.value)

    def is_cut(part: torch.Tensor, dim: int) -> bool:
        size = part.shape[dim] if part.ndim == tensor.ndim else 1
        return size == tensor.shape[dim] or size % layout.num_shards(dim) == 0

    def distribute(part: torch.Tensor) -> torch.Tensor:
        fitting = [
            p if not p.is_shard() or is_cut(part, p.dim) else Replicate() for p in placements
        ]
        return distribute_tensor(part.detach(), mesh, fitting)

    return map_parts(distribute, tensor).requires_grad_(tensor.requires_grad)


@argument_types
def distribute_module(
    module: nn.Module,
    device_mesh: Any = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Turn a module's parameters and buffers into DTensors, in place.

    Args:
        module: The module.
        device_mesh: The mesh; that of the open ``with mesh:`` block when None.
        partition_fn: Called as ``partition_fn(name, submodule, mesh)`` for every submodule, to
            replace parameters by distributed ones. What it leaves alone is replicated, or lies as
            ``mark_sharding`` told it before.
        input_fn: Called as ``input_fn(module, inputs, mesh)`` before forward.
        output_fn: Called as ``output_fn(module, outputs, mesh)`` after forward.

    Returns:
        The same module.

    Raises:
        DistributeError: The module was distributed before, or a hook takes a wrong number of
            arguments.
        ArgumentTypeError: Not a module, or no mesh.
        UnsupportedOpError: `partition_fn` is torch_xla's `auto_policy`.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(
            f"distribute_module was called with an object of type={type(module).__name__}. Only a "
            "torch.nn.Module has parameters and buffers. Pass a module, or use distribute_tensor."
        )
    if getattr(partition_fn, "__name__", "") == "auto_policy":
        refuse_auto_policy()  # torch_xla's own does nothing when it is called
    mesh = current_mesh("distribute_module") if device_mesh is None else as_device_mesh(device_mesh)
    if getattr(module, _MARK, False):
        raise DistributeError(
            f"distribute_module was called on a {type(module).__name__} that it was called on "
            "before. Its parameters lie on a mesh already, and its hooks would run twice. Call it "
            "once per module; move single parameters with redistribute."
        )
    pre_hook = _hook(input_fn, "input_fn", "inputs", mesh)
    post_hook = _hook(output_fn, "output_fn", "outputs", mesh)
    slots = [(m._parameters, *slot) for m in module.modules() for slot in m._parameters.items()]
    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
    _distribute_tensors(module, mesh)
    for parameters, name, old in slots:
        new = parameters.get(name)
        if old is not None and new is not None and new is not old:
            _note_in_place_of(old, new)
    if pre_hook is not None:
        module.register_forward_pre_hook(lambda m, inputs: pre_hook(m, inputs))
    if post_hook is not None:
        module.register_forward_hook(lambda m, inputs, outputs: post_hook(m, outputs))
    setattr(module, _MARK, True)
    return module


def refuse_auto_policy() -> NoReturn:
    """Refuse torch_xla's `auto_policy` as a partition function.

    Raises:
        UnsupportedOpError: Always.
    """
    raise UnsupportedOpError(
        "auto_policy was passed as partition_fn. XLA's auto-sharding pass is not part of the "
        "compilers that xla_dtensor uses. Pass a function that marks the parameters, or None to "
        "replicate them."
    )


def _distribute_tensors(module: nn.Module, mesh: DeviceMesh) -> None:
    # One object stays one object: weights that are tied stay tied.
    distributed: dict[int, Any] = {}
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor):
                if id(parameter) not in distributed:
                    dtensor = _distribute_as_annotated(parameter, mesh)
                    distributed[id(parameter)] = nn.Parameter(dtensor, parameter.requires_grad)
                submodule._parameters[name] = distributed[id(parameter)]
        for name, buffer in submodule._buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                if id(buffer) not in distributed:
                    distributed[id(buffer)] = _distribute_as_annotated(buffer, mesh)
                submodule._buffers[name] = distributed[id(buffer)]


def _distribute_as_annotated(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Distribute a tensor as mark_sharding annotated it; replicated where it did not."""
    runtime = get_runtime()
    annotation = runtime.annotation(tensor) if runtime.is_payload(tensor) else None
    if annotation is None or not annotation.is_tiled:
        return distribute_tensor(tensor.detach(), mesh)
    layout = layout_of_op_sharding(annotation, mesh.value, tensor.ndim, runtime.root(mesh.value))
    if layout is None:
        raise DistributeError(
            f"distribute_module was called on the mesh {mesh_text(mesh.value)} with a parameter or "
            f"buffer of shape={tuple(tensor.shape)} that was told {annotation} before. No axes of "
            "this mesh cut it so. Pass the mesh that it was marked with, or clear_sharding first."
        )
    return distribute_tensor(tensor.detach(), mesh, torch_placements(layout))


def _hook(
    function: Callable[..., Any] | None, name: str, what: str, mesh: DeviceMesh
) -> Callable[[nn.Module, Any], Any] | None:
    if function is None:
        return None
    count = len(inspect.signature(function).parameters)
    if count == 3:
        return lambda module, tensors: function(module, tensors, mesh)
    if count == 2:
        warnings.warn(
            f"Deprecating {name} that takes two arguments ({what}, device_mesh), please use "
            f"{name} that takes in (module, {what}, device_mesh) instead!",
            FutureWarning,
            stacklevel=4,  # past argument_types
        )
        return lambda module, tensors: function(tensors, mesh)
    raise DistributeError(
        f"distribute_module was called with an {name} that takes {count} arguments. It is called "
        f"with three: the module, the {what} and the mesh. Pass a function (module, {what}, "
        "device_mesh)."
    )


# ------------------------------------------------------------------- Parameters in place of others
#
# A module's parameter on a mesh is another object than the one that it had. An optimizer that was
# made before holds the old one, which gets no gradient: its step would leave the model as it is,
# without a word. Trainers let it follow; elsewhere its step is an error.

# What modules have in the place of a parameter, by its id, while it lives.
_in_place_of: dict[int, tuple[weakref.ref[Any], nn.Parameter]] = {}


def parameter_in_place_of(old: nn.Parameter, tensor: torch.Tensor) -> nn.Parameter:
    """Return a parameter of `tensor`, which a module is to have in the place of another.

    Args:
        old: The one that it has.
        tensor: What that one is on the mesh.
    """
    new = nn.Parameter(tensor, old.requires_grad)
    _note_in_place_of(old, new)
    return new


def _note_in_place_of(old: nn.Parameter, new: nn.Parameter) -> None:
    key = id(old)
    _in_place_of[key] = weakref.ref(old, lambda _: _in_place_of.pop(key, None)), new


def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the parameters that modules have now, with the state that it has of each.

    Args:
        optimizer: Made before the modules were put on a mesh, or after; or after some of them.

    Raises:
        DistributeError: Its state of a parameter is not of the parameter's shape, so nothing says
            how it is to lie.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> mesh = xd.init_device_mesh("xla", (8,))
        >>> _ = xd.distribute_module(model, mesh)
        >>> follow_parameters(optimizer)
        >>> optimizer.param_groups[0]["params"][0] is model.weight
        True
    """
    for group in optimizer.param_groups:
        for place, old in enumerate(group["params"]):
            new = _now_in_place_of(old)
            if new is old:
                continue
            if old in optimizer.state:
                state = optimizer.state[old]
                moved = {name: _as_parameter(optimizer, part, new) for name, part in state.items()}
                del optimizer.state[old]
                optimizer.state[new] = moved
            group["params"][place] = new


def _now_in_place_of(parameter: Any) -> Any:
    while id(parameter) in _in_place_of:
        parameter = _in_place_of[id(parameter)][1]
    return parameter


def _as_parameter(optimizer: torch.optim.Optimizer, part: Any, parameter: Any) -> Any:
    """Return a part of an optimizer's state of a parameter, lying as the parameter does."""
    if not isinstance(part, torch.Tensor) or part.ndim == 0:
        return part
    if part.shape != parameter.shape:
        raise DistributeError(
            f"A model was put on a mesh, and its {type(optimizer).__name__} has made steps: it "
            f"keeps a tensor of shape={tuple(part.shape)} for a parameter of "
            f"shape={tuple(parameter.shape)}, and nothing says how that is to lie. Make the "
            "optimizer when the model is on the mesh."
        )
    if isinstance(part, DTensor):
        return part.redistribute(parameter.device_mesh, parameter.placements)
    return distribute_tensor(part.detach(), parameter.device_mesh, parameter.placements)


def _refuse_left_behind(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise where an optimizer's step would leave out a gradient, as of a parameter's successor."""
    for group in optimizer.param_groups if _in_place_of else ():
        for old in group["params"]:
            new = _now_in_place_of(old)
            if new is not old and old.grad is None and new.grad is not None:
                raise DistributeError(
                    f"The {type(optimizer).__name__} was made before its model was put on a mesh. "
                    f"The model has another parameter now, of shape={tuple(new.shape)}: it has a "
                    "gradient, and the one that the optimizer holds has none, so that its step "
                    "would not train it. Make the optimizer after shard_module, "
                    "distribute_module or fully_shard."
                )


register_optimizer_step_pre_hook(_refuse_left_behind)


# ----------------------------------------------------------- compute_local_shape_and_global_offset
#
# Which part of a tensor the first device has.


@argument_types
def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: Any, placements: Sequence[Any] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tell which part of a tensor lies on the first device that this process reaches.

    As torch.distributed.tensor's function of this name, which also takes the mesh of
    ``init_device_mesh``: uneven shards are cut by `torch.chunk`, once per mesh axis.

    Args:
        global_shape: The shape of the whole, elements.
        mesh: The mesh.
        placements: One per mesh axis, or one alias entry per dim, e.g. ``("dp", None)``.

    Returns:
        The shard's shape, and its first element along each dim; the global extent where the shard
        is empty. ``((0,), ())`` in a process that reaches none of the mesh's devices.

    Raises:
        ArgumentTypeError: A shape that is not made of non-negative integers, or no mesh.
        DistributeError: Wrong placements.

    Example:
        >>> import xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> xd.compute_local_shape_and_global_offset((5, 8), mesh, ("dp", "tp"))
        ((3, 2), (0, 0))
    """
    shape = tuple(global_shape)
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in shape):
        raise ArgumentTypeError(
            f"compute_local_shape_and_global_offset was called with global_shape={shape}. A shape "
            "is made of non-negative integers. Pass the shape of the whole tensor."
        )
    mesh = as_device_mesh(mesh)
    function = "compute_local_shape_and_global_offset"
    canonical = checked_placements(function, placements, mesh, len(shape), partial=True)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return (0,), ()
    layout = Layout.from_placements(canonical, len(shape), mesh.value)
    part = local_shape(layout, shape, coordinate, rule="torch")
    return part.shape, part.offset
