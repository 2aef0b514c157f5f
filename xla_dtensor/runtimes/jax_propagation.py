"""How XLA will cut the values of a lowered program, found before it is compiled.

Shardy decides it, and its passes can be run from Python. But XLA does not run them on the program
that JAX has lowered: it translates that to HLO first, and back to StableHLO. The operations come in
another order then, some are reshapes that were broadcasts, some are gone; and where two cuts are
equally good, the order decides. So a copy takes the same way here::

    lowered module --> HLO --> StableHLO --> Shardy's propagation --> the cuts that XLA will find

What is looked for is found again by a number, which travels as an attribute of the frontend. In
the programs of the tests no product is cut otherwise than in what XLA says of itself
(``tests/xla_dtensor/runtimes/test_jax_propagation.py``; docs/decisions/product_order.md).

A program with a manual computation (``shard_map``) goes into propagation as it is, since its way
back is not open to Python: there the cuts are those of a program that means the same. Another one
that cannot be read back is refused, since its products could be put on the wrong devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.extend.mlir.passmanager import PassManager

from xla_dtensor.errors import CompileError
from xla_dtensor.runtimes.jax_private import through_hlo

__all__ = ["number_of", "numbered", "operations", "propagated", "unnumber"]

# What XLA runs up to and with propagation. Sinking the edges writes what was found onto the ops.
_PROPAGATION = (
    "symbol-dce,sdy-lift-inlined-meshes,sdy-remove-size-one-axes,"
    "sdy-propagate-sharding-from-func-to-call,sdy-constant-or-scalar-splitter,symbol-dce,"
    "sdy-manual-axes-cleanup,sdy-add-data-flow-edges,sdy-flatten-call-graph,symbol-dce,"
    "sdy-import-func-calls{add-data-flow-edges-on-named-computations=true},symbol-dce,"
    "sdy-apply-sharding-constraints,sdy-sharding-group-import,sdy-pre-order-funcs,"
    "sdy-user-priority-propagate,func.func(sdy-sink-data-flow-edges)"
)
_FRONTEND = "mhlo.frontend_attributes"
_NUMBER = "xla_dtensor.number"
_CALL = "stablehlo.custom_call"


def operations(op: Any) -> Iterator[Any]:
    """Yield all operations inside of one, those of its regions too."""
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from operations(inner.operation)


def numbered(module: Any, names: Sequence[str]) -> list[Any]:
    """Return all operations of some names, each marked with its place in the list."""
    found = [op for op in operations(module) if op.name in names]
    for number, op in enumerate(found):
        _set_frontend(op, {**_frontend(op), _NUMBER: ir.StringAttr.get(str(number))})
    return found


def number_of(op: Any) -> int | None:
    """Return the number of an operation of a propagated copy; None for one without."""
    mark = _frontend(op).get(_NUMBER)
    return None if mark is None else int(ir.StringAttr(mark).value)


def unnumber(ops: Sequence[Any]) -> None:
    """Take the numbers away again."""
    for op in ops:
        rest = {name: value for name, value in _frontend(op).items() if name != _NUMBER}
        if rest:
            _set_frontend(op, rest)
        else:
            del op.attributes[_FRONTEND]


def propagated(module: Any) -> Any:
    """Return a copy of a lowered program in which Shardy has cut everything, as XLA will.

    Args:
        module: The operation of an MLIR module; its context is the current one. It is not changed.

    Raises:
        CompileError: Shardy cannot read what came back from HLO.
    """
    has_manual = any(op.name == "sdy.manual_computation" for op in operations(module))
    try:
        copy = module.clone() if has_manual else _as_xla_reads(module)
        PassManager.parse(f"builtin.module({_PROPAGATION})").run(copy)
    except ir.MLIRError as error:
        raise CompileError(
            "A program for a mesh of several axes was about to be compiled. How XLA will cut its "
            f"products could not be found, since Shardy cannot read it: {error} Compile what is "
            "named there in a step of its own, or on a mesh of one axis."
        ) from error
    return copy


def _as_xla_reads(module: Any) -> Any:
    """Return the program after HLO, with Shardy's attributes and constraints as they were."""
    # Only what is replaced is held while operations are erased: the name of an erased one is read
    # from memory that is no longer its own.
    copy = ir.Module.parse(through_hlo(module)).operation
    for call in [op for op in operations(copy) if op.name == _CALL and _gives_tuple(op)]:
        _with_results(call)
    PassManager.parse("builtin.module(xla-sdy-round-trip-import-shardy-attrs)").run(copy)
    for call in [op for op in operations(copy) if op.name == _CALL and _target(op) == "Sharding"]:
        shardings: Sequence[Any] = sdy.TensorShardingPerValueAttr(
            call.attributes["sdy.sharding"]
        ).shardings
        with ir.InsertionPoint(call):
            constraint = sdy.ShardingConstraintOp(call.operands[0], shardings[0])
        call.result.replace_all_uses_with(constraint.result)
        call.erase()
    return copy


def _gives_tuple(call: Any) -> bool:
    return len(call.results) == 1 and str(call.result.type).startswith("tuple<")


def _with_results(call: Any) -> None:
    """Give a call of a library its results back in place of one tuple, which Shardy refuses."""
    kind = ir.TupleType(call.result.type)
    types = [kind.get_type(i) for i in range(kind.num_types)]
    attributes = {name: call.attributes[name] for name in call.attributes}
    with ir.InsertionPoint(call):
        made = ir.Operation.create(
            _CALL, results=types, operands=list(call.operands), attributes=attributes
        )
    for use in list(call.result.uses):
        element = use.owner.operation
        number = ir.IntegerAttr(element.attributes["index"]).value
        element.result.replace_all_uses_with(made.results[number])
        element.erase()
    call.erase()


def _target(custom_call: Any) -> str:
    return ir.StringAttr(custom_call.attributes["call_target_name"]).value


def _frontend(op: Any) -> dict[str, Any]:
    if _FRONTEND not in op.attributes:
        return {}
    return {each.name: each.attr for each in ir.DictAttr(op.attributes[_FRONTEND])}


def _set_frontend(op: Any, attributes: dict[str, Any]) -> None:
    op.attributes[_FRONTEND] = ir.DictAttr.get(attributes)
