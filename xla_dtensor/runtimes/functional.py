"""What the layers above ask of a runtime, as functional ops that torch.compile can record.

As in :mod:`xla_dtensor.runtimes.functional`: on payloads each function is what the runtime
does, on the stand-ins of torch.compile it is a call in the graph, of tensors and of a text that
names everything else. A stand-in for a local payload has the local shape, as the payload has, so
between the borders a graph has plain aten ops, which the payloads dispatch themselves::

    %to_local = torch.ops.xla_dtensor.to_local(%x, "(8, 4) as [tp, -] on (dp=2, tp=4) #0")
    %mul = torch.ops.aten.mul.Tensor(%to_local, 2)
    %psum = torch.ops.xla_dtensor.local_collective(%mul, "all_reduce over ('tp',) #0")
    %from_local = torch.ops.xla_dtensor.from_local(%psum, "(2, 4) as [-, -] on (dp=2, tp=4) #1")
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import torch

from mesh_utils import Axis
from xla_dtensor.core import Layout, ManualRegion
from xla_dtensor.core.errors import CompileError
from xla_dtensor.runtimes.nested import leaves, map_nested
from xla_dtensor.runtimes.registry import get_runtime

__all__ = [
    "FACTORED",
    "KERNELS",
    "Names",
    "constrain",
    "crossed_in",
    "crossed_out",
    "enter_everywhere",
    "functional_form",
    "gather_everywhere",
    "is_traced",
    "layout_names",
    "local_collective",
    "name_of",
    "operand_everywhere",
    "plain_like",
    "put",
    "real_sizes",
    "reshaped",
    "run_local_op",
    "run_traced",
    "smooth_l1_backward",
    "to_plain",
]


# --------------------------- Texts that stand for layouts and other values in the arguments of ops
#
# An op of torch's takes tensors, numbers and texts only. What else our own ops need (a layout, a
# region, a function) is named, in graphs of ``torch.compile`` as well::
#
#     %constrain = torch.ops.xla_dtensor.constrain(%payload, "[dp, tp] on (dp=2, tp=4) #3")


class Names:
    """Texts that stand for values in graphs, which hold tensors and plain constants only.

    Example:
        >>> names = Names("mesh")
        >>> names.name(("dp", 2), "(dp=2)")
        '(dp=2) #0'
        >>> names.value("(dp=2) #0")
        ('dp', 2)
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._names: dict[Hashable, str] = {}
        self._values: dict[str, Any] = {}

    def name(self, value: Any, text: str, key: Hashable | None = None) -> str:
        """Return the text of a value; equal values (by `key`, if one is given) have one text."""
        key = value if key is None else key
        if key not in self._names:
            self._names[key] = f"{text} #{len(self._names)}"
            self._values[self._names[key]] = value
        return self._names[key]

    def value(self, name: str) -> Any:
        """Return the value that a text stands for.

        Raises:
            CompileError: This process never gave out the text.
        """
        try:
            return self._values[name]
        except KeyError:
            raise CompileError(
                f"A compiled graph names the {self._kind} {name!r}. This process has none of that "
                "name: the graph was made by another one. Compile the function in this process."
            ) from None


layout_names = Names("layout")


def name_of(layout: Layout) -> str:
    """Return the text that stands for a layout."""
    return layout_names.name(layout, f"{layout} on ({_axes_text(layout)})")


def _axes_text(layout: Layout) -> str:
    axes = zip(layout.mesh.axis_names, layout.mesh.mesh_shape, strict=True)
    return ", ".join(f"{name}={size}" for name, size in axes)


# ----------------------------------------------------------------------------------- Functional ops
#
# Annotations as functional ops, so that torch.compile can record them in its graph.
#
# ``torch.compile`` traces with fake payloads, which no runtime can place. What the DTensor layer
# asks of the runtime (put a host tensor, constrain, hand out a plain tensor) is therefore also an
# op of torch's: on a fake payload it is recorded, and on a payload it is what the runtime does::
#
#     %constrain = torch.ops.xla_dtensor.constrain(%payload, "[dp, tp] on (dp=2, tp=4) #3")
#
# Tensors are the only inputs of such a call. How the result is to lie is a text that names a
# :class:`~xla_dtensor.core.Layout` kept by this process, and so a constant of the graph.
#
# An op that the runtime does not leave to torch (a linear that has to stay whole, an op that
# torch_xla gets wrong) is recorded under a name of ours in the same way, see :func:`run_traced`.

_is_functional = torch._is_functional_tensor  # pyright: ignore[reportPrivateImportUsage]
_from_functional = torch._from_functional_tensor  # pyright: ignore[reportPrivateImportUsage]
_to_functional = torch._to_functional_tensor  # pyright: ignore[reportPrivateImportUsage]
_sync = torch._sync  # pyright: ignore[reportPrivateImportUsage]
_library = torch.library.Library("xla_dtensor", "FRAGMENT")

# What the ops of this module do with payloads, for runtimes whose payloads dispatch themselves.
KERNELS: dict[Any, Callable[..., Any]] = {}


def is_traced(tensor: torch.Tensor) -> bool:
    """Tell whether a payload is a stand-in of torch.compile's, without values."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or _is_local(tensor):
        return False
    return not get_runtime().is_payload(tensor)


def _is_local(payload: Any) -> bool:
    return getattr(payload, "_is_local_payload", False)


def constrain(payload: torch.Tensor, layout: Layout, is_new: bool = False) -> torch.Tensor:
    """Return a payload with the same values that lies as `layout` says, or record that.

    It is a new one, unless an op has just made `payload`, which nobody else has.
    """
    if payload.is_meta:
        return payload.clone()
    if is_traced(payload):
        return torch.ops.xla_dtensor.constrain.default(payload, name_of(layout))
    runtime = get_runtime()
    return (runtime.constrain_new if is_new else runtime.constrain)(payload, layout)


def put(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a payload with the values of a host tensor, or record that."""
    if is_traced(tensor):
        return torch.ops.xla_dtensor.put.default(tensor, name_of(layout))
    return get_runtime().put(tensor, layout)


def to_plain(payload: torch.Tensor) -> torch.Tensor:
    """Return a payload's value as a tensor to hand to users, or record that."""
    if is_traced(payload):
        return torch.ops.xla_dtensor.to_plain.default(payload)
    return get_runtime().to_plain(payload)


# ---------------------------------------------------------------------- the ops


def _constrain(payload: torch.Tensor, layout: str) -> torch.Tensor:
    if not get_runtime().is_payload(payload):
        return _put(payload, layout)  # made inside the graph, on the host
    return get_runtime().constrain(payload, layout_names.value(layout))


def _put(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    runtime, target = get_runtime(), layout_names.value(layout)
    if runtime.is_payload(tensor):  # a plain tensor of the runtime's, which a stand-in cannot show
        return runtime.constrain(tensor, target)
    return runtime.put(tensor.detach(), target)


def _to_plain(payload: torch.Tensor) -> torch.Tensor:
    runtime = get_runtime()
    return runtime.to_plain(payload) if runtime.is_payload(payload) else payload.clone()


def _like(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=get_runtime().torch_device
    )


def _contiguous_like(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=get_runtime().torch_device)


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an op that runs `run` on payloads and `fake` on stand-ins; return its overload."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.xla_dtensor, packet), overload or "default")
    torch.library.register_fake(f"xla_dtensor::{name}", fake, lib=_library)
    # Payloads of torch_xla are functional tensors, as are those that AOTAutograd traces with.
    _library.impl(name, _functionalized(op, run), "Functionalize")
    _library.impl(name, run, "CompositeExplicitAutograd")
    KERNELS[op] = run
    return op


def _functionalized(op: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return what `op` does below functionalization: `run` payloads, record stand-ins."""

    def from_functional(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and _is_functional(leaf):
            _sync(leaf)
            return _from_functional(leaf)
        return leaf

    def to_functional(leaf: Any) -> Any:
        return _to_functional(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def kernel(*args: Any, **kwargs: Any) -> Any:
        inner = map_nested(from_functional, (args, kwargs))
        if not any(isinstance(leaf, torch.Tensor) and is_traced(leaf) for leaf in leaves(inner)):
            return run(*args, **kwargs)
        functionalize = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
        with torch._C._ExcludeDispatchKeyGuard(functionalize):
            return map_nested(to_functional, op(*inner[0], **inner[1]))

    return kernel


define("constrain(Tensor payload, str layout) -> Tensor", _constrain, _like)
define("put(Tensor tensor, str layout) -> Tensor", _put, _contiguous_like)
define("to_plain(Tensor payload) -> Tensor", _to_plain, _like)


def run_traced(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op on stand-ins; record it as one of ours if the runtime has to run it itself.

    Args:
        func: An ``OpOverload``.
        args: Its positional arguments, payloads in place.
        kwargs: Its keyword arguments.
    """
    runtime = get_runtime()
    if not any(isinstance(x, torch.Tensor) and is_traced(x) for x in leaves(args)):
        return func(*args, **kwargs)
    if torch.Tag.inplace_view in func.tags:
        # A new stand-in: torch cannot change the shape of one on an XLA device.
        return functional_form(func)(*args, **kwargs)
    if torch.device(runtime.torch_device).type != "cpu":
        num_written = 1 if func._schema.is_mutable else 0  # not what is written to
        args = (*args[:num_written], *map_nested(_on_device, tuple(args[num_written:])))
    functional = functional_form(func) if func._schema.is_mutable else func
    if functional is None or not runtime.runs_itself(func):
        return func(*args, **kwargs)
    output = _recorded_op(_overload_for_numbers(functional, args))(*args, **kwargs)
    return output if functional is func else args[0].copy_(output)


def reshaped(view: Any, payload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what a payload is after ``t_`` or the like: itself, or a view of a stand-in.

    Args:
        view: The op that returns a view instead.
        payload: The payload, changed already, or a stand-in, which `run_traced` does not change.
        args: The arguments, the tensor first.
        kwargs: The keyword arguments.
    """
    return view(payload, *args[1:], **kwargs) if is_traced(payload) else payload


def _on_device(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor) and argument.device.type == "cpu":
        return argument.to(get_runtime().torch_device)
    return argument


def functional_form(func: Any) -> Any:
    """Return the op that computes what an in-place op writes; None if it has no name of its own."""
    namespace, _, name = func._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if packet is None or not name.endswith("_"):
        return None
    return next((op for op in _overloads(packet) if _takes(op) == _takes(func)), None)


def _overloads(packet: Any) -> list[Any]:
    return [getattr(packet, name) for name in packet.overloads()]


def _takes(func: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in func._schema.arguments]


def _overload_for_numbers(func: Any, args: Sequence[Any]) -> Any:
    """Return the overload that takes numbers, where `func` takes tensors made of them."""

    def takes(op: Any) -> bool:
        pairs = zip(args, _takes(op), strict=False)
        return all(kind != "Tensor" or isinstance(x, torch.Tensor) for x, (_, kind) in pairs)

    names = [name for name, _ in _takes(func)]
    overloads = [func, *_overloads(func.overloadpacket)]
    same = [op for op in overloads if [name for name, _ in _takes(op)] == names]
    return next((op for op in same if takes(op)), func)


@cache
def _recorded_op(func: Any) -> Any:
    """Return an op of ours that stands for `func` in graphs, and has the runtime run it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        runtime = get_runtime()
        run = runtime.run_local_op if any(map(_is_local, leaves(args))) else runtime.run_op
        return run(func, args, kwargs)

    return define("aten_" + str(func._schema).removeprefix("aten::"), run, func)


# --------------------------------------------------------------------------------- Functional local


class Crossing(Protocol):
    """A border between global and local tensors: ``Border`` of LocalViews."""

    layout: Layout
    shape: tuple[int, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a local tensor."""
        ...

    def cut(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the local payload of a global one."""
        ...

    def joined(self, local: torch.Tensor) -> torch.Tensor:
        """Return the global payload of a local one."""
        ...


_borders = Names("border of local tensors")
_regions = Names("region of local tensors")
_collectives = Names("collective")
_sizes = Names("table of sizes")


def _border_name(border: Crossing) -> str:
    text = f"{border.shape} as {border.layout} on ({_axes_text(border.layout)})"
    return _borders.name(border, text, (border.layout, border.shape))


def _region_name(region: ManualRegion) -> str:
    return _regions.name(region, f"over {region.axes}")


# ---------------------------------------------------------------------------- What local views call


def crossed_in(payload: torch.Tensor, border: Crossing) -> torch.Tensor:
    """Return the local payload of a global one, or record that."""
    if is_traced(payload):
        return torch.ops.xla_dtensor.to_local.default(payload, _border_name(border))
    return border.cut(payload)


def crossed_out(local: torch.Tensor, border: Crossing) -> torch.Tensor:
    """Return the global payload of a local one, reductions made, or record that."""
    if is_traced(local):
        return torch.ops.xla_dtensor.from_local.default(local, _border_name(border))
    return border.joined(local)


def run_local_op(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an aten op on every device's own tensor, or record it."""
    tensors = [v for v in leaves((tuple(args), dict(kwargs))) if isinstance(v, torch.Tensor)]
    if any(map(is_traced, tensors)):
        return run_traced(func, args, kwargs)
    return get_runtime().run_local_op(func, args, kwargs)


def local_collective(
    name: str,
    local: torch.Tensor,
    region: ManualRegion,
    axes: tuple[Axis, ...],
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Run a collective on a local payload, or record it."""
    if not is_traced(local):
        return get_runtime().local_collective(name, local, region, axes, **options)
    key = (name, region, axes, tuple(options.items()))
    text = _collectives.name((name, region, axes, dict(options)), f"{name} over {axes}", key)
    return torch.ops.xla_dtensor.local_collective.default(local, text)


def enter_everywhere(tensor: torch.Tensor, region: ManualRegion) -> torch.Tensor:
    """Record a stand-in for a plain tensor as a local payload, equal on all devices."""
    return torch.ops.xla_dtensor.enter_everywhere.default(tensor, _region_name(region))


def operand_everywhere(tensor: torch.Tensor, region: ManualRegion) -> torch.Tensor:
    """Record a stand-in for a plain tensor as an operand beside local payloads."""
    return torch.ops.xla_dtensor.operand_everywhere.default(tensor, _region_name(region))


def gather_everywhere(local: torch.Tensor, like: torch.Tensor, region: ManualRegion) -> Any:
    """Record a stand-in for a local payload, equal on all devices, as a plain tensor.

    Args:
        local: The stand-in.
        like: One for a tensor that is where the result is to be: on the host or not.
        region: The region of `local`.
    """
    return torch.ops.xla_dtensor.gather_everywhere.default(local, like, _region_name(region))


def plain_like(payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Record a stand-in for a global payload as a plain tensor, on the host if `like` is."""
    return torch.ops.xla_dtensor.plain_like.default(payload, like)


def real_sizes(local: torch.Tensor, sizes: Any, region: ManualRegion) -> torch.Tensor:
    """Return each device's own number of a table, as a local payload, or record that.

    Args:
        local: Tells whether there is something to record.
        sizes: An array of integers, of the shape of the region.
        region: The region.
    """
    if not is_traced(local):
        return _numbers(sizes, region)
    table = tuple(map(int, sizes.reshape(-1)))
    text = _sizes.name((sizes, region), f"{table} over {region.axes}", (table, region))
    return torch.ops.xla_dtensor.real_sizes.default(local, text)


# ---------------------------------------------------------------------- the ops


def _numbers(sizes: Any, region: ManualRegion) -> torch.Tensor:
    runtime = get_runtime()
    layout = Layout(region.mesh, tuple((axis,) for axis in region.axes))
    return runtime.enter_local(runtime.put(torch.from_numpy(sizes), layout), layout, region)


def _layout_of_region(region: ManualRegion, ndim: int) -> Layout:
    open_dims = frozenset() if region.is_whole else frozenset(range(ndim))
    return Layout(region.mesh, ((),) * ndim, (), open_dims)


def _spread(tensor: torch.Tensor, region: str) -> torch.Tensor:
    runtime, over = get_runtime(), _regions.value(region)
    if not runtime.is_payload(tensor):
        tensor = runtime.put(tensor.detach(), Layout.replicated(over.mesh, tensor.ndim))
    return runtime.enter_local(tensor, _layout_of_region(over, tensor.ndim), over)


def _operand(tensor: torch.Tensor, region: str) -> torch.Tensor:
    # Beside local payloads a host tensor is the same on every device.
    return _spread(tensor, region) if get_runtime().is_payload(tensor) else tensor.clone()


def _gather(local: torch.Tensor, like: torch.Tensor, region: str) -> torch.Tensor:
    over = _regions.value(region)
    return _plain(get_runtime().leave_local(local, _layout_of_region(over, local.ndim), over), like)


def _plain(payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    runtime = get_runtime()
    return runtime.to_plain(payload) if runtime.is_payload(like) else runtime.to_host(payload)


def _communicate(local: torch.Tensor, collective: str) -> torch.Tensor:
    name, region, axes, options = _collectives.value(collective)
    return get_runtime().local_collective(name, local, region, axes, **options)


def _shape_after(
    name: str, shape: Sequence[int], members: int, options: Mapping[str, Any]
) -> list[int]:
    sizes = list(shape)
    grows = {"all_gather": "dim", "all_to_all": "concat_dim"}
    shrinks = {"reduce_scatter": "dim", "all_to_all": "split_dim"}
    if name in shrinks:
        sizes[options[shrinks[name]]] //= members
    if name in grows:
        sizes[options[grows[name]]] *= members
    return [] if name == "axis_index" else sizes


def _empty(shape: Sequence[int], dtype: torch.dtype, device: Any = None) -> torch.Tensor:
    device = get_runtime().torch_device if device is None else device
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def _after_collective(local: torch.Tensor, collective: str) -> torch.Tensor:
    name, region, axes, options = _collectives.value(collective)
    members = 1
    for axis in axes:
        members *= region.mesh.size(axis)
    dtype = torch.int64 if name == "axis_index" else local.dtype
    return _empty(_shape_after(name, local.shape, members, options), dtype)


def _as_operand(tensor: torch.Tensor, _: str) -> torch.Tensor:
    return _empty(tensor.shape, tensor.dtype, tensor.device)


def _placed_like(tensor: torch.Tensor, like: torch.Tensor, *_: Any) -> torch.Tensor:
    return _empty(tensor.shape, tensor.dtype, like.device)


def _of_border(shape: Callable[[Any], Sequence[int]]) -> Callable[..., torch.Tensor]:
    return lambda tensor, border: _empty(shape(_borders.value(border)), tensor.dtype)


_Run = Callable[..., torch.Tensor]
_OPS: tuple[tuple[str, _Run, _Run], ...] = (
    (
        "to_local(Tensor payload, str border) -> Tensor",
        lambda payload, border: _borders.value(border).cut(payload),
        _of_border(lambda border: border.local_shape),
    ),
    (
        "from_local(Tensor local, str border) -> Tensor",
        lambda local, border: _borders.value(border).joined(local),
        _of_border(lambda border: border.shape),
    ),
    (
        "local_collective(Tensor local, str collective) -> Tensor",
        _communicate,
        _after_collective,
    ),
    (
        "enter_everywhere(Tensor tensor, str region) -> Tensor",
        _spread,
        lambda tensor, _: _empty(tensor.shape, tensor.dtype),
    ),
    ("operand_everywhere(Tensor tensor, str region) -> Tensor", _operand, _as_operand),
    (
        "gather_everywhere(Tensor local, Tensor like, str region) -> Tensor",
        _gather,
        _placed_like,
    ),
    ("plain_like(Tensor payload, Tensor like) -> Tensor", _plain, _placed_like),
    (
        "real_sizes(Tensor local, str sizes) -> Tensor",
        lambda local, sizes: _numbers(*_sizes.value(sizes)),
        lambda local, sizes: _empty((), torch.int64),
    ),
)
for _schema, _run, _fake in _OPS:
    define(_schema, _run, _fake)


# ---------------------------------------------------------------------------------- Strided factors
#
# Solves and determinants by the factors that torch's kernels would find of a strided matrix.
#
# torch's kernels factor the transpose of a matrix that lies row by row, and its formulas of the
# gradients count on that::
#
#     A.stride() == (n, 1)    the factors are those of A.mT
#     A.stride() == (1, n)    those of A
#
# No kernel of XLA sees strides. These rules do, on tensors of any runtime that tell their strides::
#
#     _linalg_solve_ex(A, B)    lu_factor_ex(A.mT), lu_solve(..., adjoint=True)
#     _linalg_det(A)            lu_factor_ex(A.mT), the product of the diagonal
#
# Invariant: what is returned as factors is what torch's kernel returns of the same strides, so that
# first and higher derivatives are right.

aten = torch.ops.aten


def _solve_turns() -> bool:
    """Tell whether torch's solve factors the transpose: 2.9's does, 2.15's does not."""
    matrix = torch.tensor([[2.0, 1.0], [0.0, 2.0]], device="cpu")
    factors: Any = aten._linalg_solve_ex.default(matrix, torch.ones(2, 1, device="cpu"))[1]
    return factors[0, 1].item() == 0


_SOLVE_TURNS = _solve_turns()


def _is_row_by_row(matrix: torch.Tensor) -> bool:
    return matrix.is_contiguous() and not matrix.is_complex()


def _factors(matrix: torch.Tensor, *, turned: bool) -> Any:
    return aten.linalg_lu_factor_ex.default(matrix.mT if turned else matrix)


def _solve_ex(
    matrix: torch.Tensor, rhs: torch.Tensor, *, left: bool = True, check_errors: bool = False
) -> Any:
    turned = _SOLVE_TURNS and _is_row_by_row(matrix)
    factors, pivots, info = _factors(matrix, turned=turned)
    if check_errors:
        aten._linalg_check_errors.default(info, "torch.linalg.solve_ex", is_matrix=matrix.ndim == 2)
    is_vector = rhs.ndim == 1 or rhs.shape == matrix.shape[:-1]
    columns = rhs.unsqueeze(-1) if is_vector else rhs
    solution = aten.linalg_lu_solve.default(factors, pivots, columns, left=left, adjoint=turned)
    return (solution.squeeze(-1) if is_vector else solution), factors, pivots, info


def _sign_and_diagonal(matrix: torch.Tensor) -> tuple[Any, Any, Any, Any]:
    factors, pivots, _ = _factors(matrix, turned=_is_row_by_row(matrix))
    rows = torch.ones_like(pivots).cumsum(-1)  # from 1, as pivots count
    exchanges = (pivots != rows).sum(-1)
    sign = (1 - 2 * (exchanges % 2)).to(matrix.dtype)
    return sign, factors.diagonal(0, -2, -1), factors, pivots


def _det(matrix: torch.Tensor) -> Any:
    sign, diagonal, factors, pivots = _sign_and_diagonal(matrix)
    return sign * diagonal.prod(-1), factors, pivots


def _slogdet(matrix: torch.Tensor) -> Any:
    sign, diagonal, factors, pivots = _sign_and_diagonal(matrix)
    return sign * diagonal.sgn().prod(-1), diagonal.abs().log().sum(-1), factors, pivots


FACTORED: dict[Any, Callable[..., Any]] = {
    aten._linalg_solve_ex.default: _solve_ex,
    aten._linalg_det.default: _det,
    aten._linalg_slogdet.default: _slogdet,
}
"""Ops whose results depend on the strides of a matrix, in terms of ops whose results do not."""


def smooth_l1_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int, beta: float
) -> torch.Tensor:
    """Do what ``aten.smooth_l1_loss_backward`` does, NaN where the loss is NaN.

    torch's decomposition takes the sign of NaN, which is 0; torch_xla has a slope of -1 there.
    """
    off = x - target
    slope = torch.where(off.abs() >= beta, torch.sign(off), off / beta)
    return slope * grad / (x.numel() if reduction == 1 else 1)
