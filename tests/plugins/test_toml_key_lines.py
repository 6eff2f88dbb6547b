"""Every key of a TOML text has a line, and that line is where the key stands."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import tomlkit
from hypothesis import given, settings
from hypothesis import strategies as st

from rllaunch.errors import ConfigError
from rllaunch.resolve.toml_lines import key_lines, line_of, parse_toml

SHAPES = {
    "keys above any table": ("a = 1\n# c\n\nb = 2\n", {"a": 1, "b": 4}),
    "tables": ("[t]\na = 1\n[u]\na = 2\n", {"t": 1, "t.a": 2, "u": 3, "u.a": 4}),
    "a table within a table": ("[t.u]\na = 1\n[t]\nb = 2\n", {"t": 1, "t.u": 1, "t.u.a": 2, "t.b": 4}),
    "dotted keys": ("a.b.c = 1\na . d = 2\n", {"a": 1, "a.b": 1, "a.b.c": 1, "a.d": 2}),
    "quoted keys": ("\"a b\" = 1\n'c]' = 2\n", {"a b": 1, "c]": 2}),
    "a quoted key with a dot": ('["x.y"]\n"a.b".c = 1\n', {"x.y": 1, "x.y.a.b": 2, "x.y.a.b.c": 2}),
    "a key with an escape": (r'"tab\t \"q\" \u00e9" = 1', {'tab\t "q" é': 1}),
    "a quoted empty key": ('"" = 1\na = 2\n', {"": 1, "a": 2}),
    "a header with blanks and a comment": ("  [ t . u ]  # [v]\n", {"t": 1, "t.u": 1}),
    "a multi-line string": ('a = """\nb = 1\n[t]\n"""\nc = 2\n', {"a": 1, "c": 5}),
    "a literal multi-line string": ("a = '''\nb = 1 \\'''\nc = 2\n", {"a": 1, "c": 3}),
    "quotes at the end of a multi-line string": (
        'a = """x"""""\nb = """\n"" \\""" \n"""\nc = 1\n',
        {"a": 1, "b": 2, "c": 5},
    ),
    "empty strings": (
        "a = \"\"\nb = ''\nc = \"\"\"\"\"\"\nd = ''''''\ne = 1\n",
        {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5},
    ),
    "brackets and signs in a string": ("a = \"[{#'\"\nb = '\"]}'\nc = 1\n", {"a": 1, "b": 2, "c": 3}),
    "a multi-line array": ("a = [\n  1, # ]\n  2,\n]\nb = 1\n", {"a": 1, "b": 5}),
    "an array of strings like keys": ('a = [\n"b = 1",\n"[t]",\n]\nc = 1\n', {"a": 1, "c": 5}),
    "arrays in arrays": ("a = [[1,\n2], [\n[3]]]\nb = 1\n", {"a": 1, "b": 4}),
    "an inline table": ("a = { b = 1, c.d = 2 }\n", {"a": 1, "a.b": 1, "a.c": 1, "a.c.d": 1}),
    "an inline table over lines": ("a = { b = [\n1], c = '''\n'''}\nd = 1\n", {"a": 1, "a.b": 1, "a.c": 2, "d": 4}),
    "inline tables in an array": ("a = [\n  { b = 1 },\n  { b = 2, c = 3 },\n]\n", {"a": 1, "a.b": 2, "a.c": 3}),
    "an array of tables": ("[[v]]\na = 1\n[[v]]\na = 2\nb = 3\n", {"v": 1, "v.a": 2, "v.b": 5}),
    "a table below an array of tables": ("[[v]]\n[v.t]\na = 1\n", {"v": 1, "v.t": 2, "v.t.a": 3}),
    "values of every type": (
        "a = 1979-05-27 07:32:00Z # c\nb = -inf\nc = 0x_ff\nd = 07:32:00\ne = true\nf = 1e3\n".replace("x_", "x"),
        {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6},
    ),
    "lines that end as on Windows": ("[t]\r\na = [\r\n1]\r\nb = 2\r\n", {"t": 1, "t.a": 2, "t.b": 4}),
    "line separators of Unicode are no lines": ("a = '\u2028\x85'\n# \u2029\nb = 1\n", {"a": 1, "b": 3}),
    "no newline at the end": ("[t]\na = 'x'", {"t": 1, "t.a": 2}),
    "nothing": ("# only this\n", {}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_each_key_of_a_shape_has_its_line(shape: str):
    text, lines = SHAPES[shape]
    tomllib.loads(text)
    assert key_lines(text) == lines


def test_a_key_that_is_not_there_has_the_line_of_what_would_hold_it():
    lines = key_lines("\n[t]\na = 1\n")
    assert line_of(lines, "t.a") == 3
    assert line_of(lines, "t.b") == 2
    assert line_of(lines, "t.a.b.c") == 3
    assert line_of(lines, "u.a") == 1


@pytest.mark.parametrize(
    ("text", "line"),
    [("a = 1\nb = \n", 2), ("a = 1\na = 2\n", 2), ('a = """\n\n', 1), ("[t\n", 1), ("a = 1\n\n[t]\n[t]\n", 4)],
)
def test_malformed_text_is_refused_with_its_line(text: str, line: int):
    with pytest.raises(ConfigError, match="malformed TOML") as raised:
        parse_toml(text, "file.toml")
    assert raised.value.where == (f"file.toml:{line}",)


# --- texts nobody thought of ---------------------------------------------------------------------------------

names = st.text(st.sampled_from("ab_-Z09"), min_size=1, max_size=4) | st.text(
    st.sampled_from("a.b ='\"[]{}#,\\\té"), min_size=1, max_size=5
)
scalars = (
    st.integers(-(2**63), 2**63 - 1)
    | st.booleans()
    | st.floats(allow_nan=False)
    | st.dates()
    | st.text(st.sampled_from("ab=[]{}#,.'\"\\ \té"), max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
multiline = st.text(st.sampled_from("ab=[]{}#,.'\"\\ \n\té"), min_size=1, max_size=12)


@st.composite
def documents(draw: st.DrawFn) -> str:
    """A TOML text as tomlkit writes it: tables, inline tables, arrays over lines, strings over lines, comments."""
    document = tomlkit.document()
    for name, value in draw(st.dictionaries(names, values, max_size=4)).items():
        if draw(st.booleans()):
            document.add(tomlkit.comment(draw(st.sampled_from(["[t]", "a = 1", '"""', "]"]))))
        document.add(name, _item(draw, value))
    for name, content in draw(st.dictionaries(names, st.dictionaries(names, values, max_size=3), max_size=3)).items():
        if name not in document:
            table = tomlkit.table()
            for key, value in content.items():
                table.add(key, _item(draw, value))
            document.add(name, table)
    rows = draw(st.lists(st.dictionaries(names, scalars, max_size=2), max_size=2))
    if rows and "rows" not in document:
        array = tomlkit.aot()
        for row in rows:
            array.append(tomlkit.item(row))
        document.add("rows", array)
    return tomlkit.dumps(document)


def _item(draw: st.DrawFn, value: Any) -> Any:
    if isinstance(value, str) and draw(st.booleans()):
        return tomlkit.string(draw(multiline), multiline=True)
    if isinstance(value, Mapping):
        inline = tomlkit.inline_table()
        for key, inner in value.items():
            inline.add(key, _item(draw, inner))
        return inline
    if isinstance(value, list):
        array = tomlkit.array().multiline(draw(st.booleans()))
        for inner in value:
            array.append(_item(draw, inner))
        return array
    return tomlkit.item(value)


def keys_of(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield (*path, key)
            yield from keys_of(value, (*path, key))
    elif isinstance(node, list):
        for item in node:
            yield from keys_of(item, path)


@settings(max_examples=150, deadline=None)
@given(documents())
def test_every_key_that_is_read_has_a_line_and_the_line_has_the_key(text: str):
    keys = list(keys_of(tomllib.loads(text)))
    lines = key_lines(text)
    written = text.split("\n")
    dotted: dict[str, set[str]] = {}
    for path in keys:
        # Two paths may read alike with dots between: then the line is that of either.
        dotted.setdefault(".".join(path), set()).add(path[-1])
    assert set(lines) == set(dotted)
    for name, lasts in dotted.items():
        line = written[lines[name] - 1]
        assert any(last in line or json.dumps(last, ensure_ascii=False)[1:-1] in line for last in lasts)


FRAGMENTS = ["a", "b", "'c'", '"d"', ".", " = ", "1", "'", '"', "[", "]", "{", "}", ",", "#", "\\", "\n"]
# What a text begins with, and what may end it.
ENDS = {"": "", "a = [": "]", "a = {": "}", "[[t]]\na = '": "'", "a.b = '''": "'''", 'a = """': '"""', 'a = "': '"'}


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(ENDS)), st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join))
def test_any_text_that_is_toml_is_read_to_its_end(start: str, middle: str):
    text = f"{start}{middle}{ENDS[start]}\nlast = 1"
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    assert {".".join(path) for path in keys_of(data)} == set(key_lines(text))
