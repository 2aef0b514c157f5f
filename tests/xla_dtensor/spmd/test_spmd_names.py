"""torch_xla's public names, signatures and numbers, as the installed torch_xla has them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import xla_dtensor.spmd as xs

# Each needs something that is no annotation: a JAX function inside a torch_xla program, a JAX mesh
# beside it, a cache that is not kept here.
LEFT_OUT = {"shard_as"}
LEFT_OUT_METHODS = {"get_jax_mesh", "invalidate_spec_cache"}

Parameters = list[list[Any]]


def parameters(function: Callable[..., Any]) -> Parameters:
    return [
        [p.name, p.kind.name, None if p.default is p.empty else repr(p.default)]
        for p in inspect.signature(function).parameters.values()
    ]


def takes_all_of(ours: Parameters, theirs: Parameters) -> bool:
    """Whether a call written for theirs means the same to ours: what is more has a default."""
    open_ended = {"VAR_POSITIONAL", "VAR_KEYWORD"}
    named = [p for p in theirs if p[1] not in open_ended]
    more = [p for p in ours if p not in named and p[1] not in open_ended]
    return ours[: len(named)] == named and all(p[2] is not None for p in more)


def test_takes_all_of_can_fail() -> None:
    def theirs(t: int, mesh: int = 1) -> None: ...
    def longer(t: int, mesh: int = 1, *, more: int = 2) -> None: ...
    def renamed(t: int, the_mesh: int = 1) -> None: ...
    def demanding(t: int, mesh: int = 1, *, more: int) -> None: ...

    assert takes_all_of(parameters(longer), parameters(theirs))
    assert not takes_all_of(parameters(renamed), parameters(theirs))
    assert not takes_all_of(parameters(demanding), parameters(theirs))


def test_the_names(torch_xla_says: dict[str, Any]) -> None:
    theirs = {name for name in torch_xla_says["names"] if not name.startswith("_")}
    assert theirs - set(xs.__all__) == LEFT_OUT


def test_the_signatures_of_functions(torch_xla_says: dict[str, Any]) -> None:
    shared = set(torch_xla_says["functions"]) & set(xs.__all__)
    assert len(shared) == 17
    for name in sorted(shared):
        theirs = torch_xla_says["functions"][name]
        assert takes_all_of(parameters(getattr(xs, name)), theirs), name


def test_the_signatures_of_classes(torch_xla_says: dict[str, Any]) -> None:
    for name, theirs in torch_xla_says["constructors"].items():
        cls = getattr(xs, name)
        made_by = cls.__new__ if name == "XLAShardedTensor" else cls
        ours = [p for p in parameters(made_by) if p[0] != "cls"]
        assert takes_all_of(ours, theirs), name


def test_the_methods(torch_xla_says: dict[str, Any]) -> None:
    for name, theirs in torch_xla_says["methods"].items():
        cls = getattr(xs, name)
        for method in set(theirs) - LEFT_OUT_METHODS:
            given = [p[0] for p in theirs[method] if p[1] != "KEYWORD_ONLY"]
            inspect.signature(getattr(cls, method)).bind(*given)
        assert {m for m in theirs if not hasattr(cls, m)} <= LEFT_OUT_METHODS


def test_the_numbers_of_sharding_types(torch_xla_says: dict[str, Any]) -> None:
    assert {t.name: t.value for t in xs.ShardingType} == torch_xla_says["types"]


def test_star_import_brings_all_public_names() -> None:
    space: dict[str, Any] = {}
    exec("from xla_dtensor.spmd import *", space)
    assert {name for name in space if not name.startswith("__")} == set(xs.__all__)
    assert xs.__all__ == sorted(xs.__all__)


@pytest.mark.parametrize("name", xs.__all__)
def test_each_name_has_a_docstring_of_its_own(name: str) -> None:
    assert inspect.getdoc(getattr(xs, name))
