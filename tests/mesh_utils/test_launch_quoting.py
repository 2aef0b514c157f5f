"""Words and names reach what runs as they are, whatever is in them.

What would run on a host is run here, so that quoting is checked by shells and not by eye.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from mesh_utils.launch import render
from mesh_utils.launch.text import dns_name, kubernetes_text, yaml_text
from mesh_utils.launch.text import settings as shell_settings
from tests.mesh_utils.launch_stand_ins import (
    AWKWARD,
    IMAGE,
    SHOW,
    WORDS,
    call,
    in_pod,
    make_tools,
    option,
    pod_of,
    shell,
    shown,
    small,
    variables_of,
)

words = st.lists(
    st.one_of(
        st.sampled_from(AWKWARD),
        st.text(
            st.characters(exclude_categories=["Cs"], exclude_characters="\0"),
            min_size=0,
            max_size=12,
        ),
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tools(tmp_path_factory.mktemp("tools"))


@pytest.mark.thorough
@given(words, st.dictionaries(st.sampled_from(["A", "_b1"]), st.sampled_from(AWKWARD)))
@example(AWKWARD, {"A": "a\nb '\"$(x) $$"})
def test_words_in_scripts(tools: Path, given: list[str], env: dict[str, str]) -> None:
    show = ["bash", "-c", f'{SHOW}; printf "%s\\0" "${{A-}}" "${{_b1-}}"', "bash", *given]
    expected = [*given, env.get("A", ""), env.get("_b1", "")]
    for launcher in ("slurm", "torchrun"):
        text = render(small(accelerator="2xh100:8"), launcher, command=show, env=env)
        (called,) = call(text, tools, MASTER_ADDR="head", NODE_RANK="0")
        assert called[-len(show) :] == show
    text = render(small(num_slices=2), "queued", command=show, env=env, project="p", zone="z")
    remote = option(call(text, tools)[2], "command")
    assert shown(shell(remote, None).stdout) == expected


@pytest.mark.thorough
@given(words)
@example(["a", "--b=c d"])
@example(["$HOME"])
@example(AWKWARD)
def test_words_in_xpk(tools: Path, given: list[str]) -> None:
    text = render(small(num_slices=2), "xpk", command=["printf", "%s|", *given])
    (called,) = call(text, tools, CLUSTER="c", PROJECT="p", ZONE="z")
    line = option(called, "command")
    # xpk writes it between other text in YAML, once as a block and once in double quotes, in pods.
    assert re.fullmatch(r"[\x20-\x7e]+", line)
    assert not set(line) & set('"\\$')
    assert yaml.safe_load(f'"{line}"') == line
    assert shell(f"({line})", None).stdout.decode() == "".join(f"{word}|" for word in given)


@pytest.mark.thorough
@given(words, st.dictionaries(st.sampled_from(["A", "_b1"]), st.sampled_from(AWKWARD)))
@example(AWKWARD, {"A": "\x85\u2028\ufeff: {["})
@example(["$(A)", "$$(A)", "$$$", "\x7f\x00"[:1], "- a: b"], {"A": "no"})
def test_words_in_pods(given: list[str], env: dict[str, str]) -> None:
    for accelerator in ("v5e:4x4", "2xh100:8"):
        found = small(accelerator=accelerator)
        text = render(found, "jobset", command=given, env=env, image=IMAGE)
        (container,) = pod_of(text)[1]["containers"]
        known = variables_of(container)
        command = [in_pod(word, known) for word in container["command"]]
        assert command[-len(given) :] == given
        assert {name: known[name] for name in env} == env


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_quoting(text: str) -> None:
    assert yaml.safe_load(yaml_text(text)) == text
    assert "\n" not in yaml_text(text)
    assert in_pod(yaml.safe_load(kubernetes_text(text)), {"A": "no", "": "no"}) == text


@pytest.mark.thorough
@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), min_size=1, max_size=60))
@example("'; touch /tmp/no; '")
@example("$(touch /tmp/no)")
@example("@@name @@{title} @@")
@example("-" * 70 + "a")
@example("NULL")  # to YAML null is no text
@example("no")
def test_names(tools: Path, name: str) -> None:
    if not re.search(r"[a-z0-9]", name.lower()) or not name.strip() or not name.isprintable():
        return
    found, gpus = small(name=name, num_slices=2), small(name=name, accelerator="2xh100:8")
    plain = dns_name(name)
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", plain)
    manifest = yaml.safe_load(render(found, "jobset", command=WORDS, image=IMAGE))
    assert manifest["metadata"]["name"] == plain
    assert call(render(found, "queued", command=WORDS, project="p", zone="z"), tools)[0][5] == plain
    (called,) = call(render(gpus, "slurm", command=WORDS), tools)
    assert called[-len(WORDS) :] == WORDS
    assert not Path("/tmp/no").exists()


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1))
def test_settings(value: str) -> None:
    script = shell_settings({"zone": value}, {"ZONE": "a zone"}) + '\nprintf "%s\\0" "$ZONE"'
    assert shown(shell(script, None).stdout) == [value]
