"""The probe passes on this torch, and fails where ops go past the subclass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from xla_dtensor.dtensor.dispatch import check_dispatch
from xla_dtensor.errors import RuntimeSetupError


def test_this_torch_asks_the_subclass() -> None:
    check_dispatch()


class Bypassing(torch.Tensor):
    """A base whose ops never reach an override below it, as in torch 2.10 to 2.12."""

    def __init_subclass__(cls, **_: Any) -> None:
        cls.__torch_dispatch__ = classmethod(lambda cls, *_: torch.ones(()))  # pyright: ignore


def test_a_torch_that_goes_past_the_subclass_is_refused() -> None:
    with pytest.raises(RuntimeSetupError, match=r"past the subclass.*Install torch 2\.9"):
        check_dispatch(Bypassing)


class Raising(torch.Tensor):
    """A base whose own dispatch stumbles over the probe."""

    def __init_subclass__(cls, **_: Any) -> None:
        def fail(cls: Any, *_: Any) -> Any:
            raise AttributeError("_spec")

        cls.__torch_dispatch__ = classmethod(fail)  # pyright: ignore


def test_a_dispatch_that_raises_counts_as_past_the_subclass() -> None:
    with pytest.raises(RuntimeSetupError):
        check_dispatch(Raising)
