"""What the tests of the torch-facing layer share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.runtimes import Runtime


class Setting:
    """What bad input is tried on: a mesh, and a DTensor of shape (8, 4) on it."""

    def __init__(self, mesh: xd.DeviceMesh) -> None:
        self.mesh = mesh
        self.d = xd.distribute_tensor(torch.ones(8, 4), mesh, [Shard(0), Replicate()])

    def put(self, *placements: Any, shape: tuple[int, ...] = (8, 4)) -> Any:
        return xd.distribute_tensor(torch.ones(shape), self.mesh, list(placements))


@pytest.fixture(scope="module")
def setting(mesh: xd.DeviceMesh) -> Setting:
    return Setting(mesh)


@pytest.fixture
def check_refused(setting: Setting, runtime: Runtime) -> Callable[..., None]:
    """Check one row of a table of bad input: (call, error, builtin error, text).

    A text of three sentences is the whole message, anything shorter is a part of it. Each message
    has three sentences, whatever the row says of it.
    """

    def check(row: tuple[Any, type[Exception], type[Exception], str]) -> None:
        call, error, builtin, text = row
        with pytest.raises(error) as raised:
            call(setting)
        message, expected = str(raised.value), text.replace("RUNTIME", runtime.name)
        assert isinstance(raised.value, builtin)
        assert message == expected if len(sentences(expected)) >= 3 else expected in message
        assert len(sentences(message)) >= 3, message
        # Nothing was left half done.
        assert torch.equal(setting.d.cpu(), torch.ones(8, 4))

    return check


def sentences(message: str) -> list[str]:
    """The sentences of a message; a point inside a word or a number ends none."""
    return re.findall(r"[^.]+(?:\.(?! |$)[^.]*)*\.(?= |$)", message)


@pytest.fixture
def count_sentences() -> Callable[[str], int]:
    return lambda message: len(sentences(message))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Let ``torch.compile`` begin anew, and leave nothing of the test behind."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["eager", "aot_eager"])
def backend(request: pytest.FixtureRequest) -> str:
    """Return a back end of ``torch.compile``."""
    return request.param
