"""Views alias as in torch: any chain of views, any write through it, and autograd over both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xla_dtensor import DeviceMesh, distribute_tensor
from xla_dtensor.errors import UnsupportedOpError

pytestmark = [pytest.mark.only_on("jax"), pytest.mark.usefixtures("runtime")]

PROPERTY = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SHAPES = ((5, 6), (4, 3, 2), (1, 6), (8,), (2, 1, 4))
SHARDED = ("dp", "tp", None)
View = Callable[[torch.Tensor], torch.Tensor]


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def put(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return distribute_tensor(tensor, mesh, SHARDED[: tensor.ndim] or None)


def a_view(draw: st.DrawFn, x: torch.Tensor) -> tuple[str, View]:
    """One view that plain torch allows on `x`, with a text for hypothesis to show."""
    dim = draw(st.integers(-x.ndim, x.ndim - 1))
    size = x.shape[dim]
    other = draw(st.integers(0, x.ndim - 1))
    index = draw(st.integers(-size, size - 1)) if size else 0
    start, stop = draw(st.integers(0, size)), draw(st.integers(-1, size + 1))
    step = draw(st.integers(1, 3))
    perm = draw(st.permutations(range(x.ndim)))
    at = (slice(None),) * (dim % x.ndim)
    options: dict[str, View | None] = {
        f"permute{perm}": lambda t: t.permute(*perm),
        f"transpose({dim}, {other})": lambda t: t.transpose(dim, other),
        f"slice({dim}, {start}:{stop}:{step})": lambda t: t[(*at, slice(start, stop, step))],
        f"unsqueeze({dim})": lambda t: t.unsqueeze(dim),
        f"squeeze({dim})": lambda t: t.squeeze(dim),
        "squeeze()": lambda t: t.squeeze(),
        "t()": (lambda t: t.t()) if x.ndim <= 2 else None,
        f"select({dim}, {index})": (lambda t: t.select(dim, index)) if size else None,
        f"split({step}, {dim})": (lambda t: t.split(step, dim)[-1]) if size else None,
        f"unbind({dim})": (lambda t: t.unbind(dim)[index]) if size else None,
        f"diagonal({step - 2})": (lambda t: t.diagonal(step - 2)) if x.ndim > 1 else None,
        f"unfold({dim})": (lambda t: t.unfold(dim, min(2, size), 2)) if size > 1 else None,
        "view(-1)": (lambda t: t.view(-1)) if x.is_contiguous() else None,
        "view(1, *shape)": lambda t: t.view(1, *t.shape),
    }
    name = draw(st.sampled_from([n for n, view in options.items() if view is not None]))
    view = options[name]
    assert view is not None
    return name, view


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[str, View]]]:
    """A shape, and up to four views one upon the other."""
    shape = draw(st.sampled_from(SHAPES))
    x, chain = numbers(shape), []
    for _ in range(draw(st.integers(1, 4))):
        if not x.ndim:
            break
        chain.append(a_view(draw, x))
        x = chain[-1][1](x)
    return shape, chain


def applied(x: torch.Tensor, chain: list[tuple[str, View]]) -> torch.Tensor:
    for _, view in chain:
        x = view(x)
    return x


def overwrite(x: torch.Tensor) -> None:
    x[...] = 7.0


def overwrite_first(x: torch.Tensor) -> None:
    if x.ndim and len(x):
        x[0] = x[-1] * 2


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda x: x.mul_(2),
    "fill_": lambda x: x.fill_(3),
    "zero_": lambda x: x.zero_(),
    "add_": lambda x: x.add_(x, alpha=0.5),
    "copy_": lambda x: x.copy_(x.clone().neg()),
    "setitem": overwrite,
    "setitem of a part": overwrite_first,
    "out=": lambda x: torch.add(x, 1, out=x),
}


@PROPERTY
@given(chains(), st.lists(st.sampled_from(sorted(WRITES)), min_size=1, max_size=2))
def test_reads_and_writes_through_views(mesh: DeviceMesh, chain: Any, writes: list[str]) -> None:
    shape, views = chain
    plain, ours = numbers(shape), put(numbers(shape), mesh)
    plain_view, our_view = applied(plain, views), applied(ours, views)
    assert (our_view.shape, our_view.stride()) == (plain_view.shape, plain_view.stride())
    assert our_view.storage_offset() == plain_view.storage_offset()
    assert torch.equal(our_view.cpu(), plain_view)
    for name in writes:
        WRITES[name](plain_view)
        WRITES[name](our_view)
        assert torch.equal(our_view.cpu(), plain_view)
        assert torch.equal(ours.cpu(), plain)
    plain.mul_(3)
    ours.mul_(3)
    assert torch.equal(our_view.cpu(), plain_view)


@PROPERTY
@given(
    chains(), st.sampled_from(["mul_", "add_", "copy_", "setitem", "fill_", "setitem of a part"])
)
def test_gradients_through_writes_to_views(mesh: DeviceMesh, chain: Any, write: str) -> None:
    shape, views = chain

    def gradient(place: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        leaf = place(numbers(shape)).requires_grad_()
        x = leaf * 1.5
        view = applied(x, views)
        WRITES[write](view)
        weights = place(numbers(shape).sin())
        ((x * x * weights).sum() + (view * view).sum()).backward()
        assert leaf.grad is not None
        return leaf.grad

    # torch refuses to write in place to one of several views of one call, on both sides.
    try:
        expected = gradient(lambda t: t)
    except RuntimeError as error:
        if "multiple views" not in str(error):
            raise
        with pytest.raises(RuntimeError, match="multiple views"):
            gradient(lambda t: put(t, mesh))
        return
    torch.testing.assert_close(gradient(lambda t: put(t, mesh)).cpu(), expected)


@PROPERTY
@given(st.data())
def test_as_strided_of_a_contiguous_tensor(mesh: DeviceMesh, data: st.DataObject) -> None:
    size = data.draw(st.lists(st.integers(0, 3), max_size=3))
    stride = data.draw(st.lists(st.integers(0, 4), min_size=len(size), max_size=len(size)))
    offset = data.draw(st.integers(0, 5))
    plain, ours = numbers((5, 6)), put(numbers((5, 6)), mesh)
    expected = plain.as_strided(size, stride, offset)
    found = ours.as_strided(size, stride, offset)
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    assert torch.equal(found.cpu(), expected)


def test_as_strided_outside_of_a_view_is_refused(mesh: DeviceMesh) -> None:
    half = put(numbers((8,)), mesh)[4:]
    with pytest.raises(UnsupportedOpError, match="reaches memory outside"):
        half.as_strided((2,), (1,), 0)
    gaps = put(numbers((8,)), mesh)[::2]
    with pytest.raises(UnsupportedOpError, match="reaches memory outside"):
        gaps.as_strided((4,), (1,), 0)


IN_PLACE_SHAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "t_": lambda x: x[:, :, 0].t_(),
    "transpose_": lambda x: x.transpose_(0, 2),
    "squeeze_": lambda x: x.squeeze_(),
    "squeeze_ of a dim": lambda x: x.squeeze_(1),
    "unsqueeze_": lambda x: x.unsqueeze_(-1),
    "swapdims_": lambda x: x.swapdims_(0, -1),
}


@pytest.mark.parametrize("name", IN_PLACE_SHAPES)
def test_in_place_shape_ops(mesh: DeviceMesh, name: str) -> None:
    plain, ours = numbers((5, 1, 6)), put(numbers((5, 1, 6)), mesh)
    expected, found = IN_PLACE_SHAPES[name](plain), IN_PLACE_SHAPES[name](ours)
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    assert (ours.shape, ours.stride()) == (plain.shape, plain.stride())
    found.mul_(2)
    expected.mul_(2)
    assert torch.equal(ours.cpu(), plain)
    assert torch.equal(found.cpu(), expected)


def test_resizing_to_another_size_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(UnsupportedOpError, match="keeps its number of elements"):
        put(numbers((4, 2)), mesh).resize_(2, 2)


def test_an_expanded_tensor_can_be_read_and_not_written(mesh: DeviceMesh) -> None:
    x = put(numbers((4, 1)), mesh)
    wide = x.expand(2, 4, 3)
    assert torch.equal(wide.cpu(), numbers((4, 1)).expand(2, 4, 3))
    assert torch.equal(
        wide.diagonal(0, 1, 2).cpu(), numbers((4, 1)).expand(2, 4, 3).diagonal(0, 1, 2)
    )
    with pytest.raises(RuntimeError, match="share one place"):
        wide.mul_(2)
    x.mul_(2)
    assert torch.equal(wide.cpu(), 2 * numbers((4, 1)).expand(2, 4, 3))


AUGMENTED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "&=": lambda a, b: a.__iand__(b),
    "|=": lambda a, b: a.__ior__(b),
    "^=": lambda a, b: a.__ixor__(b),
    "<<=": lambda a, b: a.__ilshift__(b),
    ">>=": lambda a, b: a.__irshift__(b),
}


@pytest.mark.parametrize("name", AUGMENTED)
def test_augmented_assignment_writes_in_place(mesh: DeviceMesh, name: str) -> None:
    a, b = torch.arange(5, 13), torch.arange(8) % 3
    ours, expected = put(a, mesh), a.clone()
    AUGMENTED[name](ours[2:], put(b, mesh)[2:])
    AUGMENTED[name](expected[2:], b[2:])
    assert torch.equal(ours.cpu(), expected)


def test_a_write_through_a_mask(mesh: DeviceMesh) -> None:
    plain = numbers((5, 6)).sin()
    ours = put(plain.clone(), mesh)
    mask = plain > 0
    ours[put(mask, mesh)] = 5.0
    plain[mask] = 5.0
    rows = torch.tensor([True, False, True, False, True])
    ours[put(rows, mesh)] = -1.0
    plain[rows] = -1.0
    assert torch.equal(ours.cpu(), plain)


def test_complex_views_alias(mesh: DeviceMesh) -> None:
    plain = torch.complex(numbers((4, 2)), -numbers((4, 2)))
    ours = put(plain.clone(), mesh)
    torch.view_as_real(ours)[..., 0].mul_(3)
    torch.view_as_real(plain)[..., 0].mul_(3)
    assert torch.equal(ours.cpu(), plain)
    assert torch.equal(ours.conj().cpu(), plain.conj().resolve_conj())
    assert torch.equal(
        torch.view_as_complex(put(numbers((4, 2)), mesh)).cpu().real, numbers((4, 2))[:, 0]
    )
