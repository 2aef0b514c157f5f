"""Whenever what a step reads of drawn objects changes, its guards break; otherwise they hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xla_dtensor.runtimes.guards.recorded import guards_of, why


class Node:
    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


class Asked:
    """Finds its names in a dict, as many configurations do."""

    def __init__(self, a: Any, b: Any) -> None:
        self.__dict__["held"] = {"a": a, "b": b}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["held"][name]
        except KeyError:
            raise AttributeError(name) from None


KINDS: dict[str, Any] = {
    "node": Node,
    "slots": Slotted,
    "asked": Asked,
    "namespace": lambda a, b: SimpleNamespace(a=a, b=b),
    "dict": lambda a, b: {"a": a, "b": b},
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
}
OF_ONE_READ = {"node", "slots"}  # whose attributes are noted one by one
TREE = st.recursive(
    st.just(None),
    lambda inner: st.tuples(st.sampled_from(list(KINDS)), inner, inner),
    max_leaves=8,
).filter(lambda shape: shape is not None)
Path = tuple[tuple[str, str], ...]


def built(shape: Any, numbers: list[float]) -> Any:
    """Build objects of a drawn shape, with a number for each leaf."""
    if shape is None:
        return numbers.pop()
    kind, *parts = shape
    return KINDS[kind](*(built(part, numbers) for part in parts))


def paths_of(shape: Any, path: Path = ()) -> list[Path]:
    """Return the paths to all leaves, each step with the kind of what it goes through."""
    if shape is None:
        return [path]
    kind, *parts = shape
    pairs = zip("ab", parts, strict=True)
    return [leaf for name, part in pairs for leaf in paths_of(part, (*path, (kind, name)))]


def text_of(root: str, path: Path) -> str:
    """Return the Python that reads a path."""
    for kind, name in path:
        by_number = f"[{'ab'.index(name)}]"
        forms = {"dict": f"[{name!r}]", "list": by_number, "tuple": by_number}
        root += forms.get(kind, f".{name}")
    return root


def write(root: Any, path: Path, number: float) -> None:
    """Write a number at a path; a tuple stays as it is."""
    statement = f"{text_of('root', path)} = number"
    if path[-1][0] == "asked":
        statement = f"{text_of('root', path[:-1])}.held[{path[-1][1]!r}] = number"
    if path[-1][0] != "tuple":
        exec(statement, {"root": root, "number": number})


# How a step reads a path of `root`: the names in the text are those of the code below.
FORMS = {
    "straight": "    found.append({path})\n",
    "by a local": "    part_{n} = {front}\n    found.append({last})\n",
    "in a function": "    found.append((lambda: {path})())\n",
    "passed on": "    found.append(read_{n}({front}))\n",
    "by stars": "    found.append(read_{n}(*({front},)))\n",
    "by a keyword": "    found.append(read_{n}(**dict(part_{n}={front})))\n",
    "mapped": "    found.extend(map(read_{n}, [{front}]))\n",
    "in a loop": "    for part_{n} in [{front}]:\n        found.append({last})\n",
    "if": "    if {path} > 0:\n        found.append(1)\n",
}


def code_of(reads: list[tuple[str, Path]], where: str) -> str:
    """Return the source of a step that reads paths in given forms, of a root that lies `where`."""
    root = "self.root" if where == "self" else "root"
    body, helpers = "    found = []\n", ""
    for n, (form, path) in enumerate(reads):
        front, last = text_of(root, path[:-1]), text_of(f"part_{n}", path[-1:])
        body += FORMS[form].format(path=text_of(root, path), front=front, last=last, n=n)
        helpers += f"def read_{n}(part_{n}):\n    return {last}\n"
    taken = {"self": "self", "argument": "root"}.get(where, "")
    code = f"def step({taken}):\n{body}    return found\n"
    inner = "".join(f"    {line}\n" for line in code.splitlines())
    if where == "around":
        code = f"def make(root):\n{inner}    return step\nstep = make(root)\n"
    if where == "self":
        code = f"class Holder:\n{inner}holder = Holder()\nholder.root = root\nstep = holder.step\n"
    return helpers + code


@settings(max_examples=300, deadline=None)
@given(
    shape=TREE,
    where=st.sampled_from(["global", "around", "self", "argument"]),
    data=st.data(),
)
def test_a_change_of_what_is_read_breaks(shape: Any, where: str, data: st.DataObject) -> None:
    """Python itself is asked whether the change matters: the step is run before and after."""
    paths = paths_of(shape)
    some = st.tuples(st.sampled_from(list(FORMS)), st.sampled_from(paths))
    reads = data.draw(st.lists(some, max_size=4))
    root = built(shape, [float(i + 1) for i in range(len(paths))])
    names: dict[str, Any] = {"root": root, "__name__": "drawn"}
    exec(code_of(reads, where), names)
    step, args = names["step"], [root] if where == "argument" else []
    before, guards = step(*args), guards_of(step, *args)
    assert why(guards) is None
    changed = data.draw(st.sampled_from(paths))
    write(root, changed, data.draw(st.sampled_from([-1.0, 100.0])))
    if step(*args) != before:
        assert why(guards) is not None
    elif changed not in [path for _, path in reads]:
        in_whole = where == "argument" or any(form != "straight" for form, _ in reads)
        in_whole |= any(kind == "asked" for path in paths for kind, _ in path)
        if changed[-1][0] in OF_ONE_READ or not in_whole:
            assert why(guards) is None


@settings(max_examples=150, deadline=None)
@given(shape=TREE, data=st.data())
def test_another_object_in_its_place(shape: Any, data: st.DataObject) -> None:
    """An equal one holds, and is what counts from then on; one that reads otherwise breaks."""
    paths = paths_of(shape)
    path = data.draw(st.sampled_from(paths))
    numbers = [float(i + 1) for i in range(len(paths))]
    names: dict[str, Any] = {"root": built(shape, list(numbers)), "__name__": "drawn"}
    exec(code_of([("straight", path)], "global"), names)
    guards = guards_of(names["step"])
    left = names["root"]
    names["root"] = root = built(shape, list(numbers))
    assert why(guards) is None
    write(left, path, -1.0)
    assert why(guards) is None
    if path[-1][0] != "tuple":
        write(root, path, -1.0)
        assert why(guards) is not None
        write(root, path, names["step"]()[0] + 1)
    names["root"] = built(shape, [number + 1 for number in numbers])
    assert why(guards) is not None
