"""Owners of what a step reads, as source: how one is made, read, changed, and changed unread.

The texts are `string.Template`s: ``$o`` is the owner, ``$v`` what it holds, ``$name`` and
``$spare`` two names of it of which only the first is read, ``$level`` a number that makes names
distinct and ``$n`` the number of the change.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["ATTRIBUTE_READS", "OWNERS", "ROOTS", "Owner", "Read", "Root"]


@dataclass(frozen=True)
class Read:
    """A form in which a step reads an owner.

    Attributes:
        text: An expression.
        of: Which parts are read: "item" (what is under the name), "beside" (what is under
            others), "size" (which names there are), "class", "method".
        ends: Whether it gives a number, so that nothing is read below it.
        default: What it gives where the name is not there; None where it fails.
        prelude: Source that it needs.
        index: A statement that makes it read what is beside.
    """

    text: str
    of: str = "item"
    ends: bool = False
    default: float | None = None
    prelude: str = ""
    index: str = ""


@dataclass(frozen=True)
class Owner:
    """A kind of owner.

    Attributes:
        make: Source of a function ``make_$level(v)``.
        path: An expression that gives what is held, for changes further down.
        reads: Read forms by name.
        writes: Statements that replace what is held, by change form.
        beside: Statements that change what lies beside it, by change form.
        grows: Statements that add something, by change form.
        replaces: Statements that exchange the class or a method, by change form, each with the
            part that a read form must read for it to matter.
        delete: A statement that deletes what is held.
        numbers: Whether it holds nothing but numbers.
    """

    make: str
    path: str
    reads: dict[str, Read]
    writes: dict[str, str] = field(default_factory=dict)
    beside: dict[str, str] = field(default_factory=dict)
    grows: dict[str, str] = field(default_factory=dict)
    replaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    delete: str = ""
    numbers: bool = False


@dataclass(frozen=True)
class Root:
    """A way in which a step comes to the first owner.

    Attributes:
        source: Source that defines ``current()``, ``replace(new)``, ``beside(n)`` and ``build()``,
            which gives the step. ``$first`` makes the first owner, ``$body`` is the step's result.
        read: An expression of the first owner, for the body.
        weakly: Whether the first owner must be one that a weak reference may name.
    """

    source: str
    read: str
    weakly: bool = False


# ----------------------------------------------------------------------- read forms

_NAMES = 'NAMES_$level = ["$name"]'
_MATCHED = """
def matched_$level(o):
    match o:
        case object($name=held):
            return held
    return 9.0
"""

ATTRIBUTE_READS = {
    "name": Read("$o.$name"),
    "computed getattr": Read(
        "getattr($o, NAMES_$level[0])", prelude=_NAMES, index='NAMES_$level[0] = "$spare"'
    ),
    "f-string": Read('getattr($o, f"{PREFIX_$level}$rest")', prelude='PREFIX_$level = "$head"'),
    "getattr with a default": Read('getattr($o, "$name", 9.0)', default=9.0),
    "hasattr": Read('($o.$name if hasattr($o, "$name") else 8.0)', default=8.0),
    "attrgetter": Read('operator.attrgetter("$name")($o)'),
    "map of attrgetter": Read('list(map(operator.attrgetter("$name"), [$o]))[0]'),
    "max by attrgetter": Read('max([$o], key=operator.attrgetter("$name")).$name'),
    "sorted by lambda": Read("sorted([$o], key=lambda each: id(each.$name))[0].$name"),
    "match": Read("matched_$level($o)", default=9.0, prelude=_MATCHED),
    "comprehension": Read("[each.$name for each in ($o,)][0]"),
    "zip": Read("[each.$name for each, _ in zip([$o], range(3))][0]"),
    "eval": Read('eval("each.$name", {"each": $o})'),
}
_OF_OBJECTS = {"object.__getattribute__": Read('object.__getattribute__($o, "$name")')}
_VARS = {
    "vars": Read('vars($o)["$name"]'),
    "__dict__.get": Read('$o.__dict__.get("$name", 7.0)', default=7.0),
    "loop over vars": Read(
        '[held for name, held in vars($o).items() if name == "$name"][0]', of="item beside size"
    ),
    "dict of vars": Read('dict(vars($o))["$name"]', of="item beside size"),
    "in vars": Read('(2.0 if "$name" in vars($o) else 1.0)', of="", ends=True, default=1.0),
}
_METHODS = {
    "method": Read("$o.read()", of="item class method"),
    "method, computed": Read('getattr($o, "re" + "ad")()', of="item class method"),
    "methodcaller": Read('operator.methodcaller("read")($o)', of="item class method"),
    "special method": Read("$o[0]", of="item class"),
    "class attribute beside": Read("$o.$name * $o.factor", of="item class", ends=True),
    "isinstance": Read("(2.0 if isinstance($o, Other_$level) else 1.0)", of="class", ends=True),
    "type": Read("len(type($o).__name__) * 1.0", of="class", ends=True),
}
ITEM_READS = {
    "key": Read('$o["$name"]'),
    "computed key": Read("$o[NAMES_$level[0]]", prelude=_NAMES, index='NAMES_$level[0] = "$spare"'),
    "f-string": Read('$o[f"{PREFIX_$level}$rest"]', prelude='PREFIX_$level = "$head"'),
    "itemgetter": Read('operator.itemgetter("$name")($o)'),
    "get": Read('$o.get("$name", 9.0)', default=9.0),
    "in": Read('($o["$name"] if "$name" in $o else 8.0)', default=8.0),
    "in, alone": Read('(2.0 if "$name" in $o else 1.0)', of="", ends=True, default=1.0),
    "items": Read('[held for key, held in $o.items() if key == "$name"][0]', of="item beside size"),
    "loop over keys": Read('[$o[key] for key in $o if key == "$name"][0]', of="item size"),
    "dict": Read('dict($o)["$name"]', of="item beside size"),
    "stars": Read('{**$o}["$name"]', of="item beside size"),
    "keywords": Read('dict(**$o)["$name"]', of="item beside size"),
    "format": Read('float("{$name}".format(**$o))', of="item beside size", ends=True),
    "sum of values": Read("sum($o.values())", of="item beside size", ends=True, default=0.0),
    "max of items": Read("max($o.items())[1]", of="item beside size", ends=True),
    "len": Read("len($o) * 1.0", of="size", ends=True, default=1.0),
    "equality": Read(
        '(2.0 if $o == {"$name": 1.0, "$spare": 0} else 1.0)',
        of="item beside size",
        ends=True,
        default=1.0,
    ),
    "match": Read(
        "matched_$level($o)",
        default=6.0,
        prelude="""
def matched_$level(o):
    match o:
        case {"$name": held}:
            return held
    return 6.0
""",
    ),
}
ELEMENT_READS = {
    "index": Read("$o[0]"),
    "computed index": Read(
        "$o[INDEX_$level[0]]", prelude="INDEX_$level = [0]", index="INDEX_$level[0] = 1"
    ),
    "itemgetter": Read("operator.itemgetter(0)($o)"),
    "next of iter": Read("next(iter($o))"),
    "loop": Read("[held for held in $o][0]", of="item beside size"),
    "enumerate": Read("[held for i, held in enumerate($o) if i == 0][0]", of="item beside size"),
    "list": Read("list($o)[0]", of="item beside size"),
    "stars": Read("[*$o][0]", of="item beside size"),
    "zip": Read('next(zip($o, "ab"))[0]'),
    "reversed": Read("list(reversed($o))[-1]", of="item beside size"),
    "chain": Read("list(itertools.chain($o))[0]", of="item beside size"),
    "sum": Read("sum($o) * 1.0", of="item beside size", ends=True),
    "max": Read("max($o) * 1.0", of="item beside size", ends=True),
    "sorted": Read("sorted($o)[-1] * 1.0", of="item beside size", ends=True),
    "map": Read("sum(map(float, $o))", of="item beside size", ends=True),
    "fsum": Read("math.fsum($o)", of="item beside size", ends=True),
    "in": Read("(2.0 if 1.0 in $o else 1.0)", of="item beside size", ends=True),
    "len": Read("len($o) * 1.0", of="size", ends=True),
    "any": Read("(2.0 if any($o) else 1.0)", of="item beside size", ends=True),
}
_SEQUENCE = {
    "count": Read("$o.count(1.0) * 1.0", of="item beside size", ends=True),
    "truth": Read("(2.0 if $o else 1.0)", of="size", ends=True),
    "match": Read(
        "matched_$level($o)",
        of="item size",
        prelude="""
def matched_$level(o):
    match o:
        case [held, *_]:
            return held
""",
    ),
}
_SLICE = {
    "slice": Read("$o[:1][0]"),
    "equality": Read("(2.0 if list($o) == [1.0, 0] else 1.0)", of="item beside size", ends=True),
}

# ----------------------------------------------------------------------- owners

_READER = """
    factor = 1.0
    def read(self):
        return self.$name
    def __getitem__(self, index):
        return self.$name
"""
_OTHER = """
class Other_$level(Box_$level):
    factor = 2.0
    def read(self):
        return self.$name
"""
_ATTRIBUTE_WRITES = {"rebind": "$o.$name = $v", "setattr": 'setattr($o, "$name", $v)'}
_ATTRIBUTE_BESIDE = {
    "another attribute": "$o.$spare = $n",
    "a list that grows": "$o.log_$level.append($n)",
}
_ATTRIBUTE_GROWS = {"a new attribute": "$o.added_$n = $n"}
_REPLACES = {
    "another __class__": ("$o.__class__ = Other_$level", "class"),
    "another method": ("type($o).read = lambda self: bumped(self.$name)", "method"),
    "a method that nobody calls": ("type($o).unused_$n = lambda self: $n", "unused"),
}
_IN_VARS = {
    "update of vars": "vars($o).update($name=$v)",
    "another __dict__": '$o.__dict__ = {**vars($o), "$name": $v}',
}


def _attributes(
    make: str,
    *reads: dict[str, Read],
    writes: dict[str, str] | None = None,
    grows: dict[str, str] | None = None,
    replaces: dict[str, tuple[str, str]] | None = None,
    beside: dict[str, str] | None = None,
    delete: str = "del $o.$name",
    path: str = "$o.$name",
) -> Owner:
    forms = dict(ATTRIBUTE_READS)
    for more in reads:
        forms |= more
    return Owner(
        make,
        path,
        forms,
        writes=_ATTRIBUTE_WRITES if writes is None else writes,
        beside=_ATTRIBUTE_BESIDE if beside is None else beside,
        grows=_ATTRIBUTE_GROWS if grows is None else grows,
        replaces=replaces or {},
        delete=delete,
    )


def _class(body: str, made: str = "Box_$level(v)", bases: str = "", before: str = "") -> str:
    return f"{before}class Box_$level{bases}:\n{body}\ndef make_$level(v):\n    return {made}\n"


_INIT = """    def __init__(self, v):
        self.$name, self.$spare, self.log_$level = v, 0, []
"""
_BOX = _class(_INIT + _READER) + _OTHER
_MAPPING_WRITES = {
    "item assignment": '$o["$name"] = $v',
    "update": '$o.update({"$name": $v})',
    "pop and set": '$o.pop("$name", None)\n    $o["$name"] = $v',
    "clear and update": ('held = dict($o)\n    $o.clear()\n    $o.update({**held, "$name": $v})'),
}
_MAPPING_BESIDE = {"another key": '$o["$spare"] = $n'}
_MAPPING_GROWS = {"a new key": '$o["added_$n"] = $n', "setdefault": '$o.setdefault("new_$n", 0)'}


def _mapping(made: str) -> Owner:
    return Owner(
        f'def make_$level(v):\n    return {made}({{"$name": v, "$spare": 0}})\n',
        '$o["$name"]',
        ITEM_READS,
        _MAPPING_WRITES,
        _MAPPING_BESIDE,
        _MAPPING_GROWS,
        delete='$o.pop("$name", None)',
    )


def _sequence(made: str, *reads: dict[str, Read], **kwargs: object) -> Owner:
    forms = dict(ELEMENT_READS)
    for more in reads:
        forms |= more
    return Owner(f"def make_$level(v):\n    return {made}\n", "$o[0]", forms, **kwargs)  # pyright: ignore[reportArgumentType]


_ELEMENT = {"item assignment": "$o[0] = $v"}
_LIST_WRITES = {
    **_ELEMENT,
    "slice assignment": "$o[:1] = [$v]",
    "delete and insert": "del $o[0]\n    $o.insert(0, $v)",
}
_ANOTHER_ELEMENT = {"another element": "$o[-1] = $n"}
_APPEND = {"append": "$o.append($n)", "extend": "$o.extend([$n, $n])"}

_CHILD = """class Child_$level(nn.Module):
    def __init__(self, v):
        super().__init__()
        self.$name, self.$spare, self.log_$level = v, 0, []
"""
_ARRAY_READS = ("index", "computed index", "itemgetter", "next of iter", "loop", "list", "len")
_ARRAYS = {name: ELEMENT_READS[name] for name in _ARRAY_READS} | {
    "float of sum": Read("float($o.sum())", of="item beside size", ends=True),
    "tolist": Read("$o[:2].tolist()[0]"),
    "max": Read("float($o.max())", of="item beside size", ends=True),
}

OWNERS: dict[str, Owner] = {
    "instance": _attributes(
        _BOX, _OF_OBJECTS, _VARS, _METHODS, writes=_ATTRIBUTE_WRITES | _IN_VARS, replaces=_REPLACES
    ),
    "class": _attributes(
        "def make_$level(v):\n    class Box_$level:\n        $name, $spare, log_$level = v, 0, []\n"
        "    return Box_$level\n",
        {"vars": _VARS["vars"], "loop over vars": _VARS["loop over vars"]},
    ),
    "inherited": _attributes(
        "def make_$level(v):\n    class Base:\n        $name, $spare, log_$level = v, 0, []\n"
        "    class Middle(Base):\n        pass\n"
        "    class Box_$level(Middle):\n        pass\n    return Box_$level()\n",
        _OF_OBJECTS,
        writes={"rebind on the class": "type($o).__mro__[2].$name = $v"},
        delete="",
    ),
    "slots": _attributes(
        _class(
            '    __slots__ = ("$name", "$spare", "log_$level", "added", "__weakref__")\n'
            + _INIT
            + _READER
        )
        + _OTHER.replace("    factor", "    __slots__ = ()\n    factor"),
        _OF_OBJECTS,
        _METHODS,
        grows={"an empty slot": "$o.added = $n"},
        replaces=_REPLACES,
    ),
    "dataclass": _attributes(
        _class(
            "    $name: object\n    $spare: int = 0\n"
            "    log_$level: list = dataclasses.field(default_factory=list)\n" + _READER,
            before="@dataclasses.dataclass\n",
        )
        + _OTHER,
        _OF_OBJECTS,
        _VARS,
        _METHODS,
        {
            "asdict": Read('dataclasses.asdict($o)["$name"]', of="item beside", ends=True),
            "fields": Read(
                '[getattr($o, f.name) for f in dataclasses.fields($o) if f.name == "$name"][0]'
            ),
            "replace": Read("dataclasses.replace($o, $spare=0).$name"),
            "equality": Read(
                "(2.0 if $o == make_$level(1.0) else 1.0)", of="item beside class", ends=True
            ),
        },
        replaces=_REPLACES,
    ),
    "frozen dataclass": _attributes(
        _class(
            "    $name: object\n    $spare: int = 0\n" + _READER,
            before="@dataclasses.dataclass(frozen=True)\n",
        )
        + _OTHER,
        _METHODS,
        writes={"past the freezing": 'object.__setattr__($o, "$name", $v)'},
        beside={"another attribute": 'object.__setattr__($o, "$spare", $n)'},
        grows={},
        delete="",
    ),
    "named tuple": _attributes(
        _class("    $name: object\n    $spare: int = 0\n", bases="(typing.NamedTuple)"),
        {"unpacked": Read("[*$o][0]"), "index": Read("$o[0]")},
        writes={},
        beside={},
        grows={},
        delete="",
    ),
    "SimpleNamespace": _attributes(
        "def make_$level(v):\n    return types.SimpleNamespace($name=v, $spare=0, log_$level=[])\n",
        _VARS,
    ),
    "user's module": _attributes(
        'def make_$level(v):\n    made = types.ModuleType("made_$level")\n'
        "    made.$name, made.$spare, made.log_$level = v, 0, []\n    return made\n",
        {"vars": _VARS["vars"]},
    ),
    "function's attribute": _attributes(
        "def make_$level(v):\n    def made():\n        return 0\n"
        "    made.$name, made.$spare, made.log_$level = v, 0, []\n    return made\n",
        {"vars": _VARS["vars"]},
    ),
    "nn.Module": _attributes(
        _class(
            "    def __init__(self, v):\n        super().__init__()\n"
            "        self.$name, self.$spare, self.log_$level = v, 0, []\n"
            "    def forward(self, *args):\n        return self.$name\n" + _READER,
            bases="(nn.Module)",
        )
        + _OTHER,
        _OF_OBJECTS,
        _VARS,
        _METHODS,
        {"call": Read("$o()")},
        replaces=_REPLACES,
    ),
    "child of nn.Module": _attributes(
        _CHILD + "def make_$level(v):\n    made = nn.Module()\n    made.child = Child_$level(v)\n"
        "    made.$spare = 0\n    return made\n",
        {
            name: Read(text)
            for name, text in {
                "name": "$o.child.$name",
                "children": "next($o.children()).$name",
                "named_modules": 'dict($o.named_modules())["child"].$name',
                "get_submodule": '$o.get_submodule("child").$name',
                "modules": '[m.$name for m in $o.modules() if hasattr(m, "$name")][0]',
                "_modules": '$o._modules["child"].$name',
                **{
                    form: read.text.replace("$o", "$o.child")
                    for form, read in ATTRIBUTE_READS.items()
                    if not (read.prelude or read.index)
                },
            }.items()
        }
        | {
            form: Read(read.text.replace("$o", "$o.child"), prelude=read.prelude)
            for form, read in ATTRIBUTE_READS.items()
            if read.prelude
        },
        writes={
            "rebind": "$o.child.$name = $v",
            "another child": "$o.child = Child_$level($v)",
            "another child in _modules": '$o._modules["child"] = Child_$level($v)',
        },
        beside={
            "another attribute": "$o.child.$spare = $n",
            "an attribute of the parent": "$o.$spare = $n",
            "a list that grows": "$o.child.log_$level.append($n)",
        },
        grows={"a new attribute": "$o.child.added_$n = $n"},
        delete="",
        path="$o.child.$name",
    ),
    "Parameter's attribute": _attributes(
        "def make_$level(v):\n    made = nn.Parameter(torch.ones(2))\n"
        "    made.$name, made.$spare, made.log_$level = v, 0, []\n    return made\n",
        {"vars": _VARS["vars"]},
    ),
    "property": _attributes(
        _class(
            "    def __init__(self, v):\n"
            "        self.inner, self.$spare, self.log_$level = v, 0, []\n"
            "    @property\n    def $name(self):\n        return self.inner\n" + _READER
        )
        + _OTHER,
        _OF_OBJECTS,
        _METHODS,
        writes={"rebind": "$o.inner = $v"},
        replaces=_REPLACES,
        delete="",
    ),
    "__getattr__": _attributes(
        _class(
            "    def __init__(self, v):\n"
            '        self.held, self.log_$level = {"$name": v, "$spare": 0}, []\n'
            "    def __getattr__(self, name):\n        try:\n"
            '            return self.__dict__["held"][name]\n        except KeyError:\n'
            "            raise AttributeError(name) from None\n"
        ),
        writes={"item assignment": '$o.held["$name"] = $v', "update": "$o.held.update($name=$v)"},
        beside={
            "another key": '$o.held["$spare"] = $n',
            "a list that grows": "$o.log_$level.append($n)",
        },
        delete='$o.held.pop("$name", None)',
    ),
    "__getattribute__": _attributes(
        _class(
            _INIT + "    def __getattribute__(self, name):\n"
            "        return object.__getattribute__(self, name)\n" + _READER
        )
        + _OTHER,
        _METHODS,
    ),
    "member of an enum": _attributes(
        "class Mode_$level(enum.Enum):\n    FIRST = 1\n    SECOND = 2\n"
        "def make_$level(v):\n    made = Mode_$level.FIRST\n"
        "    made.$name, made.$spare, made.log_$level = v, 0, []\n    return made\n",
        {"vars": _VARS["vars"], "by value": Read("Mode_$level(1).$name")},
    ),
    "behind a weak reference": _attributes(
        _class(_INIT + "    @property\n    def ref(self):\n        return self\n").replace(
            "    return Box_$level(v)",
            "    made = types.SimpleNamespace(strong=Box_$level(v))\n"
            "    made.ref = weakref.ref(made.strong)\n    return made",
        ),
        {
            form: Read(read.text.replace("$o", "$o.ref()"), prelude=read.prelude)
            for form, read in ATTRIBUTE_READS.items()
        },
        writes={
            "rebind": "$o.strong.$name = $v",
            "another referent": ("$o.strong = Box_$level($v)\n    $o.ref = weakref.ref($o.strong)"),
        },
        beside={
            "another attribute": "$o.strong.$spare = $n",
            "a list that grows": "$o.strong.log_$level.append($n)",
        },
        grows={"a new attribute": "$o.strong.added_$n = $n"},
        delete="",
        path="$o.ref().$name",
    ),
    "dict": _mapping("dict"),
    "OrderedDict": _mapping("collections.OrderedDict"),
    "UserDict": _mapping("collections.UserDict"),
    "defaultdict": _mapping("functools.partial(collections.defaultdict, float)"),
    "ChainMap": _mapping("collections.ChainMap"),
    "list": _sequence(
        "[v, 0]", _SEQUENCE, _SLICE, writes=_LIST_WRITES, beside=_ANOTHER_ELEMENT, grows=_APPEND
    ),
    "tuple": _sequence("(v, 0)", _SEQUENCE, _SLICE),
    "deque": _sequence(
        "collections.deque([v, 0])",
        _SEQUENCE,
        writes=_ELEMENT | {"appendleft": "$o.popleft()\n    $o.appendleft($v)"},
        beside=_ANOTHER_ELEMENT,
        grows=_APPEND,
    ),
    "UserList": _sequence(
        "collections.UserList([v, 0])",
        _SEQUENCE,
        _SLICE,
        writes=_LIST_WRITES,
        beside=_ANOTHER_ELEMENT,
        grows=_APPEND,
    ),
    "array.array": _sequence(
        'array.array("d", [v, 0.0])',
        _SLICE,
        writes=_ELEMENT,
        beside=_ANOTHER_ELEMENT,
        grows=_APPEND,
        numbers=True,
    ),
    "NumPy array": Owner(
        "def make_$level(v):\n    return np.array([v, 0.0])\n",
        "$o[0]",
        _ARRAYS,
        {"item assignment": "$o[0] = $v"},
        _ANOTHER_ELEMENT,
        numbers=True,
    ),
    "NumPy array of 8 MB": Owner(
        "def make_$level(v):\n    made = np.zeros(1_000_000)\n    made[0] = v\n    return made\n",
        "$o[0]",
        {name: read for name, read in _ARRAYS.items() if name not in ("loop", "list")},
        {"item assignment": "$o[0] = $v"},
        _ANOTHER_ELEMENT,
        numbers=True,
    ),
    "buffer": Owner(
        "def make_$level(v):\n    made = nn.Module()\n"
        '    made.register_buffer("$name", torch.tensor(float(v)))\n    made.$spare = 0\n'
        "    return made\n",
        "$o.$name",
        {
            "item": Read("$o.$name.item()"),
            "float": Read("float($o.$name)"),
            "buffers": Read("float(next($o.buffers()))"),
            "state_dict": Read('float($o.state_dict()["$name"])'),
            "truth": Read("(2.0 if $o.$name > 1.5 else 1.0)", ends=True),
        },
        {
            "fill_": "$o.$name.fill_($v)",
            "rebind": "$o.$name = torch.tensor(float($v))",
            "in _buffers": '$o._buffers["$name"] = torch.tensor(float($v))',
        },
        {"another attribute": "$o.$spare = $n"},
        {"a new attribute": "$o.added_$n = $n"},
        numbers=True,
    ),
    "environ": Owner(
        "def make_$level(v):\n"
        '    os.environ.update({"XLA_GUARD_$name": str(float(v)), "XLA_GUARD_$spare": "0"})\n'
        "    return os.environ\n",
        '$o["XLA_GUARD_$name"]',
        {
            "key": Read('float($o["XLA_GUARD_$name"])'),
            "get": Read('float($o.get("XLA_GUARD_$name", "3"))', default=3.0),
            "getenv": Read('float(os.getenv("XLA_GUARD_$name", "4"))', default=4.0),
            "in": Read('(2.0 if "XLA_GUARD_$name" in $o else 1.0)', of="", ends=True, default=1.0),
            "f-string": Read(
                'float($o[f"XLA_{PREFIX_$level}_$name"])', prelude='PREFIX_$level = "GUARD"'
            ),
        },
        {
            "item assignment": '$o["XLA_GUARD_$name"] = str(float($v))',
            "update": '$o.update({"XLA_GUARD_$name": str(float($v))})',
        },
        {"another key": '$o["XLA_GUARD_$spare"] = str($n)'},
        {"a new key": '$o["XLA_GUARD_NEW"] = str($n)'},
        delete='$o.pop("XLA_GUARD_$name", None)',
        numbers=True,
    ),
}

# ----------------------------------------------------------------------- roots

_STEP = "def step(x):\n        return x * $body\n    return step\n"


def _root(setup: str, read: str, replace: str, beside: str, **kwargs: bool) -> Root:
    """Make a root that is a name of the case's module."""
    return Root(
        f"{setup}\ndef current():\n    return {read}\n"
        f"def replace(new):\n{replace}\ndef beside(n):\n{beside}\n"
        f"def build():\n    {_STEP}",
        read,
        **kwargs,
    )


_GLOBAL_SPARE = "    global spare\n    spare = n"

ROOTS: dict[str, Root] = {
    "global": _root(
        "spare = 0\nroot = $first", "root", "    global root\n    root = new", _GLOBAL_SPARE
    ),
    "cell": Root(
        """def build():
    global current, replace, beside
    root, spare = $first, 0
    def step(x):
        return x * $body
    def current():
        return root
    def replace(new):
        nonlocal root
        root = new
    def beside(n):
        nonlocal spare
        spare = n
    return step
""",
        "root",
    ),
    "default": _root(
        "def reader(root=$first):\n    return root",
        "reader()",
        "    reader.__defaults__ = (new,)",
        "    reader.calls = n",
    ),
    "keyword default": _root(
        "def reader(*, root=$first):\n    return root",
        "reader()",
        '    reader.__kwdefaults__ = {"root": new}',
        "    reader.calls = n",
    ),
    "argument of a partial": _root(
        "def same(root):\n    return root\nreader = functools.partial(same, root=$first)",
        "reader()",
        '    reader.keywords["root"] = new',
        "    reader.calls = n",
    ),
    "function in a table": _root(
        "def giving(root):\n    return lambda: root\n"
        'TABLE = {"read": giving($first), "unused": abs}',
        'TABLE["read"]()',
        '    TABLE["read"] = giving(new)',
        '    TABLE["unused"] = giving(n)',
    ),
    "ContextVar": _root(
        'VARIABLE = contextvars.ContextVar("root")\nVARIABLE.set($first)\n'
        'SPARE = contextvars.ContextVar("spare", default=0)',
        "VARIABLE.get()",
        "    VARIABLE.set(new)",
        "    SPARE.set(n)",
    ),
    "imported module": _root(
        "settings.root, settings.spare = $first, 0",
        "settings.root",
        "    settings.root = new",
        "    settings.spare = n",
    ),
    "weak reference": _root(
        "strong = [$first]\nref = weakref.ref(strong[0])",
        "ref()",
        "    global ref\n    strong[0] = new\n    ref = weakref.ref(new)",
        "    strong[1:] = [n]",
        weakly=True,
    ),
    "self of a trainer": Root(
        """class Trainer:
    def __init__(self):
        self.root, self.epoch, self.log = $first, 0, []
    def step(self, x):
        return x * $body
def build():
    global trainer
    trainer = Trainer()
    return trainer.step
def current():
    return trainer.root
def replace(new):
    trainer.root = new
def beside(n):
    trainer.epoch = n
    trainer.log.append(n)
""",
        "self.root",
    ),
    "self of a forward": Root(
        """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.root, self.calls = $first, 0
    def forward(self, x):
        return x * $body
def build():
    global net
    net = Net()
    return lambda x: net(x)
def current():
    return net.root
def replace(new):
    net.root = new
def beside(n):
    net.calls = n
""",
        "self.root",
    ),
}
