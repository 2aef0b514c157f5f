"""How Python checks values: the forms of `test_step_checks`, whose asserts pytest leaves as is."""

from __future__ import annotations

from typing import Any

import torch


def asserted(x: Any) -> Any:
    assert (x > 0).all(), "x is to be positive"
    return x * 2


def raised(x: Any) -> Any:
    if torch.any(x <= 0):
        raise ValueError("x is to be positive")
    return x * 2


def raised_else(x: Any) -> Any:
    if (x > 0).all():
        return x * 2
    text = f"x={x!r} is to be positive"
    raise ValueError(text)


def second_of_two(x: Any) -> Any:
    if x.ndim != 1:
        raise TypeError("x is to have one dim")
    elif x.min() <= 0:
        raise ValueError("x is to be positive")
    return x * 2


def by_item(x: Any) -> Any:
    if not (x > 0).all().item():
        raise ValueError("x is to be positive")
    return x * 2


def by_number(x: Any) -> Any:
    if x.min().item() <= 0:
        raise ValueError("x is to be positive")
    return x * 2


def both(x: Any) -> Any:
    assert (x > 0).all() and (x < 100).all()  # noqa: PT018
    return x * 2


def one_of_two(x: Any) -> Any:
    if x.ndim > 3 or (x <= 0).any():
        raise ValueError("x is to be positive")
    return x * 2


def equal_to(x: Any) -> Any:
    assert torch.equal(x, x.abs().clamp(min=1e-6))
    return x * 2


def close_to(x: Any) -> Any:
    assert torch.allclose(x, x.abs().clamp(min=1e-3))
    return x * 2


def of_torchs(x: Any) -> Any:
    torch._check_tensor_all(x > 0, lambda: "x is to be positive")
    return x * 2


def by_variable(x: Any) -> Any:
    is_positive = (x > 0).all().item()
    if not is_positive:
        raise ValueError("x is to be positive")
    return x * 2


def in_a_try(x: Any) -> Any:
    try:
        with torch.no_grad():
            assert (x > 0).all()
    finally:
        y = x * 2
    return y


# Each takes eight positive numbers, and raises for others.
# A jump over more than one byte can say has an instruction before it.
_STEPS = "\n".join(["        x = x * 1.0 + 0.0"] * 99)


def in_a_long_loop(x: Any) -> Any:
    names: dict[str, Any] = {}
    lines = "def checked(x):\n    for _ in range(2):\n        assert (x > 0).all()\n" + _STEPS
    exec(compile(lines + "\n    return x * 2\n", __file__, "exec"), names)
    return names["checked"](x)


FORMS = (
    *(asserted, raised, raised_else, second_of_two, by_item, by_number, both, one_of_two),
    *(equal_to, close_to, of_torchs, by_variable, in_a_try, in_a_long_loop),
)


def goes_on_in_both_ways(x: Any) -> Any:
    if (x > 0).all():
        x = x * 3
    return x * 2


def keeps_the_answer(x: Any) -> Any:
    is_positive = bool((x > 0).all())
    return x * 2 if is_positive else x


def waits(x: Any) -> Any:
    while (x < 4).any():
        x = x * 2
    return x


def raises_at_times(x: Any) -> Any:
    if (x > 0).all():
        if x.ndim > 1:
            raise ValueError("x is to have one dim")
        return x * 3
    return x * 2


BRANCHES = (goes_on_in_both_ways, keeps_the_answer, waits, raises_at_times)
