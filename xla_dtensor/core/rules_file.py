"""Sharding rules as plain data (dicts, lists, strings, None), as YAML and configurations hold them.

Read are

    {"layers.*.wq.weight": ["tp", None], "layers.*[0]": ["fsdp", None, None]}    patterns on top
    [["layers.*.wq.weight", ["tp", None]], {"norm.weight": [None]}]              a list of pairs
    {"parameters": ..., "activations": ..., "tp_plan": ..., "tp_axis": "tp"}     parts
    {"sharding": {...}, ...}           a model's configuration, of which only this part is read

``tp_plan`` has a style per module, ``{"layers.*.self_attn.q_proj": "colwise"}``; its rules come
after those of ``parameters``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from xla_dtensor.core.errors import RulesError
from xla_dtensor.core.rules import ShardingRules
from xla_dtensor.core.sharding_rule import ShardingRule

__all__ = ["read_rules", "rules_as_data"]

_PARTS = ("parameters", "activations", "tp_plan", "tp_axis")


def read_rules(data: object) -> ShardingRules:
    """Read rules from plain data; see the module docstring.

    Args:
        data: A mapping, a list of pairs, or ShardingRules, which come back as they are.

    Returns:
        The rules.

    Raises:
        RulesError: Data of another form, or a rule that cannot be read.

    Example:
        >>> rules = read_rules({"*.q_proj": "colwise", "norm.weight": [None]})
        >>> [(rule.pattern, rule.placements) for rule in rules.rules]
        [('*.q_proj', 'colwise'), ('norm.weight', (None,))]
    """
    if isinstance(data, ShardingRules):
        return data
    if not isinstance(data, Mapping):
        return ShardingRules(_read_list(data, "the rules"))
    given = cast("Mapping[object, object]", data)
    if "sharding" in given:
        return read_rules(given["sharding"])
    if not any(part in given for part in _PARTS):
        return ShardingRules(_read_list(given, "the rules"))
    unknown = [key for key in given if key not in _PARTS]
    if unknown:
        raise RulesError(
            f"Sharding rules were read that have the parts {', '.join(map(str, given))}. "
            f"{unknown[0]!r} is none of them: {', '.join(_PARTS)}. Put patterns under "
            "'parameters' or 'activations'."
        )
    tp_axis = given.get("tp_axis", "tp")
    if not isinstance(tp_axis, str):
        raise RulesError(
            f"Sharding rules were read with tp_axis={tp_axis!r}. It is the name of the axis that "
            "styles cut along. Pass a string."
        )
    parameters = _read_list(given.get("parameters") or {}, "parameters")
    plan = _read_list(given.get("tp_plan") or {}, "tp_plan")
    for rule in plan:
        if rule.style is None:
            raise RulesError(
                f"tp_plan was read with {rule.pattern!r}: {rule.placements!r}. A tensor parallel "
                "plan has a style per module, e.g. 'colwise'. Put placements under 'parameters'."
            )
    activations = _read_list(given.get("activations") or {}, "activations")
    return ShardingRules([*parameters, *plan], activations, tp_axis)


def _read_list(data: object, what: str) -> list[ShardingRule]:
    if isinstance(data, Mapping):
        pairs = cast("Mapping[object, object]", data)
        return [_rule(pattern, placements, what) for pattern, placements in pairs.items()]
    if isinstance(data, str) or not isinstance(data, Sequence):
        raise RulesError(
            f"Sharding rules were read, and {what} are of type={type(data).__name__}. They are "
            "patterns with placements. Pass a mapping, or a list of pairs."
        )
    rules: list[ShardingRule] = []
    for entry in cast("Sequence[object]", data):
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


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(entry) for entry in cast("tuple[object, ...]", value)]
    return value
