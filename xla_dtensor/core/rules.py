r"""Sharding rules: patterns of parameter paths, and how the tensors that they match lie.

    rules = ShardingRules([
        ShardingRule("layers.*.attention.wq.weight", ("tp", "fsdp")),   one entry per tensor dim
        ShardingRule("layers.*.mlp.up_proj", "colwise"),                a module's weight and bias
        ShardingRule(r"re:.*norm\.weight", (None,)),                    a regular expression
        ShardingRule("layers.*[0]", ("fsdp", None, None)),              a module's first output
    ])

* In a glob, ``*`` matches one component of a dotted path, or some of its characters; ``**`` matches
  any number of components. After ``re:``, the whole path has to match.
* The first rule that matches a tensor wins. Later ones that match too are shadowed there.
* A pattern that ends in ``()`` or ``[0]``, or that matches modules and no tensor, is about what a
  module returns.
* "colwise", "rowwise" and the other styles are those of a tensor parallel plan of Hugging Face
  Transformers, of a module or of one parameter. Here each says how weights lie, and nothing else:
  what else it does in Transformers (gather, reduce, split) follows from that, and XLA finds it out.

ShardingPlan: what sharding rules come to for one model on one mesh, and its table.

Example:
    >>> from xla_dtensor.core.rules import ShardingRules
    >>> mesh = Mesh.arange((2, 4), ("fsdp", "tp"))
    >>> rules = ShardingRules([("layers.*.w", ("fsdp", "tp")), ("**", None)])
    >>> plan = rules.resolve({"layers.0.w": (6, 8), "layers.1.w": (6, 8), "scale": (8,)}, mesh)
    >>> print(table(plan))
    tensor         shape   placements  bytes/device  bytes  padding  rule
    layers.*.w x2  (6, 8)  [fsdp, tp]            48    384        0  layers.*.w
    scale          (8,)    [-]                   32     32        0  **
    total x3                                     80    416        0
    shadowed: ** by layers.*.w (2 tensors)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Literal, TypeAlias, cast

from mesh_utils import Mesh
from xla_dtensor.core.errors import RulesError
from xla_dtensor.core.layout import Layout
from xla_dtensor.core.placements import describe_axes

__all__ = [
    "ShardingPlan",
    "ShardingRule",
    "ShardingRules",
    "TensorFacts",
    "read_rules",
    "rules_as_data",
    "table",
]


# ------------------------------------------------------------------------------------ ShardingPlan


@dataclass(frozen=True)
class TensorFacts:
    """What rules are resolved against, of one tensor.

    Args:
        shape: Its global shape.
        itemsize_bytes: Bytes per element.
        is_buffer: A buffer that no rule matches is copied to every device, without an error.
        same_as: The path under which the same tensor was listed before: tied weights.
    """

    shape: tuple[int, ...]
    itemsize_bytes: int = 4
    is_buffer: bool = False
    same_as: str | None = None


@dataclass(frozen=True)
class PlannedTensor:
    """How one tensor will lie, and by which rule.

    Args:
        path: Its path in the model.
        facts: Its shape and size.
        layout: How it will lie.
        pattern: The pattern that won; None where it is copied because none matched.
        shadowed: Later patterns that match it as well.
    """

    path: str
    facts: TensorFacts
    layout: Layout
    pattern: str | None
    shadowed: tuple[str, ...] = ()

    @property
    def device_bytes(self) -> int:
        """Bytes on each device, the padding of an uneven dim counted; 0 for a second name."""
        dims = enumerate(self.facts.shape)
        tile = (-(-extent // self.layout.num_shards(dim)) for dim, extent in dims)
        return 0 if self.facts.same_as else prod(tile) * self.facts.itemsize_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the tensor itself, once; 0 for a second name of a tensor."""
        return 0 if self.facts.same_as else prod(self.facts.shape) * self.facts.itemsize_bytes

    @property
    def padding_bytes(self) -> int:
        """Bytes that uneven dims add to one whole copy."""
        shards = prod(self.layout.num_shards(dim) for dim in range(self.layout.ndim))
        return self.device_bytes * shards - self.total_bytes


@dataclass(frozen=True)
class PlannedOutput:
    """How what a module returns will lie.

    Args:
        path: The module's path; "" is the model itself.
        index: Which of its outputs; None: the only one.
        layout: How it will lie. Whether its rank fits is known when the module runs.
        pattern: The pattern that won.
        shadowed: Later patterns that match it as well.
    """

    path: str
    index: int | None
    layout: Layout
    pattern: str
    shadowed: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShardingPlan(Mapping[str, Layout]):
    """Path -> Layout of a model's tensors; `tensors` and `outputs` say by which rule.

    ``str(plan)`` is its table.

    Args:
        mesh: The mesh.
        tensors: Every parameter and buffer, in the model's order.
        outputs: The modules whose outputs are placed.
    """

    mesh: Mesh
    tensors: tuple[PlannedTensor, ...]
    outputs: tuple[PlannedOutput, ...] = ()

    @cached_property
    def _layouts(self) -> dict[str, Layout]:
        return {tensor.path: tensor.layout for tensor in self.tensors}

    def __getitem__(self, path: str) -> Layout:
        return self._layouts[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self.tensors)

    def __str__(self) -> str:
        return table(self)


def folded(path: str) -> str:
    """The path with every number between dots as ``*``.

    Example:
        >>> folded("layers.12.w1")
        'layers.*.w1'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def table(plan: ShardingPlan) -> str:
    """The plan as text, one line per tensor; equal ones of numbered layers share a line.

    Columns: path (``x4``: four of them), shape of each, placements per dim, bytes on one device and
    of the whole tensors (of all on the line together), bytes that uneven dims add to a whole copy,
    and the pattern that matched. Tied weights are counted once. Below: what modules return, and
    patterns that lost to earlier ones.

    Args:
        plan: What `ShardingRules.resolve` returned.

    Returns:
        Lines of text, without a newline at the end.
    """
    header = ("tensor", "shape", "placements", "bytes/device", "bytes", "padding", "rule")
    groups: dict[tuple[object, ...], list[PlannedTensor]] = {}
    for tensor in plan.tensors:
        facts = tensor.facts
        tied = None if facts.same_as is None else folded(facts.same_as)
        key = (folded(tensor.path), facts.shape, facts.itemsize_bytes, tied)
        groups.setdefault((*key, tensor.layout, tensor.pattern), []).append(tensor)
    rows = [header, *map(_row, groups.values())]
    sums = _sums(plan.tensors)
    rows.append((f"total x{len(plan.tensors)}", "", "", *sums, ""))
    return "\n".join([*_aligned(rows, (3, 4, 5)), *_output_lines(plan), *_shadowed_lines(plan)])


def _row(tensors: Sequence[PlannedTensor]) -> tuple[str, ...]:
    first = tensors[0]
    path = first.path if len(tensors) == 1 else f"{folded(first.path)} x{len(tensors)}"
    rule = "(no rule)" if first.pattern is None else first.pattern
    if first.facts.same_as is not None:
        rule += f" (tied to {first.facts.same_as})"
    return path, str(first.facts.shape), str(first.layout), *_sums(tensors), rule


def _sums(tensors: Sequence[PlannedTensor]) -> tuple[str, str, str]:
    return (
        f"{sum(tensor.device_bytes for tensor in tensors):,}",
        f"{sum(tensor.total_bytes for tensor in tensors):,}",
        f"{sum(tensor.padding_bytes for tensor in tensors):,}",
    )


def _aligned(rows: Sequence[tuple[str, ...]], right: tuple[int, ...]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _output_lines(plan: ShardingPlan) -> list[str]:
    alike: dict[tuple[str, ...], list[str]] = {}
    for output in plan.outputs:
        ending = "()" if output.index is None else f"()[{output.index}]"
        key = (folded(output.path) + ending, str(output.layout), output.pattern)
        alike.setdefault(key, []).append(output.path + ending)
    rows = [
        (paths[0] if len(paths) == 1 else f"{path} x{len(paths)}", placed, pattern)
        for (path, placed, pattern), paths in alike.items()
    ]
    return _aligned([("output", "placements", "rule"), *rows], ()) if rows else []


def _shadowed_lines(plan: ShardingPlan) -> list[str]:
    counts: Counter[tuple[str, str, str]] = Counter()
    for what, entries in (("tensor", plan.tensors), ("output", plan.outputs)):
        for entry in entries:
            counts.update((pattern, str(entry.pattern), what) for pattern in entry.shadowed)
    return [
        f"shadowed: {pattern} by {winner} ({count} {what}{'s' if count > 1 else ''})"
        for (pattern, winner, what), count in counts.items()
    ]


# ------------------------------------------------------------------------------------ ShardingRule
#
# A pattern of paths, and how the tensors that it matches lie.
#
# What the patterns and placements mean is said in `rules`.

Entry: TypeAlias = str | tuple[str, ...] | None
Placed: TypeAlias = tuple[Entry, ...] | str | None

# Per style of Transformers the dim of a weight that the tensor parallel axis cuts, from the end. A
# bias is cut where its weight's outputs are, so with -2. A fused weight ("packed") is cut in one
# piece: Transformers cuts each of its parts, which changes what a device holds and no value.
_CUT_DIMS: dict[str, int | None] = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output", "local_colwise"), -2),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "local_rowwise"), -1),
    "packed_colwise": -2,
    "packed_rowwise": -1,
    "embedding_rowwise": -2,
    "embedding_colwise": -1,
    "grouped_gemm": -3,
    **dict.fromkeys(("replicate", "sequence_parallel", "replicated_with_grad_allreduce"), None),
    "mla_kv_a_proj": None,
}
# What only moves inputs and outputs.
_NOTHING = (
    "local",
    "gather",
    "all_reduce",
    "local_params",
    "moe_tp_experts",
    "moe_identity_expert",
    "ep_dispatch_experts",
)
STYLES = (*_CUT_DIMS, *_NOTHING)


@dataclass(frozen=True)
class ShardingRule:
    """Says how the tensors whose path matches a pattern lie.

    Args:
        pattern: A glob, or "re:" and a regular expression.
        placements: Per tensor dim an axis name, a tuple of them (the outermost cut first) or None.
            None alone: a copy on every device, at any rank. One word: a style, e.g. "colwise".

    Raises:
        RulesError: A pattern or placements that cannot be read.

    Example:
        >>> ShardingRule("layers.*.mlp.up_proj.weight", ["fsdp", None]).matches(
        ...     "layers.3.mlp.up_proj.weight"
        ... )
        True
    """

    pattern: str
    placements: object

    def __post_init__(self) -> None:
        if not isinstance(cast("object", self.pattern), str):
            reason = f"A {type(self.pattern).__name__} is no pattern"
            raise rule_error(self.pattern, self.placements, reason, "a path with '*', or 're:...'")
        object.__setattr__(self, "placements", _read_placements(self.pattern, self.placements))
        _compiled(self._target()[0])
        if self.is_output and self.entries is None:
            reason = "It is a rule for outputs, whose rank no model tells"
            raise rule_error(
                self.pattern, self.placements, reason, "one entry per dim of the output"
            )

    @property
    def style(self) -> str | None:
        """The style, or None where entries per dim are given."""
        return self.placements if isinstance(self.placements, str) else None

    @property
    def is_output(self) -> bool:
        """Whether the pattern's ending says that it is about what a module returns."""
        return self._target() != (self.pattern, None)

    @property
    def output_index(self) -> int | None:
        """Which of a module's outputs is meant; None: the only one."""
        return self._target()[1]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the entries name, in their order."""
        return _axes(self.entries or ())

    @property
    def cuts_tp_axis(self) -> bool:
        """Whether the style cuts weights."""
        return _CUT_DIMS.get(self.style or "") is not None

    @property
    def is_about_movement(self) -> bool:
        """Whether the style only says how inputs and outputs move, which XLA finds out itself."""
        return self.style in _NOTHING

    @property
    def entries(self) -> tuple[Entry, ...] | None:
        """Per tensor dim its axes; None where no entries are given."""
        placements = self.placements
        return cast("tuple[Entry, ...]", placements) if isinstance(placements, tuple) else None

    def matches(self, path: str) -> bool:
        """Whether the pattern matches a tensor's path (with a style: its module's path, too)."""
        if self.style is not None and not self.is_about_movement:
            module, _, name = path.rpartition(".")
            if name in ("weight", "bias") and self.matches_module(module):
                return True
        return not self.is_output and self.matches_module(path)

    def matches_module(self, path: str) -> bool:
        """Whether the pattern, less its ending for outputs, matches a path."""
        regex, dotted = _compiled(self._target()[0])
        return regex.fullmatch(f"{path}." if dotted and path else path) is not None

    def _target(self) -> tuple[str, int | None]:
        """(the pattern less its ending, the output's index)."""
        if self.pattern.startswith("re:"):
            return self.pattern, None
        path, index = self.pattern, None
        subscript = re.search(r"\[(\d+)\]$", path)
        if subscript is not None:
            path, index = path[: subscript.start()], int(subscript[1])
        return path.removesuffix("()"), index

    def entries_for(self, path: str, ndim: int, tp_axis: str) -> tuple[Entry, ...] | str:
        """The entries of one tensor, or what is wrong with its rank."""
        entries = self.entries
        if entries is not None:
            count = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
            return entries if len(entries) == ndim else f"has {count}"
        cut = _CUT_DIMS.get(self.style or "")
        if cut is not None and (path.endswith("bias") or ndim == 1):
            cut += 1  # there is no dim of inputs
        if not cut:
            return (None,) * ndim
        if cut < -ndim:
            return f"of style {self.style!r} is for weights of rank {-cut} and more"
        return tuple(tp_axis if dim == ndim + cut else None for dim in range(ndim))


def _read_placements(pattern: str, placements: object) -> Placed:
    if placements is None:
        return None
    if isinstance(placements, str):
        if placements in STYLES:
            return placements
        reason = f"{placements!r} is no style, and placements are a list"
        raise rule_error(
            pattern, placements, reason, f"[{placements}], or one of {', '.join(STYLES)}"
        )
    if not isinstance(placements, (tuple, list)):
        reason = f"A {type(placements).__name__} is not read"
        raise rule_error(pattern, placements, reason, "a list with one entry per tensor dim")
    entries = cast("Sequence[object]", placements)
    placed = tuple(_read_entry(pattern, entries, entry) for entry in entries)
    axes = _axes(placed)
    twice = next((axis for axis in axes if axes.count(axis) > 1), None)
    if twice is not None:
        reason = f"The axis {twice!r} occurs twice, and cuts one dim once"
        raise rule_error(pattern, entries, reason, "each axis once at most")
    return placed


def _read_entry(pattern: str, placements: Sequence[object], entry: object) -> Entry:
    if entry is None or entry == "None":
        return None
    several = cast("Sequence[object]", entry) if isinstance(entry, (tuple, list)) else (entry,)
    names = tuple(name for name in several if isinstance(name, str))
    if len(names) != len(several):
        reason = f"The entry {entry!r} is no name of an axis"
        raise rule_error(
            pattern, placements, reason, "names, lists of names, and None (null in YAML)"
        )
    return (names[0] if len(names) == 1 else names) if names else None


def _axes(entries: Sequence[Entry]) -> tuple[str, ...]:
    return tuple(
        axis
        for entry in entries
        if entry is not None
        for axis in (entry if isinstance(entry, tuple) else (entry,))
    )


def rule_error(pattern: object, placements: object, reason: str, instead: str) -> RulesError:
    """The error for a rule that cannot be read."""
    return RulesError(
        f"A sharding rule with pattern={pattern!r}, placements={placements!r} was asked for. "
        f"{reason}. Pass {instead}."
    )


@lru_cache(4096)
def _compiled(pattern: str) -> tuple[re.Pattern[str], bool]:
    """(regular expression, whether it wants a dot behind every component)."""
    if pattern.startswith("re:"):
        try:
            return re.compile(pattern[3:]), False
        except re.error as error:
            raise RulesError(
                f"A sharding rule with pattern={pattern!r} was asked for. It is no regular "
                f"expression: {error}. Pass one that Python's re compiles, or a glob without 're:'."
            ) from None
    components = pattern.split(".") if pattern else []
    wrong = any(not c or ("**" in c and c != "**") for c in components)
    if wrong or re.search(r"[^\w.*\-]", pattern):
        raise RulesError(
            f"A sharding rule with pattern={pattern!r} was asked for. A glob has components "
            "between single dots, of letters, digits, '_', '-' and '*', or '**' alone. Pass such a "
            "path, or 're:' and a regular expression."
        )
    return re.compile(_regular_expression(components)), True


# In both, what stands between two stars is looked for once, at its first place, which leaves most
# for the rest: `(?>...)` does not come back to it. Without that `*a*a*a*a` takes minutes on a name.


def _regular_expression(components: Sequence[str]) -> str:
    runs: list[str] = [""]
    for component in components:
        if component == "**":
            runs.append("")
        else:
            runs[-1] += _component(component)
    first, *later_runs = runs
    if not later_runs:
        return first
    any_component = r"(?:[^.]+\.)"
    between = "".join(f"(?>{any_component}*?{run})" for run in later_runs[:-1] if run)
    return f"{first}{between}{any_component}*{later_runs[-1]}"


def _component(component: str) -> str:
    if component == "*":
        return r"[^.]+\."
    first, *later_parts = map(re.escape, component.split("*"))
    if not later_parts:
        return first + r"\."
    between = "".join(f"(?>[^.]*?{part})" for part in later_parts[:-1])
    return rf"{first}{between}[^.]*{later_parts[-1]}\."


# ---------------------------------------------------------------------------------- Sharding rules

RuleLike: TypeAlias = ShardingRule | tuple[str, object]

_MOST_FINDINGS = 10


@dataclass(frozen=True)
class ShardingRules:
    """An ordered list of rules; see the module docstring.

    Args:
        rules: The rules, in order of precedence; (pattern, placements) pairs are read as rules.
        activations: More rules, all of which are about what modules return.
        tp_axis: The axis that styles such as "colwise" cut along.

    Raises:
        RulesError: A rule that cannot be read.

    Example:
        >>> mesh = Mesh.arange((2, 4), ("fsdp", "tp"))
        >>> rules = ShardingRules([("*.weight", ("tp", "fsdp")), ("**", None)])
        >>> {path: str(lies) for path, lies in
        ...     rules.resolve({"head.weight": (16, 8), "norm.scale": (8,)}, mesh).items()}
        {'head.weight': '[tp, fsdp]', 'norm.scale': '[-]'}
    """

    rules: tuple[ShardingRule, ...]
    activations: tuple[ShardingRule, ...] = ()
    tp_axis: str = "tp"

    def __init__(
        self,
        rules: Iterable[RuleLike],
        activations: Iterable[RuleLike] = (),
        tp_axis: str = "tp",
    ) -> None:
        object.__setattr__(self, "rules", tuple(map(_as_rule, rules)))
        object.__setattr__(self, "activations", tuple(map(_as_rule, activations)))
        object.__setattr__(self, "tp_axis", tp_axis)
        for rule in self.activations:
            if rule.entries is None:
                reason = "It is a rule for outputs, whose rank no model tells"
                raise rule_error(
                    rule.pattern, rule.placements, reason, "one entry per dim of the output"
                )

    def resolve(
        self,
        paths_and_shapes: Mapping[str, Sequence[int] | TensorFacts],
        mesh: Mesh,
        *,
        unmatched: Literal["error", "replicate"] = "error",
        modules: Collection[str] | None = None,
    ) -> ShardingPlan:
        """Say how each tensor lies.

        Args:
            paths_and_shapes: Per path the tensor's shape, or its facts.
            mesh: The mesh.
            unmatched: What becomes of a parameter that no rule matches: "error", or "replicate".
            modules: The paths of the model's modules. None: rules for outputs are left out.

        Returns:
            The plan.

        Raises:
            RulesError: One error with all that does not fit: unmatched parameters, patterns that
                match nothing, wrong ranks, unknown axes, tied weights that rules place differently.
        """
        facts = {
            path: tensor if isinstance(tensor, TensorFacts) else TensorFacts(tuple(tensor))
            for path, tensor in paths_and_shapes.items()
        }
        if unmatched not in ("error", "replicate"):
            raise RulesError(
                f"Rules were resolved with unmatched={unmatched!r}. It says what becomes of a "
                "parameter that no rule matches. Pass 'error' or 'replicate'."
            )
        return _Resolver(self, facts, mesh, modules).plan(unmatched == "replicate")


def _as_rule(rule: RuleLike) -> ShardingRule:
    if isinstance(rule, ShardingRule):
        return rule
    pattern, placements = rule
    return ShardingRule(pattern, placements)


class _Findings:
    """What does not fit, one line each; equal lines about numbered layers become one."""

    def __init__(self) -> None:
        self._paths: dict[tuple[str, str, str], list[str]] = {}

    def add(self, start: str, path: str = "", end: str = "") -> None:
        self._paths.setdefault((start, folded(path), end), []).append(path)

    def lines(self) -> list[str]:
        return [
            start + (paths[0] if len(paths) == 1 else f"{path} (x{len(paths)})") + end
            for (start, path, end), paths in self._paths.items()
        ]


class _Resolver:
    """Rules against one model and mesh; `plan` does it."""

    def __init__(
        self,
        rules: ShardingRules,
        tensors: Mapping[str, TensorFacts],
        mesh: Mesh,
        modules: Collection[str] | None,
    ) -> None:
        self.rules, self.tensors, self.mesh, self.modules = rules, tensors, mesh, modules
        self.findings = _Findings()
        about_tensors = [rule for rule in rules.rules if not rule.is_output]
        self.matching = {
            path: [rule for rule in about_tensors if rule.matches(path)] for path in tensors
        }
        # By identity: a rule that is written twice shadows itself.
        matched = {id(rule) for matches in self.matching.values() for rule in matches}
        idle = [rule for rule in about_tensors if id(rule) not in matched]
        names = modules or ()
        self.promoted = [
            rule
            for rule in idle
            if rule.entries is not None and any(map(rule.matches_module, names))
        ]
        self.unknown_axes: set[int] = set()
        self._check_axes()
        for rule in idle:
            if not any(rule is promoted for promoted in self.promoted):
                self._check_idle(rule)

    def _check_axes(self) -> None:
        for rule in (*self.rules.rules, *self.rules.activations):
            cuts = (self.rules.tp_axis,) if rule.cuts_tp_axis else rule.axes
            for axis in cuts:
                if axis not in self.mesh.axis_names:
                    self.unknown_axes.add(id(rule))
                    what = f"cuts along tp_axis={axis!r}" if rule.style else f"names axis {axis!r}"
                    self.findings.add(f"{rule.pattern!r} {what}, which the mesh does not have")

    def _check_idle(self, rule: ShardingRule) -> None:
        if rule.style is None:
            self.findings.add(f"{rule.pattern!r} matches nothing")
        elif not rule.is_about_movement:
            self.findings.add(
                f"{rule.pattern!r}, a rule of style {rule.style!r}, matches no module's weight or "
                "bias"
            )
        elif self.modules is not None and not any(map(rule.matches_module, self.modules)):
            self.findings.add(f"{rule.pattern!r} matches nothing")

    def plan(self, replicate_unmatched: bool) -> ShardingPlan:
        layouts = {path: self._layout(path) for path in self.tensors if self.matching[path]}
        names: dict[str, list[str]] = {}
        for path, facts in self.tensors.items():
            names.setdefault(facts.same_as or path, []).append(path)
        for group in names.values():
            self._settle(group, layouts, replicate_unmatched)
        planned = [
            PlannedTensor(path, facts, layout, *self._patterns(self.matching[path]))
            for path, facts in self.tensors.items()
            if (layout := layouts.get(path)) is not None
        ]
        outputs = () if self.modules is None else tuple(self._outputs(self.modules))
        self._raise_findings()
        return ShardingPlan(self.mesh, tuple(planned), outputs)

    def _layout(self, path: str) -> Layout | None:
        rule, shape = self.matching[path][0], self.tensors[path].shape
        entries = rule.entries_for(path, len(shape), self.rules.tp_axis)
        if isinstance(entries, str):
            self.findings.add(f"{rule.pattern!r} {entries}, but ", path, f" has shape {shape}")
            return None
        if id(rule) in self.unknown_axes:
            return None
        return Layout.from_aliases(entries, self.mesh)

    def _settle(
        self, group: list[str], layouts: dict[str, Layout | None], replicate_unmatched: bool
    ) -> None:
        """Give all names of one tensor the layout that those with a rule have."""
        ruled = [path for path in group if self.matching[path]]
        ruled_layouts = [layouts[path] for path in ruled]
        for path, layout in zip(ruled, ruled_layouts, strict=True):
            if layout is not None and ruled_layouts[0] is not None and layout != ruled_layouts[0]:
                self.findings.add(
                    f"{path} is tied to {ruled[0]}, but {self.matching[path][0].pattern!r} says "
                    f"{layout} and {self.matching[ruled[0]][0].pattern!r} says {ruled_layouts[0]}"
                )
        facts = self.tensors[group[0]]
        if not ruled and not replicate_unmatched and not facts.is_buffer:
            self.findings.add("no rule matches ", group[0], f" of shape {facts.shape}")
        replicated = Layout.replicated(self.mesh, len(facts.shape))
        for path in group:
            layouts.setdefault(path, ruled_layouts[0] if ruled else replicated)
            if path not in ruled and ruled:
                self.matching[path] = self.matching[ruled[0]][:1]

    @staticmethod
    def _patterns(matching: Sequence[ShardingRule]) -> tuple[str | None, tuple[str, ...]]:
        patterns = tuple(rule.pattern for rule in matching)
        return (patterns[0] if patterns else None), patterns[1:]

    def _outputs(self, modules: Collection[str]) -> list[PlannedOutput]:
        about_outputs = [
            rule
            for rule in self.rules.rules
            if rule.is_output or any(rule is promoted for promoted in self.promoted)
        ]
        about_outputs += self.rules.activations
        matching_rules: dict[tuple[str, int | None], list[ShardingRule]] = {}
        for rule in about_outputs:
            matched = [path for path in modules if rule.matches_module(path)]
            if not matched:
                self.findings.add(f"{rule.pattern!r} matches no module")
            for path in matched:
                matching_rules.setdefault((path, rule.output_index), []).append(rule)
        return [
            PlannedOutput(path, index, layout, matching[0].pattern, self._patterns(matching)[1])
            for (path, index), matching in matching_rules.items()
            if (layout := self._output_layout(matching[0])) is not None
        ]

    def _output_layout(self, rule: ShardingRule) -> Layout | None:
        if rule.entries is not None and id(rule) not in self.unknown_axes:
            return Layout.from_aliases(rule.entries, self.mesh)
        return None

    def _raise_findings(self) -> None:
        lines = self.findings.lines()
        if not lines:
            return
        count = len(self.rules.rules) + len(self.rules.activations)
        bullets = [f"- {line}" for line in lines[:_MOST_FINDINGS]]
        if len(lines) > _MOST_FINDINGS:
            bullets.append(f"- and {len(lines) - _MOST_FINDINGS} more")
        raise RulesError(
            f"{count} sharding rules were resolved for {len(self.tensors)} tensors on a mesh with "
            f"{describe_axes(self.mesh)}. They do not fit in {len(lines)} "
            f"point{'' if len(lines) == 1 else 's'}:\n"
            + "\n".join(bullets)
            + "\nCorrect these rules, or pass unmatched='replicate' for parameters that need none."
        )


# --------------------------------------------------------------------------------------- Rules file
#
# Sharding rules as plain data (dicts, lists, strings, None), as YAML and configurations hold them.
#
# Read are
#
#     {"layers.*.wq.weight": ["tp", None], "layers.*[0]": ["fsdp", None, None]}    patterns on top
#     [["layers.*.wq.weight", ["tp", None]], {"norm.weight": [None]}]              a list of pairs
#     {"parameters": ..., "activations": ..., "tp_plan": ..., "tp_axis": "tp"}     parts
#     {"sharding": {...}, ...}           a model's configuration, of which only this part is read
#
# ``tp_plan`` has a style per module, ``{"layers.*.self_attn.q_proj": "colwise"}``; its rules come
# after those of ``parameters``.

_PARTS = ("parameters", "activations", "tp_plan", "tp_axis")


def read_rules(document: object) -> ShardingRules:
    """Read rules from plain data; see the module docstring.

    Args:
        document: A mapping, a list of pairs, or ShardingRules, which come back as they are.

    Returns:
        The rules.

    Raises:
        RulesError: Data of another form, or a rule that cannot be read.

    Example:
        >>> rules = read_rules({"*.q_proj": "colwise", "norm.weight": [None]})
        >>> [(rule.pattern, rule.placements) for rule in rules.rules]
        [('*.q_proj', 'colwise'), ('norm.weight', (None,))]
    """
    if isinstance(document, ShardingRules):
        return document
    if not isinstance(document, Mapping):
        return ShardingRules(_read_list(document, "the rules"))
    parts = cast("Mapping[object, object]", document)
    if "sharding" in parts:
        return read_rules(parts["sharding"])
    if not any(part in parts for part in _PARTS):
        return ShardingRules(_read_list(parts, "the rules"))
    unknown = [key for key in parts if key not in _PARTS]
    if unknown:
        raise RulesError(
            f"Sharding rules were read that have the parts {', '.join(map(str, parts))}. "
            f"{unknown[0]!r} is none of them: {', '.join(_PARTS)}. Put patterns under "
            "'parameters' or 'activations'."
        )
    tp_axis = parts.get("tp_axis", "tp")
    if not isinstance(tp_axis, str):
        raise RulesError(
            f"Sharding rules were read with tp_axis={tp_axis!r}. It is the name of the axis that "
            "styles cut along. Pass a string."
        )
    parameters = _read_list(parts.get("parameters") or {}, "parameters")
    plan = _read_list(parts.get("tp_plan") or {}, "tp_plan")
    for rule in plan:
        if rule.style is None:
            raise RulesError(
                f"tp_plan was read with {rule.pattern!r}: {rule.placements!r}. A tensor parallel "
                "plan has a style per module, e.g. 'colwise'. Put placements under 'parameters'."
            )
    activations = _read_list(parts.get("activations") or {}, "activations")
    return ShardingRules([*parameters, *plan], activations, tp_axis)


def _read_list(entries: object, what: str) -> list[ShardingRule]:
    if isinstance(entries, Mapping):
        pairs = cast("Mapping[object, object]", entries)
        return [_rule(pattern, placements, what) for pattern, placements in pairs.items()]
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise RulesError(
            f"Sharding rules were read, and {what} are of type={type(entries).__name__}. They are "
            "patterns with placements. Pass a mapping, or a list of pairs."
        )
    rules: list[ShardingRule] = []
    for entry in cast("Sequence[object]", entries):
        if isinstance(entry, ShardingRule):
            rules.append(entry)
        elif isinstance(entry, Mapping):
            rules += _read_list(cast("object", entry), what)
        else:
            rules.append(_pair(entry, what))
    return rules


def _pair(entry: object, what: str) -> ShardingRule:
    pair = cast("Sequence[object]", entry) if isinstance(entry, (list, tuple)) else ()
    if len(pair) != 2:
        raise RulesError(
            f"Sharding rules were read, and {what} have the entry {entry!r}. Each entry of a list "
            "is one rule. Pass [pattern, placements], or {pattern: placements}."
        )
    return _rule(pair[0], pair[1], what)


def _rule(pattern: object, placements: object, what: str) -> ShardingRule:
    if not isinstance(pattern, str):
        raise RulesError(
            f"Sharding rules were read, and {what} have the pattern {pattern!r} of "
            f"type={type(pattern).__name__}. A pattern is text. Write it in quotes."
        )
    return ShardingRule(pattern, placements)


def rules_as_data(rules: ShardingRules) -> dict[str, object]:
    """Write rules as plain data, which `read_rules` reads back to equal rules.

    Args:
        rules: The rules.

    Returns:
        A dict of lists and strings that YAML and JSON can hold.

    Example:
        >>> rules_as_data(ShardingRules([("head", "colwise")], tp_axis="tensor"))
        {'parameters': [['head', 'colwise']], 'activations': [], 'tp_axis': 'tensor'}
    """
    return {
        "parameters": [[rule.pattern, _plain(rule.placements)] for rule in rules.rules],
        "activations": [[rule.pattern, _plain(rule.placements)] for rule in rules.activations],
        "tp_axis": rules.tp_axis,
    }


def _plain(entry: object) -> object:
    if isinstance(entry, tuple):
        return [_plain(part) for part in cast("tuple[object, ...]", entry)]
    return entry
