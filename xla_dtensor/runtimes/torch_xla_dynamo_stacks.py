"""Local payloads at the borders of graphs that torch_xla's "openxla" back end compiles.

Inside such a graph local payloads are what its ops pass on to each other. What goes in or comes out
has to be an XLA tensor: a compiled backward, for one, gets what the forward has saved. There a
local payload is its stack::

    %saved = aten.relu(%to_local)                 %saved = aten.relu(%to_local)
    return (%out, %saved)                 ->      %stack = expose(%saved)
                                                  return (%out, %stack)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_dtensor.core import ManualRegion
from xla_dtensor.runtimes.torch_xla_local_payload import LocalPayload, annotate_stack

__all__ = ["on_stacks"]

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
