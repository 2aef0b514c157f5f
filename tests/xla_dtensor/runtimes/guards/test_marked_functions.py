"""What torch.compile puts around functions of torch's optimizers guards as what is inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.xla_dtensor.runtimes.guards.recorded import guards_of, why
from xla_dtensor.runtimes.guards import Guards

Replace = Callable[[type, Any], None]
NAME = "_init_group"
ORIGINAL = torch.optim.Adam.__dict__[NAME]
ORIGINAL = getattr(ORIGINAL, "_torchdynamo_orig_callable", ORIGINAL)  # Another test may have run.


def of_the_users(*args: Any) -> Any:
    return ORIGINAL(*args)


def marked(function: Any) -> Any:
    """Wrap a function as torch.compile does when it is used first in a process."""
    return torch._dynamo.disable(function, reason="not supported")


@pytest.fixture
def replace() -> Iterator[Replace]:
    kinds = (torch.optim.Adam, torch.optim.AdamW)
    before = [(kind, kind.__dict__[NAME]) for kind in kinds if NAME in kind.__dict__]

    def put(kind: type, function: Any) -> None:
        setattr(kind, NAME, function)

    def inherit() -> None:
        for kind in kinds:
            if NAME in kind.__dict__:
                delattr(kind, NAME)

    inherit()
    put(torch.optim.Adam, ORIGINAL)
    yield put
    inherit()
    for kind, function in before:
        put(kind, function)


def guards_of_a_step() -> Guards:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    guards = guards_of(optimizer.step)
    assert why(guards) is None
    return guards


@pytest.mark.parametrize("kinds", [[torch.optim.Adam], [torch.optim.AdamW]])
@pytest.mark.parametrize("times", [1, 2])
def test_a_mark_around_torchs_function_is_none(
    replace: Replace, kinds: list[type], times: int
) -> None:
    guards = guards_of_a_step()
    function = ORIGINAL
    for _ in range(times):
        function = marked(function)
    for kind in kinds:
        replace(kind, function)
    for _ in range(2):
        assert why(guards) is None
    assert guards._pass is not None  # Later looks compare what stands there now, at once.
    assert guards._pass.holds()


def test_guards_of_marked_functions_hold_without_the_marks(replace: Replace) -> None:
    replace(torch.optim.AdamW, marked(ORIGINAL))
    guards = guards_of_a_step()
    replace(torch.optim.AdamW, ORIGINAL)
    assert why(guards) == "AdamW._init_group changed from nothing to Adam._init_group"
    replace(torch.optim.AdamW, marked(ORIGINAL))
    assert why(guards) is None


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("function", [of_the_users, marked(of_the_users)])
def test_a_replacement_of_the_users_is_seen(replace: Replace, kind: type, function: Any) -> None:
    guards = guards_of_a_step()
    replace(kind, function)
    assert "_init_group" in str(why(guards))


def test_a_mark_around_another_function_of_torchs_is_seen(replace: Replace) -> None:
    guards = guards_of_a_step()
    replace(torch.optim.AdamW, marked(torch.optim.SGD.__dict__[NAME]))
    assert "_init_group" in str(why(guards))
