r"""Sharding rules: patterns of parameter paths, and how the tensors that they match lie.

    rules = ShardingRules([
        ShardingRule("layers.*.attention.wq.weight", ("tp", "fsdp")),   one entry per tensor dim
        ShardingRule("layers.*.mlp.up_proj", "colwise"),                a module's weight and bias
        ShardingRule(r"re:.*norm\.weight", (None,)),                     a regular expression
        ShardingRule("layers.*[0]", ("fsdp", None, None)),              a module's first output
    ])

* In a glob, ``*`` matches one component of a dotted path, or some of its characters; ``**`` matches
  any number of components. After ``re:``, the whole path has to match.
* The first rule that matches a tensor wins. Later ones that match too are shadowed there.
* A pattern that ends in ``()`` or ``[0]``, or that matches modules and no tensor, is about what a
  module returns.
* "colwise" and "rowwise" are the names in a tensor parallel plan of Hugging Face Transformers. They
  place a module's ``weight`` and ``bias``; what a plan says of outputs is left to XLA.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mesh_utils import Mesh
from xla_dtensor.core.entries import describe_axes
from xla_dtensor.core.errors import RulesError
from xla_dtensor.core.layout import Layout
from xla_dtensor.core.sharding_plan import (
    PlannedOutput,
    PlannedTensor,
    ShardingPlan,
    TensorFacts,
    folded,
    table,
)
from xla_dtensor.core.sharding_rule import ShardingRule, rule_error

__all__ = ["ShardingPlan", "ShardingRule", "ShardingRules", "TensorFacts", "table"]

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
            path: given if isinstance(given, TensorFacts) else TensorFacts(tuple(given))
            for path, given in paths_and_shapes.items()
        }
        if unmatched not in ("error", "replicate"):
            raise RulesError(
                f"Rules were resolved with unmatched={unmatched!r}. It says what becomes of a "
                "parameter that no rule matches. Pass 'error' or 'replicate'."
            )
        return _Resolver(self, facts, mesh, modules).plan(unmatched == "replicate")


def _as_rule(given: RuleLike) -> ShardingRule:
    if isinstance(given, ShardingRule):
        return given
    pattern, placements = given
    return ShardingRule(pattern, placements)


class _Findings:
    """What does not fit, one line each; equal lines about numbered layers become one."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], list[str]] = {}

    def add(self, before: str, path: str = "", after: str = "") -> None:
        self._found.setdefault((before, folded(path), after), []).append(path)

    def lines(self) -> list[str]:
        return [
            before + (paths[0] if len(paths) == 1 else f"{path} (x{len(paths)})") + after
            for (before, path, after), paths in self._found.items()
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
        used = {id(rule) for found in self.matching.values() for rule in found}
        idle = [rule for rule in about_tensors if id(rule) not in used]
        names = modules or ()
        self.promoted = [
            rule
            for rule in idle
            if rule.entries is not None and any(map(rule.matches_module, names))
        ]
        self.unknown_axes: set[int] = set()
        self._check_axes()
        for rule in idle:
            if not any(rule is other for other in self.promoted):
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
        lies = [layouts[path] for path in ruled]
        for path, layout in zip(ruled, lies, strict=True):
            if layout is not None and lies[0] is not None and layout != lies[0]:
                self.findings.add(
                    f"{path} is tied to {ruled[0]}, but {self.matching[path][0].pattern!r} says "
                    f"{layout} and {self.matching[ruled[0]][0].pattern!r} says {lies[0]}"
                )
        facts = self.tensors[group[0]]
        if not ruled and not replicate_unmatched and not facts.is_buffer:
            self.findings.add("no rule matches ", group[0], f" of shape {facts.shape}")
        whole = Layout.replicated(self.mesh, len(facts.shape))
        for path in group:
            layouts.setdefault(path, lies[0] if ruled else whole)
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
            if rule.is_output or any(rule is other for other in self.promoted)
        ]
        about_outputs += self.rules.activations
        found: dict[tuple[str, int | None], list[ShardingRule]] = {}
        for rule in about_outputs:
            matched = [path for path in modules if rule.matches_module(path)]
            if not matched:
                self.findings.add(f"{rule.pattern!r} matches no module")
            for path in matched:
                found.setdefault((path, rule.output_index), []).append(rule)
        return [
            PlannedOutput(path, index, layout, matching[0].pattern, self._patterns(matching)[1])
            for (path, index), matching in found.items()
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
        shown = [f"- {line}" for line in lines[:_MOST_FINDINGS]]
        if len(lines) > _MOST_FINDINGS:
            shown.append(f"- and {len(lines) - _MOST_FINDINGS} more")
        raise RulesError(
            f"{count} sharding rules were resolved for {len(self.tensors)} tensors on a mesh with "
            f"{describe_axes(self.mesh)}. They do not fit in {len(lines)} "
            f"point{'' if len(lines) == 1 else 's'}:\n"
            + "\n".join(shown)
            + "\nCorrect these rules, or pass unmatched='replicate' for parameters that need none."
        )
