"""Keep torch_xla's "openxla" back end of torch.compile from baking inputs into its graphs.

It finds out which input of a graph is which by ids that it expects in the inputs' device data. In
SPMD mode, device data that was used before may have another id. torch_xla 2.9 then takes the input
for a constant: a compiled backward goes on using the activations of the first step, in silence.
Here a graph is extracted with copies of its inputs, whose device data is their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_dtensor.core import ManualRegion
from xla_dtensor.core.errors import CompileError
from xla_dtensor.runtimes.torch_xla.annotations import (
    cut_unevenly,
    parse_annotation,
    to_annotation,
    xlac,
)
from xla_dtensor.runtimes.torch_xla.local import LocalPayload, annotate_stack

__all__ = ["correct_bridge"]


# ------------------------------------------------------------------------- torch xla dynamo stacks
#
# Local payloads at the borders of graphs that torch_xla's "openxla" back end compiles.
#
# Inside such a graph local payloads are what its ops pass on to each other. What goes in or comes
# out has to be an XLA tensor: a compiled backward, for one, gets what the forward has saved. There
# a local payload is its stack::
#
#     %saved = aten.relu(%to_local)                 %saved = aten.relu(%to_local)
#     return (%out, %saved)                 ->      %stack = expose(%saved)
#                                                   return (%out, %stack)

# What makes local payloads of others, and others of local payloads.
_ENTRIES = ("to_local", "enter_everywhere", "operand_everywhere", "real_sizes")
_EXITS = ("from_local", "gather_everywhere")


def on_stacks(
    model: torch.fx.GraphModule,
    args: Sequence[Any],
    compile_model: Callable[[torch.fx.GraphModule, tuple[Any, ...]], Callable[..., Any]],
) -> Callable[..., Any]:
    """Compile a graph of which some inputs or outputs are local payloads.

    Args:
        model: The graph; it is changed in place where there are such.
        args: Its inputs.
        compile_model: Compiles a graph without such, for given inputs.

    Returns:
        A function that takes and returns what `model` did.
    """
    regions = [a._region if isinstance(a, LocalPayload) else None for a in args]
    found: dict[int, ManualRegion] = {}
    local = _local_nodes(model, regions)
    if local:
        _expose_outputs(model, local, found)
        _unpack_inputs(model, regions, found)
        model.graph.lint()
        model.recompile()
    run = compile_model(model, _stacks(args))
    if not any(regions) and not found:
        return run

    def with_locals(*args: Any) -> Any:
        result = run(*_stacks(args))
        if isinstance(result, torch.Tensor):  # a graph with one output gives it alone
            return _local(result, found.get(0))
        return [_local(value, found.get(place)) for place, value in enumerate(result)]

    return with_locals


def _local_nodes(
    model: torch.fx.GraphModule, regions: Sequence[ManualRegion | None]
) -> set[torch.fx.Node]:
    """Return the nodes whose values may be local payloads."""
    entries, exits = (
        {f"xla_dtensor.{name}.default" for name in names} for names in (_ENTRIES, _EXITS)
    )
    found: set[torch.fx.Node] = set()
    given = iter(regions)
    for node in model.graph.nodes:
        if node.op == "placeholder":
            is_local = next(given, None) is not None
        else:
            passed_on = any(each in found for each in node.all_input_nodes)
            target = str(node.target)
            is_local = target in entries or (passed_on and target not in exits)
        if is_local:
            found.add(node)
    return found


def _stacks(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(a._stack if isinstance(a, LocalPayload) else a for a in args)


def _local(value: Any, region: ManualRegion | None) -> Any:
    return value if region is None else LocalPayload(value, region)


def _unpack_inputs(
    model: torch.fx.GraphModule,
    regions: Sequence[ManualRegion | None],
    found: dict[int, ManualRegion],
) -> None:
    inputs = [node for node in model.graph.nodes if node.op == "placeholder"]
    output = _output(model)
    for node, region in zip(inputs, regions, strict=False):
        if region is None:
            continue
        for place, value in enumerate(_values(output)):
            if value is node:
                found[place] = region
        with model.graph.inserting_after(node):
            local = model.graph.call_function(_unpacking(region), (node,))
        kept = (local, output)
        node.replace_all_uses_with(local, delete_user_cb=lambda user, kept=kept: user not in kept)


def _unpacking(region: ManualRegion) -> Callable[..., Any]:
    def unpack(stack: torch.Tensor) -> LocalPayload:
        return LocalPayload(stack, region)

    return unpack


def _output(model: torch.fx.GraphModule) -> torch.fx.Node:
    return next(node for node in model.graph.nodes if node.op == "output")


def _values(output: torch.fx.Node) -> list[Any]:
    given: Any = output.args[0]
    return [given] if isinstance(given, torch.fx.Node) else list(given)


def _expose_outputs(
    model: torch.fx.GraphModule, local: set[torch.fx.Node], found: dict[int, ManualRegion]
) -> None:
    output = _output(model)
    values = _values(output)
    with model.graph.inserting_before(output):
        for place, value in enumerate(values):
            # An input that comes out again stays what it is: the bridge looks out for those.
            if value in local and value.op != "placeholder":
                values[place] = model.graph.call_function(_exposing(place, found), (value,))
    single = isinstance(output.args[0], torch.fx.Node)
    output.args = (values[0] if single else tuple(values),)


def _exposing(place: int, found: dict[int, ManualRegion]) -> Callable[..., Any]:
    def expose(value: Any) -> Any:
        if not isinstance(value, LocalPayload):
            return value
        found[place] = value._region
        # A node of its own, for the bridge mixes up inputs that come out again. It is told to lie
        # along the devices, or XLA might give each of them what all have saved.
        copied = LocalPayload(value._stack.clone(), value._region)
        annotate_stack(copied)
        return copied._stack

    return expose


# ------------------------------------------------------------------------- torch xla dynamo bridge


def correct_bridge() -> None:
    """Correct the bridge between Dynamo and torch_xla; calling it again does nothing."""
    bridge: Any = importlib.import_module("torch_xla._dynamo.dynamo_bridge")
    extract = bridge.extract_graph_helper
    if getattr(extract, "_takes_copies", False):
        return

    def extract_with_copies(model: Any, known: Any) -> Any:
        importlib.import_module("torch_xla").sync(reset_scope=False)
        xlac()._xla_wait_device_ops([])
        given = model.xla_args
        model.xla_args = tuple(map(_with_own_data, given))
        try:
            return extract(model, known)
        finally:
            model.xla_args = given

    extract_with_copies._takes_copies = True  # pyright: ignore[reportFunctionMemberAccess]
    bridge.extract_graph_helper = extract_with_copies
    _take_locals(bridge)


def _take_locals(bridge: Any) -> None:
    """Let graphs, and the parts that the bridge cuts them into, take and return local payloads."""
    whole, part = bridge.extract_compiled_graph, bridge.extract_internal

    def extract_whole(model: Any, args: Any) -> Any:
        return on_stacks(model, args, whole)

    def extract_part(model: Any) -> Any:
        def compile_part(model: Any, args: Any) -> Any:
            model.xla_args = args
            return part(model)

        return on_stacks(model, model.xla_args, compile_part)

    bridge.extract_compiled_graph, bridge.extract_internal = extract_whole, extract_part
    names: Any = importlib.import_module("torch_xla.core.dynamo_bridge")
    names.extract_compiled_graph = extract_whole


def _with_own_data(value: Any) -> Any:
    """Return a tensor with the same values and sharding, and device data of its own.

    Raises:
        CompileError: It is cut unevenly.
    """
    if not isinstance(value, torch.Tensor) or value.device.type != "xla" or not value.numel():
        return value
    sharding = parse_annotation(xlac()._get_xla_sharding_spec(value) or "")
    if sharding.is_tiled and cut_unevenly(value, sharding):
        raise CompileError(
            f"A graph with an input of shape={tuple(value.shape)}, cut unevenly by {sharding}, was "
            "given to torch_xla's back end 'openxla'. It may take the input for a constant, and a "
            "copy of it comes out replicated. Pad it, or pass backend='aot_eager'."
        )
    with torch.no_grad():
        copied = value.detach().clone()
    # A clone is the same node of the graph; this makes a new one.
    xlac()._xla_annotate_custom_sharding(copied, to_annotation(sharding))
    return copied
