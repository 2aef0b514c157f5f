"""The host's tape: doing it again gives what PyTorch gives when it runs the step again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import _disable_current_modes

from xla_dtensor.runtimes.host_work import HostTape, OtherwiseError
from xla_dtensor.runtimes.host_work.mode import HostOps
from xla_dtensor.runtimes.host_work.noticing import noticing
from xla_dtensor.runtimes.host_work.tape import memory_key

Step = Callable[[], Sequence[torch.Tensor]]


class Taped:
    """A step whose host's work is on a tape; the first run writes it."""

    def __init__(self, step: Step, older: Sequence[torch.Tensor], generators: Any = ()) -> None:
        tape = HostTape({memory_key(tensor) for tensor in older})
        for generator in generators:
            tape.note_generator(generator)
        self.numbers: list[int | None] = []
        self.last: list[torch.Tensor] = []

        def give(tensor: torch.Tensor) -> None:
            self.numbers.append(tape.take(tensor))
            with _disable_current_modes():
                self.last.append(tensor.detach().clone())

        with noticing(tape), HostOps(tape), giving(give):
            for tensor in step():
                give(tensor)
        self.work, _ = tape.finish()

    def again(self) -> list[torch.Tensor]:
        """Do it again; return what the step gives then."""
        run = None if self.work is None else self.work.redo()
        if run is not None:
            self.last = [
                last if number is None else run.taken[number]
                for last, number in zip(self.last, self.numbers, strict=True)
            ]
        return self.last

    def kinds(self) -> list[str]:
        """Return the kinds of the steps that are done again."""
        return [] if self.work is None else [type(step).__name__ for step in self.work.steps]


_give: Callable[[torch.Tensor], None] = print


@contextmanager
def giving(give: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Let the steps of a block give tensors on their way by `give`."""
    global _give
    before, _give = _give, give
    try:
        yield
    finally:
        _give = before


def plainly(step: Step) -> list[torch.Tensor]:
    """Return what a step gives, on its way and in the end."""
    found: list[torch.Tensor] = []
    with giving(lambda tensor: found.append(tensor.detach().clone())):
        found += [tensor.detach() for tensor in step()]
    return found


def check(make: Callable[[], tuple[Step, list[torch.Tensor], Callable[[int], None]]]) -> Taped:
    """Compare a tape with PyTorch over some calls."""
    step, older, change = make()
    torch.manual_seed(3)
    taped = Taped(step, older)
    found = [taped.last]
    for call in range(1, 4):
        change(call)
        found.append(taped.again())
    state = torch.get_rng_state()
    step, _, change = make()
    torch.manual_seed(3)
    for call, mine in enumerate(found):
        if call:
            change(call)
        for a, b in zip(mine, plainly(step), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.get_rng_state(), state)
    return taped


def test_constants_are_not_done_again() -> None:
    taped = check(lambda: (lambda: [torch.ones(3) * 2], [], lambda call: None))
    assert taped.work is None


def test_only_what_varies_is_done_again() -> None:
    def make() -> Any:
        weight = torch.ones(3)

        def step() -> list[torch.Tensor]:
            torch.ones(3).mul(5)  # nobody's
            weight.exp()  # nobody takes it
            mask = torch.ones(3, 3).tril()
            mask[0, 1] = 7
            return [mask * weight, mask]

        return step, [weight], weight.fill_

    taped = check(make)
    assert taped.kinds() == ["Call", "Take"]
    assert taped.numbers == [0, None]


def test_an_op_that_returns_less_without_a_gradient() -> None:
    def make() -> Any:
        lstm, x = torch.nn.LSTM(4, 5), torch.ones(3, 2, 4)
        return lambda: [lstm(x)[0]], [x, *lstm.parameters()], x.fill_

    with torch.random.fork_rng():
        check(make)


def test_a_constant_that_is_written_after_its_use() -> None:
    def make() -> Any:
        weight = torch.ones(3)

        def step() -> list[torch.Tensor]:
            mask = torch.ones(3)
            first = mask * weight
            mask.mul_(2)
            return [first, mask * weight, mask]

        return step, [weight], weight.fill_

    check(make)


def test_a_place_is_read_when_the_step_read_it() -> None:
    def make() -> Any:
        weight = torch.ones(3)

        def step() -> list[torch.Tensor]:
            before = weight * 1
            weight.add_(1)
            view = weight[1:]
            view.mul_(2)
            return [before, weight, view]

        return step, [weight], lambda call: None

    check(make)


def test_what_is_taken_is_a_copy() -> None:
    weight = torch.ones(3)
    tape = HostTape({memory_key(weight)})
    with HostOps(tape):
        tape.take(weight)
        weight.add_(1)
        tape.take(weight)
    work, _ = tape.finish()
    assert work is not None
    run = work.redo()
    assert run is not None
    assert [run.taken[i].tolist() for i in (0, 1)] == [[2.0] * 3, [3.0] * 3]


def test_generators_of_the_step_and_of_others() -> None:
    mine = torch.Generator().manual_seed(5)

    def step() -> list[torch.Tensor]:
        fresh = torch.Generator().manual_seed(1)
        return [torch.rand(2, generator=mine), torch.rand(2, generator=fresh)]

    taped = Taped(step, [], [mine])
    found = [taped.last, taped.again(), taped.again()]
    expected = torch.Generator().manual_seed(5)
    for theirs, fresh in found:
        assert torch.equal(theirs, torch.rand(2, generator=expected))
        assert torch.equal(fresh, torch.rand(2, generator=torch.Generator().manual_seed(1)))


def test_setting_a_state_without_a_draw() -> None:
    def step() -> list[torch.Tensor]:
        torch.manual_seed(4)
        return []

    taped = Taped(step, [])
    torch.rand(3)
    taped.again()
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(4).get_state())


def test_a_state_that_is_read_under_a_mode_of_functions() -> None:
    def step() -> list[torch.Tensor]:
        with torch.device("cpu"):
            state = torch.get_rng_state()
            drawn = torch.rand(3)
            torch.set_rng_state(state)
        return [drawn]

    check(lambda: (step, [], lambda call: None))


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda w: w[0].item(),
    "bool": lambda w: bool(w.sum() > 3),
    "int": lambda w: int(w[1]),
    "tolist": lambda w: w.tolist(),
    "numpy": lambda w: w.numpy().sum(),
    "asarray": lambda w: np.asarray(w * 2)[0],
    "iteration": lambda w: [float(v) for v in w],
    "equal": lambda w: torch.equal(w, torch.ones(3)),
    "shape": lambda w: (w > 1).nonzero().shape,
    "unique": lambda w: len(torch.unique(w)),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_that_comes_out_otherwise(name: str) -> None:
    """It is noticed; and nothing of the run is left: no write, and no draw."""
    weight, count = torch.ones(3), torch.zeros(())

    def step() -> list[torch.Tensor]:
        count.add_(1)
        drawn = torch.rand(2)
        READS[name](weight)
        return [drawn * count]

    taped = Taped(step, [weight, count])
    taped.again()
    state, counted = torch.get_rng_state(), count.clone()
    weight.copy_(torch.tensor([5.0, 7.0, 0.0]))
    with pytest.raises(OtherwiseError):
        taped.again()
    assert torch.equal(count, counted)
    assert torch.equal(torch.get_rng_state(), state)
    weight.fill_(1)
    taped.again()
    assert count == counted + 1


def test_reads_of_constants_are_no_reason() -> None:
    weight = torch.ones(3)

    def step() -> list[torch.Tensor]:
        fixed = torch.arange(3.0)
        return [weight * sum(read(fixed) for read in (READS["item"], READS["int"]))]

    taped = Taped(step, [weight])
    weight.add_(1)
    taped.again()
    assert "Answer" not in taped.kinds()


def test_another_shape_is_noticed() -> None:
    holder = torch.ones(3)
    taped = Taped(lambda: [holder * 2], [holder])
    holder.resize_(4).fill_(1)
    with pytest.raises(OtherwiseError, match=r"shape=\(3,\).*shape=\(4,\)"):
        taped.again()


def test_a_tape_is_taken_back() -> None:
    weight, generator = torch.ones(3), torch.Generator().manual_seed(2)
    state = generator.get_state(), torch.get_rng_state()
    tape = HostTape({memory_key(weight)})
    tape.note_generator(generator)
    with HostOps(tape):
        weight[1:].mul_(3)
        weight.add_(torch.rand(3))
        torch.rand(2, generator=generator)
    tape.put_back()
    assert torch.equal(weight, torch.ones(3))
    assert torch.equal(generator.get_state(), state[0])
    assert torch.equal(torch.get_rng_state(), state[1])


def test_torch_is_itself_again() -> None:
    before = {name: vars(torch.Tensor).get(name) for name in ("tolist", "numpy", "__array__")}
    with pytest.raises(ValueError, match="no number"), noticing(HostTape()):
        raise ValueError("no number")
    assert {name: vars(torch.Tensor).get(name) for name in before} == before


# ---------------------------------------------------------------------- drawn programs

# Each takes the pool of tensors, all of shape (3,), and two indices; what it makes joins the pool.
OPS: dict[str, Callable[[list[torch.Tensor], int, int], torch.Tensor]] = {
    "add": lambda pool, i, j: pool[i] + pool[j],
    "mul": lambda pool, i, j: pool[i] * 0.5,
    "constant": lambda pool, i, j: torch.full((3,), float(i)),
    "numbers": lambda pool, i, j: torch.tensor([float(i), 1.0, 2.0]),
    "alias": lambda pool, i, j: pool[i].view(3),
    "detach": lambda pool, i, j: pool[i].detach(),
    "flip": lambda pool, i, j: pool[i].flip(0),
    "gather": lambda pool, i, j: pool[i][torch.tensor([j % 3, 0, 1])],
    "where": lambda pool, i, j: torch.where(pool[i] > pool[j], pool[i], 0.0),
    "rand": lambda pool, i, j: torch.rand(3),
    "bernoulli": lambda pool, i, j: torch.bernoulli(torch.sigmoid(pool[i])),
}


WRITES: dict[str, Callable[[list[torch.Tensor], int, int], Any]] = {
    "add_": lambda pool, i, j: pool[i].add_(1),
    "copy_": lambda pool, i, j: pool[i].copy_(pool[j].clone()),
    "slice_": lambda pool, i, j: pool[i][j % 3 :].mul_(0.5),
    "set": lambda pool, i, j: pool[i].__setitem__(j % 3, 2.0),
    "uniform_": lambda pool, i, j: pool[i].uniform_(),
    "out": lambda pool, i, j: torch.add(pool[i].clone(), pool[j], out=pool[j]),
    "seed": lambda pool, i, j: torch.manual_seed(i),
    "back": lambda pool, i, j: torch.set_rng_state(STATES[i % len(STATES)]) if STATES else None,
    "keep": lambda pool, i, j: STATES.append(torch.get_rng_state()),
    "give": lambda pool, i, j: _give(pool[i]),
}
STATES: list[torch.Tensor] = []
PROGRAM = st.lists(
    st.tuples(st.sampled_from([*OPS, *WRITES]), st.integers(0, 9), st.integers(0, 9)), max_size=14
)
CHANGES = st.lists(st.tuples(st.integers(0, 2), st.floats(-2, 2, width=32)), max_size=3)


def done(name: str, pool: list[torch.Tensor], i: int, j: int) -> None:
    """Do an op of the table."""
    i, j = i % len(pool), j % len(pool)
    if name in WRITES:
        WRITES[name](pool, i, j)
    else:
        pool.append(OPS[name](pool, i, j))


@settings(max_examples=200, deadline=None)
@given(program=PROGRAM, changes=CHANGES)
def test_any_program(program: Any, changes: Any) -> None:
    """Views, writes to what is older and to what is not, draws, seeds, states that are set back."""

    def make() -> Any:
        older = [torch.full((3,), float(i)) for i in range(3)]

        def step() -> list[torch.Tensor]:
            STATES.clear()
            pool = list(older)
            for name, i, j in program:
                done(name, pool, i, j)
            return pool

        def change(call: int) -> None:
            for which, value in changes[:call]:
                older[which].fill_(value)

        return step, older, change

    check(make)


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tape that takes draws for constants is found out."""
    from xla_dtensor.runtimes.host_work import tape

    monkeypatch.setattr(tape, "DRAWS", torch.Tag.pointwise)
    with pytest.raises(AssertionError):
        check(lambda: (lambda: [torch.rand(3)], [], lambda call: None))
