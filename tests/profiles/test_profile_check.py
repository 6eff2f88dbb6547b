"""`rllaunch profiles new` and `check`: from nothing to a profile in order, and every way in which one is not."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

GOOD = """\
[profile]
kind = "hardware"
name = "mine"
aliases = ["my-l40s"]
description = "A box of four L40S"
source = "its label"

[facts]
accelerator = "cuda"
gpus_per_node = 4
gpu_memory_bytes = 48305799168
host_memory_bytes = 540092137472
host_link = "PCIe Gen4 x16"
host_link_bytes_per_second = { value = 26.2e9, source = "measured 2026-11-29, pinned memory" }
hbm_bytes_per_second = 864e9

[choices.handoff]
colocate_memory_peak_device = "gpu"
"""
Checker = Callable[..., list[tuple[str, str]]]


@pytest.fixture
def checked(rllaunch: Any, tmp_path: Path) -> Checker:
    """Codes and levels of what is said of GOOD with replacements, as a file."""

    def check(*replaced: tuple[str, str], code: int = 3) -> list[tuple[str, str]]:
        text = GOOD
        for old, new in replaced:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
        result = rllaunch("profiles", "check", "mine.toml", "--json")
        assert result.code == code, result.out + result.err
        answer = result.json()
        assert answer["ok"] is (code == 0)
        return [(f["code"], f["message"]) for f in answer["findings"]]

    return check


# -- new -------------------------------------------------------------------------------------------


def test_a_new_profile_that_extends_another_is_in_order_at_once(rllaunch: Any, tmp_path: Path):
    (tmp_path / "profiles").mkdir()
    made = rllaunch("profiles", "new", "my-h100", "--from", "hgx-h100")
    assert (made.code, made.out) == (0, "profiles/my-h100.toml\n")
    assert made.err == "fill it in, then: rllaunch profiles check profiles/my-h100.toml\n"
    result = rllaunch("profiles", "check", "my-h100")
    assert result.code == 0
    assert result.out.startswith(
        "warning[RL605]: the source in [profile] is still to be filled in; no fact refers to it\n"
        '  profile.source = "TODO: where the numbers below are from"   my-h100 (./profiles) profiles/my-h100.toml\n'
    )
    assert result.err.startswith("hardware my-h100 (profiles/my-h100.toml (./profiles)): in order")
    assert "on 1 × 8 my-h100" in rllaunch("plan", "--model", "qwen3-0.6b", "--hardware", "my-h100").out


def test_a_new_profile_says_of_every_fact_how_to_find_it_out(rllaunch: Any, tmp_path: Path):
    from rllaunch.resolve.schema import Hardware
    from rllaunch.resolve.template import HOW

    assert set(HOW) == set(Hardware.model_fields) - {"name"}
    assert rllaunch("profiles", "new", "box", "-o", "there/box.toml").out == "there/box.toml\n"
    text = " ".join((tmp_path / "there/box.toml").read_text().replace("\n# ", " ").split())
    for key, how in HOW.items():
        assert how in text, key
        assert f" {key} =" in text
    result = rllaunch("profiles", "check", "there/box.toml")
    assert result.code == 3
    assert "error[RL603]: no accelerator is stated\n" in result.out


def test_facts_on_the_command_line_make_a_whole_profile(rllaunch: Any, tmp_path: Path):
    facts = ("gpus_per_node=4", "host_memory_bytes=540092137472")
    words = [word for fact in facts for word in ("--fact", fact)]
    rllaunch("profiles", "new", "box", "--from", "L40S", *words, "--source", 'its "label"', "-o", "box.toml")
    data = tomllib.loads((tmp_path / "box.toml").read_text())
    assert data["facts"] == {"gpus_per_node": 4, "host_memory_bytes": 540092137472}
    assert data["profile"]["source"] == 'its "label"'
    assert rllaunch("profiles", "check", "box.toml").code == 0
    rllaunch("profiles", "new", "box", "--from", "L40S", *words, "-o", "box.toml", "--force")
    result = rllaunch("profiles", "check", "box.toml")
    assert result.code == 3
    assert "error[RL605]: the source of 2 facts is still to be filled in\n" in result.out


def test_sizes_on_the_command_line_have_units_and_are_written_as_bytes(rllaunch: Any, tmp_path: Path):
    sizes = {"gpu_memory_bytes": "180GiB", "host_memory_bytes": "1.5 TB", "host_link_bytes_per_second": "55.3GB/s"}
    words = [word for key, size in sizes.items() for word in ("--fact", f"{key}={size}")]
    assert rllaunch("profiles", "new", "box", "--from", "B200", *words, "--source", "s", "-o", "box.toml").code == 0
    text = (tmp_path / "box.toml").read_text()
    assert "\ngpu_memory_bytes = 193273528320  # 180.0 GiB\n" in text
    assert "\nhost_memory_bytes = 1500000000000  # 1397.0 GiB\n" in text
    assert "\nhost_link_bytes_per_second = 55.3e9\n" in text
    assert rllaunch("profiles", "check", "box.toml").code == 0


def test_sizes_in_a_file_have_units_too(rllaunch: Any, checked: Checker):
    units = (("48305799168", '"44.98 GiB"'), ("540092137472", '{ value = "503 GiB", source = "cgroup" }'))
    assert checked(*units, ("26.2e9", '"26.2 GB/s"'), code=0) == []
    words = ("--model", "qwen3-0.6b", "--hardware", "mine", "--profile-dir", ".")
    answer = rllaunch("resolve", "--json", *words, "--update-weight-buffer-size", "64 MiB").json()
    assert answer["config"]["hardware"]["host_memory_bytes"] == 503 * 2**30
    assert answer["config"]["hardware"]["host_link_bytes_per_second"] == 26.2e9
    assert answer["origins"]["hardware.host_memory_bytes"][-1]["value"] == 503 * 2**30
    assert answer["origins"]["handoff.update_weight_buffer_size"][-1]["value"] == 64 * 2**20


def test_a_file_that_is_found_already_is_written_anew_with_force_only(rllaunch: Any, tmp_path: Path):
    (tmp_path / "profiles").mkdir()
    words = ("profiles", "new", "box", "--from", "H100")
    assert rllaunch(*words).code == 0
    again = rllaunch(*words)
    assert (again.code, again.err) == (
        3,
        "error: the file is there already: profiles/box.toml\nhint: --force overwrites it; or name another file\n",
    )
    assert rllaunch(*words, "--force").code == 0
    elsewhere = rllaunch(*words, "--force", "-o", "other.toml")
    assert elsewhere.code == 3
    assert "hint: another name; `--from box` extends it; `-o profiles/box.toml --force` writes that" in elsewhere.err


def test_the_words_by_which_a_base_is_known_are_not_offered_for_the_new_one(rllaunch: Any, tmp_path: Path):
    rllaunch("profiles", "new", "box", "--from", "B200", "--source", "s", "-o", "box.toml")
    text = (tmp_path / "box.toml").read_text().replace("\n# gpu_names =", "\ngpu_names =")
    (tmp_path / "box.toml").write_text(text)
    assert "# B200 is taken for NVIDIA B200: those words here too, and neither would be." in text
    assert rllaunch("profiles", "check", "box.toml").out == ""


def test_the_editors_schema_lies_beside_and_fits(rllaunch: Any, tmp_path: Path):
    rllaunch("profiles", "new", "box", "--from", "GB300", "-o", "box.toml")
    first = (tmp_path / "box.toml").read_text().splitlines()[0]
    assert first == "#:schema ./rllaunch-profile.schema.json"
    schema = json.loads((tmp_path / "rllaunch-profile.schema.json").read_text())
    assert schema == rllaunch("schema").json()
    jsonschema.validate(tomllib.loads((tmp_path / "box.toml").read_text()), schema, jsonschema.Draft7Validator)


def test_without_a_folder_here_it_goes_where_profiles_are_found_from_anywhere(rllaunch: Any, tmp_path: Path):
    file = tmp_path / "config/rllaunch/profiles/box.toml"
    assert rllaunch("profiles", "new", "box", "--from", "H200").out == f"{file}\n"
    assert rllaunch("profiles", "check", "box").code == 0


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("h100",), 3, "error: hardware profile name 'h100' is taken\n  hardware/H100.toml (rllaunch "),
        (("box", "--from", "H10"), 3, "error: unknown hardware profile 'H10'\n  --from H10\nhint: did you mean 'H100'"),
        (("box", "--fact", "gpu_memroy_bytes=1"), 3, "hint: did you mean 'gpu_memory_bytes'?\n"),
        (("box", "--fact", "gpus_per_node"), 2, "error: --fact 'gpus_per_node' is not KEY=VALUE\n"),
        (("box", "--fact", "gpu_memory_bytes=180gigs"), 3, "error: hardware.gpu_memory_bytes cannot be '180gigs': "),
        (("box", "--fact", "gpus_per_node=four"), 3, "error: hardware.gpus_per_node cannot be 'four': input should be"),
        (("box", "-o", "box.json"), 2, "error: a profile's file ends in .toml: box.json\n"),
        (("a b",), 2, "error: 'a b' cannot be a profile's name\n"),
        (("box", "-o", "here.toml/box.toml"), 3, "error: cannot write here.toml/box.toml: "),
        (("box", "-o", "here.toml"), 3, "error: the file is there already: here.toml\n"),
    ],
)
def test_what_cannot_be_written_is_one_error_and_no_file(
    rllaunch: Any, tmp_path: Path, words: tuple[str, ...], code: int, told: str
):
    (tmp_path / "here.toml").write_text("mine")
    result = rllaunch("profiles", "new", *words)
    assert result.code == code
    assert told in result.err
    assert "Traceback" not in result.err
    assert [p.name for p in tmp_path.rglob("*.toml")] == ["here.toml"]
    assert (tmp_path / "here.toml").read_text() == "mine"


# -- check -----------------------------------------------------------------------------------------


def test_a_profile_that_is_in_order_is_one_line_and_not_blamed_for_large_models(rllaunch: Any, tmp_path: Path):
    (tmp_path / "mine.toml").write_text(GOOD, encoding="utf-8")
    result = rllaunch("profiles", "check", "mine.toml", "tiny")
    assert result.err.splitlines() == [
        "hardware mine (mine.toml (given file)): in order; tried and planned: qwen3-0.6b as it is; "
        "glm-4.7-flash, nemotron-3-nano-30b-a3b with more nodes or a layout of its own",
        "model tiny (models/tiny.toml (rllaunch 0.1.0)): in order; tried and planned: H100, GB300, MI300X as it is",
    ]


def test_every_shipped_profile_is_in_order(rllaunch: Any):
    answer = rllaunch("profiles", "check", "--all", "--json").json()
    shipped = [row for row in answer["profiles"] if "(rllaunch " in row["place"]]
    assert len(shipped) == 82
    assert [f for f in answer["findings"] if f["level"] != "info"] == []
    tried = {row["kind"]: {len(r["launches"]) for r in shipped if r["kind"] == row["kind"]} for row in shipped}
    assert tried == {"hardware": {3}, "model": {3}, "cell": {1}, "task": {1}}
    assert all(launch["fits"] is not None for row in shipped for launch in row["launches"])


def test_a_good_file_has_nothing_to_be_said_about(checked: Checker):
    assert checked(code=0) == []


FACTS = [
    # (replaced, by, code, message); the first of the findings
    ("48305799168", "48", "RL604", "gpu_memory_bytes is in bytes, and 48 cannot be: a L40S has 48 GB"),
    ("48305799168", "46068", "RL604", "gpu_memory_bytes is in bytes, and 46,068 cannot be: a L40S has 48 GB"),
    ("48305799168", "193223196672", "RL604", "180.0 GiB is the memory of all 4 GPUs together: a L40S has 48 GB"),
    ("48305799168", "25757220864", "RL604", "gpu_memory_bytes is in bytes, and 25,757,220,864 cannot be: a L40S has"),
    ("540092137472", "527433728", "RL604", "host_memory_bytes is in bytes, and 527,433,728 cannot be"),
    ("540092137472", "503", "RL604", "host_memory_bytes is in bytes, and 503 cannot be"),
    ("26.2e9", "26.2", "RL604", "host_link_bytes_per_second is in bytes per second, and 26 cannot be: PCIe Gen4 x16"),
    ("26.2e9", "52.4e9", "RL604", "52.4 GB/s are both directions together: one way PCIe Gen4 x16 carries 31.5 GB/s"),
    ("26.2e9", "400e9", "RL604", "host_link_bytes_per_second is in bytes per second, and 400,000,000,000 cannot be"),
    ("Gen4 x16", "Gen3 x4", "RL604", "host_link_bytes_per_second is in bytes per second, and 26,200,000,000 cannot be"),
    ("864e9", "864", "RL604", "hbm_bytes_per_second is in bytes per second, and 864 cannot be: no such memory or link"),
    ("864e9", "0.864e12\ngpu_link_bytes_per_second = 64", "RL604", "gpu_link_bytes_per_second is in bytes per second"),
    ("gpus_per_node = 4", "gpus_per_node = 72", "RL604", "72 GPUs in one node"),
    ("gpus_per_node = 4\n", "", "RL603", "gpus_per_node is not stated"),
    ('accelerator = "cuda"\n', "", "RL603", "no accelerator is stated"),
    ('accelerator = "cuda"', 'accelerator = "cpu"', "RL603", "a machine without GPUs has facts about them"),
    ('"its label"', '"TODO"', "RL605", "the source of 6 facts is still to be filled in"),
    ("gpu_memory_bytes", "gpu_memroy_bytes", "RL601", "unknown key 'gpu_memroy_bytes' in [hardware]"),
    (
        "48305799168",
        '"48 gigs"',
        "RL601",
        "hardware.gpu_memory_bytes cannot be \"48 gigs\": 'gigs' is no unit of bytes",
    ),
    ("48305799168", '"48"', "RL601", 'hardware.gpu_memory_bytes is a number, not "48"'),
    ("48305799168", '"4 TiB"', "RL604", "gpu_memory_bytes is in bytes, and 4,398,046,511,104 cannot be: a L40S has"),
    (
        "864e9",
        '"864 GB"',
        "RL601",
        "hardware.hbm_bytes_per_second cannot be \"864 GB\": 'GB' is no unit of bytes a second",
    ),
    ("gpus_per_node = 4", 'gpus_per_node = "4"', "RL601", 'hardware.gpus_per_node is a number, not "4"'),
    ("gpus_per_node = 4", "gpus_per_node = true", "RL601", "hardware.gpus_per_node is a number, not true"),
    ("[choices.handoff]", "[choices.handof]", "RL601", "unknown section [handof]"),
    ('device = "gpu"', 'device = "tpu"', "RL601", 'handoff.colocate_memory_peak_device cannot be "tpu"'),
    ('source = "its label"', 'source = "s"\nextends = "L40"', "RL602", "profile 'mine' extends unknown hardware"),
    ('source = "its label"', 'source = "s"\nextends = "mine"', "RL602", "profile 'mine' extends itself"),
    ('device = "gpu"', 'device = "gpu"\noffload_train = false', "RL608", "RL301: "),
    ('kind = "hardware"', 'kind = "hardwear"', "RL600", "profile kind 'hardwear' is none of"),
    ('name = "mine"', 'name = "H100"', "RL600", "hardware profile name 'H100' is taken"),
    ("gpus_per_node = 4", "gpus_per_node = ", "RL600", "malformed TOML: Invalid value"),
]


@pytest.mark.parametrize(("old", "new", "code", "message"), FACTS)
def test_a_mistake_is_found(checked: Checker, old: str, new: str, code: str, message: str):
    found = checked((old, new))
    assert any(c == code and m.startswith(message) for c, m in found), found


WARNINGS = [
    ("26.2e9", "6.1e9", "RL604", "19% of the 31.5 GB/s that PCIe Gen4 x16 carries: pageable memory, or fewer lanes?"),
    ("PCIe Gen4 x16", "pcie 4", "RL604", "'pcie 4' names no generation of a link"),
    ("540092137472", "34359738368", "RL604", "the host has 32.0 GiB, less than one GPU (45.0 GiB)"),
    ("48305799168", "48000000000", "RL604", "48 GB exactly, the vendor's decimal: a driver shows another number"),
    ("host_memory_bytes = 540092137472\n", "", "RL603", "host_memory_bytes is not stated"),
]


@pytest.mark.parametrize(("old", "new", "code", "message"), WARNINGS)
def test_what_may_be_meant_is_said_and_passes(checked: Checker, old: str, new: str, code: str, message: str):
    [(found, text)] = checked((old, new), code=0)
    assert found == code
    assert text.startswith(message)


def test_profiles_that_know_the_same_gpus_are_told_apart_by_name_only(checked: Checker):
    found = checked(("[choices.handoff]", '[detect]\ngpu_names = ["nvidia l40s"]\n[choices.handoff]'), code=0)
    assert found == [("RL609", "mine and L40S recognise the same GPUs: --hardware auto takes neither")]


def test_hbm_is_not_counted_as_host_memory_where_the_two_are_coherent(rllaunch: Any, tmp_path: Path):
    for nbytes, code in ((1030792151040, 0), (1700000000000, 3)):
        fact = ("--fact", f"host_memory_bytes={nbytes}", "--source", "MemTotal")
        rllaunch("profiles", "new", "tray", "--from", "GB200", *fact, "-o", "tray.toml", "--force")
        result = rllaunch("profiles", "check", "tray.toml")
        assert result.code == code
    assert (
        "error[RL604]: 1583.2 GiB of host RAM counts the HBM: 4 × GB200 have 960.0 GiB of their own at most\n"
        in result.out
    )


def test_the_gpu_that_a_base_names_is_told_from_the_profiles_own(rllaunch: Any, tmp_path: Path):
    words = ("profiles", "new", "ws", "--from", "RTX-4090", "--fact", "gpu_memory_bytes=34190917632", "--source", "smi")
    rllaunch(*words, "-o", "ws.toml")
    result = rllaunch("profiles", "check", "ws.toml")
    assert result.code == 3
    assert (
        "error[RL604]: gpu_memory_bytes is in bytes, and 34,190,917,632 cannot be: a RTX 4090 has 24 or" in result.out
    )
    hint = 'hint: if this is another GPU than RTX-4090\'s, say so: gpu_names = ["…"] under [detect]\n'
    assert hint in result.out
    text = (tmp_path / "ws.toml").read_text()
    named = text[: text.rindex("# gpu_names")] + 'gpu_names = ["NVIDIA GeForce RTX 5090"]\n'
    (tmp_path / "ws.toml").write_text(named)
    assert rllaunch("profiles", "check", "ws.toml").code == 0


def test_a_bases_speed_beside_another_link_is_remarked_on(rllaunch: Any, tmp_path: Path):
    words = ("profiles", "new", "box", "--from", "H100", "--source", "lspci", "-o", "box.toml", "--force", "--fact")
    rllaunch(*words, "host_link=PCIe Gen4 x16", "--fact", "host_link_bytes_per_second=26.2e9")
    assert rllaunch("profiles", "check", "box.toml").out == ""
    rllaunch(*words, "host_link=PCIe Gen5 x16")
    assert rllaunch("profiles", "check", "box.toml").out == ""
    rllaunch(*words, "host_link=PCIe Gen6 x16")
    result = rllaunch("profiles", "check", "box.toml")
    assert result.code == 0
    assert "warning[RL604]: the link's speed is still that of H100, whose link is PCIe Gen5 x16\n" in result.out
    assert ", or 100.4e9 (not measured: 83% of the 121.0 GB/s that PCIe Gen6 x16 carries)\n" in result.out


def test_a_link_without_a_speed_gives_the_plan_what_it_carries(rllaunch: Any, checked: Checker):
    speed = 'host_link_bytes_per_second = { value = 26.2e9, source = "measured 2026-11-29, pinned memory" }\n'
    said = "not measured: 83% of the 63.0 GB/s that PCIe Gen5 x16 carries"
    [(code, text)] = checked((speed, ""), ("Gen4", "Gen5"), code=0)
    assert (code, text) == (
        "RL603",
        f"host_link_bytes_per_second is not stated: the seconds of a plan are those of 52.3 GB/s, {said}",
    )
    plan = rllaunch("plan", "--model", "qwen3-0.6b", "--hardware", "mine", "--profile-dir", ".")
    assert f"\n  host link 52.3 GB/s ({said})\n" in plan.out
    assert "no link" not in plan.err
    link = rllaunch("plan", "--json", "--model", "qwen3-0.6b", "--hardware", "mine", "--profile-dir", ".").json()[
        "link"
    ]
    assert link == {"bytes_per_second": 52.3e9, "source": said, "measured": False}
    checked((speed, ""), ('"PCIe Gen4 x16"', '"a cable"'), code=0)
    plan = rllaunch("plan", "--model", "qwen3-0.6b", "--hardware", "mine", "--profile-dir", ".")
    assert "note: the profile states no link to the host that is known; the seconds are of PCIe Gen4\n" in plan.err


def test_a_fact_that_no_key_takes_is_to_be_a_comment(rllaunch: Any, tmp_path: Path):
    (tmp_path / "mine.toml").write_text(
        GOOD.replace("host_link =", 'nics = "4 x 400 Gb/s"\nhost_link ='), encoding="utf-8"
    )
    result = rllaunch("profiles", "check", "mine.toml")
    assert "hint: write what no key takes as a comment; known keys: " in result.out
    rllaunch("profiles", "new", "box", "-o", "box.toml")
    assert "# What no key takes (NICs, CPUs, disks) stands as a comment" in (tmp_path / "box.toml").read_text()


def test_a_finding_names_file_and_line_and_what_was_probably_meant(rllaunch: Any, tmp_path: Path):
    (tmp_path / "mine.toml").write_text(GOOD.replace("540092137472", "527433728"), encoding="utf-8")
    result = rllaunch("profiles", "check", "mine.toml")
    assert result.out == (
        "error[RL604]: host_memory_bytes is in bytes, and 527,433,728 cannot be: no node with GPUs has that\n"
        "  hardware.host_memory_bytes = 527433728   mine.toml:12   its label\n"
        "  hint: were KiB (as /proc/meminfo's kB) meant? host_memory_bytes = 540092137472\n"
    )
    assert result.err == "hardware mine (mine.toml (given file)): 1 error\n"


def test_what_is_no_profile_is_told_in_one_error(rllaunch: Any, tmp_path: Path):
    result = rllaunch("profiles", "check", "nowhere.toml")
    assert result.code == 3
    assert "error[RL600]: profile does not exist: nowhere.toml\n" in result.out
    result = rllaunch("profiles", "check", "H10O")
    assert (result.code, result.err) == (
        3,
        "error: unknown profile 'H10O'\nhint: did you mean 'H100'? (a file of yours is found in ./profiles or with --profile-dir DIR)\n",
    )
    assert rllaunch("profiles", "check").code == 2
    assert rllaunch("profiles", "check", "H100", "--all").code == 2
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles/mine.toml").write_text(GOOD.replace("source", "sorce"), encoding="utf-8")
    result = rllaunch("profiles", "check", "mine")
    assert result.code == 3
    assert result.out.startswith(
        "error[RL600]: unknown key 'sorce' in [profile]\n  profiles/mine.toml:6 (./profiles)\n"
    )


SIX_MISTAKES = """\
[profile]
kind = "hardware"
name = "six"
fo = 1
aliases = "one"

[facts]
accelerator = "cuda"
gpus_per_node = { value = 72, source = "a" }
gpu_memory_bytes = { value = "80 gigs", source = "a" }
host_memory_byte = { value = 1, source = "a" }

[choices]
lr = 1

[detect]
gpu_name = ["x"]
"""


@pytest.mark.parametrize("word", ["profiles/six.toml", "six"])
def test_every_mistake_of_a_file_is_told_at_once(rllaunch: Any, tmp_path: Path, word: str):
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles/six.toml").write_text(SIX_MISTAKES, encoding="utf-8")
    findings = rllaunch("profiles", "check", word, "--json").json()["findings"]
    assert [(f["code"], f["message"]) for f in findings if f["level"] == "error"] == [
        ("RL600", "unknown key 'fo' in [profile]"),
        ("RL600", "'aliases' in [profile] is a list of texts, not 'one'"),
        ("RL600", "fact 'accelerator' has no source"),
        ("RL600", "choice 'lr' stands outside a section"),
        ("RL600", "unknown key 'gpu_name' in [detect]"),
        ("RL601", "unknown key 'host_memory_byte' in [hardware]"),
        (
            "RL601",
            "hardware.gpu_memory_bytes cannot be \"80 gigs\": 'gigs' is no unit of bytes: KiB, MiB, GiB, TiB "
            "(powers of 1024) or kB, MB, GB, TB (of 1000)",
        ),
        ("RL604", "72 GPUs in one node: a node is what one operating system runs"),
    ]
    launch = rllaunch("doctor", "--no-probe", "--model", "qwen3-0.6b", "--hardware", "six")
    assert launch.code == 3
    for line, what in ((4, "unknown key 'fo' in [profile]"), (17, "unknown key 'gpu_name' in [detect]")):
        assert f"  profiles/six.toml:{line} (./profiles): {what}\n" in launch.err


def test_other_kinds_are_checked_too(rllaunch: Any, tmp_path: Path):
    cell = '[profile]\nkind = "cell"\nname = "c"\nmodel = "qwen3-8b"\nhardware = "{}"\n[choices.trainer]\nlr = {}\n'
    (tmp_path / "c.toml").write_text(cell.format("L40S", "1e-6"))
    assert rllaunch("profiles", "check", "c.toml").code == 0
    (tmp_path / "c.toml").write_text(cell.format("L40", "1e-6"))
    result = rllaunch("profiles", "check", "c.toml")
    assert result.code == 3
    assert "error[RL606]: qwen3-8b on L40 does not resolve: unknown hardware profile 'L40'\n" in result.out
    (tmp_path / "c.toml").write_text(cell.format("L40S", "-1"))
    assert (
        "error[RL601]: trainer.lr cannot be -1: input should be greater than 0\n"
        in rllaunch("profiles", "check", "c.toml").out
    )


def test_a_finding_is_listed_once_and_names_its_profile(rllaunch: Any, tmp_path: Path):
    for name in ("mine", "other"):
        text = GOOD.replace('"mine"', f'"{name}"').replace("my-l40s", f"my-{name}").replace("gpus_per_node = 4\n", "")
        (tmp_path / f"{name}.toml").write_text(text, encoding="utf-8")
    answer = rllaunch("profiles", "check", "mine.toml", "other.toml", "mine.toml", "--json").json()
    assert [(f["profile"], f["code"], f["message"]) for f in answer["findings"]] == [
        (name, "RL603", "gpus_per_node is not stated: every layout is counted from it") for name in ("mine", "other")
    ]
    assert [(row["name"], row["ok"]) for row in answer["profiles"]] == [("mine", False), ("other", False)]
    assert all("findings" not in row for row in answer["profiles"])


@pytest.mark.parametrize(
    ("link", "told"),
    [
        ("PCIe Gen9 x16", "'PCIe Gen9 x16': no PCIe generation 9 is known"),
        ("PCIe Gen9", "'PCIe Gen9': no PCIe generation 9 is known"),
        ("PCIe Gen10 x16", "'PCIe Gen10 x16': no PCIe generation 10 is known"),
        ("PCIe Gen5 x160", "'PCIe Gen5 x160': a link has 1, 2, 4, 8 or 16 lanes, not 160"),
        ("pcie5", "'pcie5' names no generation of a link"),
        ("Gen9 x16", "'Gen9 x16' names no generation of a link"),
        ("PCI Express 5.0", "'PCI Express 5.0' names no generation of a link"),
    ],
)
def test_a_link_that_is_not_known_is_remarked(checked: Checker, link: str, told: str):
    assert checked(("PCIe Gen4 x16", link), code=0) == [("RL604", told)]
