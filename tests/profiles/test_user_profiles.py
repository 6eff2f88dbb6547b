"""Profiles of a user's own: in which folders they are found, who has a name first, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

MINE = """\
[profile]
kind = "hardware"
name = "{name}"
source = "its label"
extends = "{extends}"

[facts]
host_memory_bytes = {host}
"""


def put(folder: Path, name: str = "mine", extends: str = "H100", host: int = 10**12) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.toml"
    file.write_text(MINE.format(name=name, extends=extends, host=host), encoding="utf-8")
    return file


def listed(rllaunch: Any, *words: str) -> dict[str, tuple[str, str]]:
    rows = rllaunch("profiles", "list", "--kind", "hardware", "--json", *words).json()
    return {row["name"]: (row["place"], row["plugin"]) for row in rows}


def test_profiles_are_found_in_four_places_and_the_list_says_in_which(
    rllaunch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    put(tmp_path / "flag" / "deep", "by-flag")
    put(tmp_path / "one", "by-variable")
    put(tmp_path / "two", "by-variable-too")
    put(tmp_path / "profiles", "local")
    put(tmp_path / "profiles" / "below", "not-ours")
    put(tmp_path / "config" / "rllaunch" / "profiles", "everywhere")
    monkeypatch.setenv("RLLAUNCH_PROFILE_DIR", "one:two")
    found = listed(rllaunch, "--profile-dir", "flag")
    shipped = {name for name, (_, plugin) in found.items() if plugin.startswith("rllaunch ")}
    assert len(shipped) == 21
    origins = ("--profile-dir", "RLLAUNCH_PROFILE_DIR", "./profiles", "config folder")
    assert {name: row for name, row in found.items() if row[1] in origins} == {
        "by-flag": ("flag/deep/by-flag.toml", "--profile-dir"),
        "by-variable": ("one/by-variable.toml", "RLLAUNCH_PROFILE_DIR"),
        "by-variable-too": ("two/by-variable-too.toml", "RLLAUNCH_PROFILE_DIR"),
        "local": ("profiles/local.toml", "./profiles"),
        "everywhere": (str(tmp_path / "config/rllaunch/profiles/everywhere.toml"), "config folder"),
    }
    assert "profiles/local.toml (./profiles)" in rllaunch("profiles", "list").out


@pytest.mark.parametrize("command", ["resolve", "plan", "doctor", "train", "explain"])
def test_every_command_of_a_launch_takes_the_folder(rllaunch: Any, tmp_path: Path, command: str):
    put(tmp_path / "elsewhere")
    words = ("--model", "qwen3-0.6b", "--hardware", "mine", "--profile-dir", "elsewhere")
    more = {"doctor": ["--no-probe"], "train": ["--dry-run"], "explain": ["host_memory_bytes"]}.get(command, [])
    result = rllaunch(command, *more, *words)
    assert result.code == 0, result.err
    assert rllaunch(command, *more, *words[:-2]).code == 3


@pytest.mark.parametrize("side", ["mine", "mine.toml", "--model qwen3-0.6b --hardware mine", "run"])
def test_a_comparison_takes_the_folder_in_every_way_to_name_a_launch(rllaunch: Any, tmp_path: Path, side: str):
    put(tmp_path / "elsewhere")
    words = ("--model", "qwen3-0.6b", "--hardware", "mine", "--profile-dir", "elsewhere")
    (tmp_path / "mine.toml").write_text('[model]\nname = "qwen3-0.6b"\n[hardware]\nname = "mine"\n', encoding="utf-8")
    (tmp_path / "run").mkdir()
    config = rllaunch("resolve", *words, "--json").json()["config"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    other = "H100" if side == "mine" else "--model qwen3-0.6b --hardware H100"
    result = rllaunch("diff", side, other, "--profile-dir", "elsewhere", "--json")
    assert result.code == 0, result.err
    changed = {row["key"]: row["a"]["value"] for row in result.json()["changed"]}
    assert changed["hardware.host_memory_bytes"] == 10**12
    assert rllaunch("diff", side, other).code in (2, 3)


def test_a_value_of_the_users_profile_names_its_file_and_what_it_replaced(rllaunch: Any, tmp_path: Path):
    put(tmp_path / "profiles")
    out = rllaunch("explain", "hardware.host_memory_bytes", "--model", "qwen3-0.6b", "--hardware", "mine").out
    assert out.splitlines()[0] == (
        "hardware.host_memory_bytes = 1000000000000   hardware profile: mine (./profiles) profiles/mine.toml:8"
    )


def test_the_explicit_command_repeats_the_folder(rllaunch: Any, tmp_path: Path):
    put(tmp_path / "elsewhere")
    words = ("--model", "qwen3-0.6b", "--hardware", "mine", "--profile-dir", "elsewhere")
    command = rllaunch("resolve", *words, "--json").json()["command"]
    assert command[:4] == ["rllaunch", "train", "--profile-dir", "elsewhere"]
    assert rllaunch("resolve", *command[2:], "--json").json()["command"] == command


def test_what_ships_is_not_replaced_and_every_command_that_plans_says_so(rllaunch: Any, tmp_path: Path):
    put(tmp_path / "profiles", "h100", "H200")
    result = rllaunch("plan", "--model", "qwen3-0.6b", "--hardware", "H100")
    assert "on 1 × 8 H100" in result.out
    warning = (
        "warning[RL010]: hardware profile name 'h100' is taken\n"
        "  profiles/h100.toml (./profiles)\n"
        "  already: hardware/H100.toml (rllaunch "
    )
    assert result.err.startswith(warning)
    assert rllaunch("profiles", "list").err.startswith(warning)
    found = rllaunch("doctor", "--no-probe", "--json", "--model", "qwen3-0.6b", "--hardware", "H100").json()
    assert [(f["code"], f["level"], f["fix"]) for f in found["findings"] if f["code"] == "RL010"] == [
        ("RL010", "warning", 'give the profile another name, with extends = "H100" for what the two share')
    ]


def test_of_two_folders_the_one_named_first_has_the_name(rllaunch: Any, tmp_path: Path):
    put(tmp_path / "a", host=10**12)
    put(tmp_path / "b", host=2 * 10**12)
    result = rllaunch("profiles", "list", "--profile-dir", "b", "--profile-dir", "a")
    assert "b/mine.toml (--profile-dir)" in result.out
    assert "  a/mine.toml (--profile-dir)\n  already: b/mine.toml (--profile-dir)" in result.err


def test_a_folder_that_is_found_twice_is_read_once(rllaunch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put(tmp_path / "profiles")
    monkeypatch.setenv("RLLAUNCH_PROFILE_DIR", str(tmp_path / "profiles"))
    result = rllaunch("profiles", "list", "--profile-dir", "profiles", "--profile-dir", str(tmp_path))
    assert result.err == ""
    assert "profiles/mine.toml (--profile-dir)" in result.out


def test_a_folder_that_is_not_there_is_one_error(rllaunch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = put(tmp_path / "elsewhere")
    launch = ("plan", "--model", "qwen3-0.6b", "--hardware", "mine")
    for words in (("profiles", "list"), launch):
        result = rllaunch(*words, "--profile-dir", "nowhere")
        assert (result.code, result.err) == (
            3,
            "error: profile directory does not exist: nowhere\n  --profile-dir nowhere\n"
            "hint: make it, or correct the path\n",
        )
        result = rllaunch(*words, "--profile-dir", str(file))
        assert result.code == 3
        assert result.err.endswith(f"hint: name its folder: {file.parent}\n")
    assert rllaunch(*launch, "--profile-dir").code == 2
    monkeypatch.setenv("RLLAUNCH_PROFILE_DIR", "nowhere")
    assert "  RLLAUNCH_PROFILE_DIR in the environment\n" in rllaunch(*launch).err


def test_a_broken_file_is_named_where_its_profile_is_asked_for(rllaunch: Any, tmp_path: Path):
    file = put(tmp_path / "profiles")
    file.write_text(file.read_text().replace("source", "sorce"), encoding="utf-8")
    result = rllaunch("plan", "--model", "qwen3-0.6b", "--hardware", "mine")
    assert result.code == 3
    assert "  profiles/mine.toml:4 (./profiles): unknown key 'sorce' in [profile]\n" in result.err
    result = rllaunch("profiles", "show", "mine")
    assert result.code == 3
    assert "  profiles/mine.toml:4 (./profiles): unknown key 'sorce' in [profile]\n" in result.err
    assert rllaunch("plan", "--model", "qwen3-0.6b", "--hardware", "H100").code == 0


def test_a_file_in_place_of_a_name_is_told_how_it_is_found(rllaunch: Any, tmp_path: Path):
    made = rllaunch("profiles", "new", "ws2", "--from", "H100", "-o", "elsewhere/ws2.toml")
    assert made.err.splitlines()[1:] == [
        "note: --hardware finds it with --profile-dir elsewhere, or once it lies in ./profiles"
    ]
    plan = ("plan", "--model", "qwen3-0.6b", "--hardware")
    result = rllaunch(*plan, "elsewhere/ws2.toml")
    assert (result.code, result.err) == (
        3,
        "error: a file is no name of a hardware profile: elsewhere/ws2.toml\n"
        "  --hardware elsewhere/ws2.toml\n"
        "hint: a profile goes by its name, which its file gives: --hardware ws2 --profile-dir elsewhere\n",
    )
    assert "(a file of yours is found in ./profiles or with --profile-dir DIR)\n" in rllaunch(*plan, "ws2").err
    assert rllaunch(*plan, "ws2", "--profile-dir", "elsewhere").code == 0
    (tmp_path / "profiles").mkdir()
    assert len(rllaunch("profiles", "new", "ws3", "--from", "H100").err.splitlines()) == 1
