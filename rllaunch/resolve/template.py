"""The text of a hardware profile: every fact with its unit and how to find it out, those that are known filled in."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rllaunch.resolve.origins import show_value
from rllaunch.resolve.profiles import Profile, Value
from rllaunch.resolve.schema import Hardware, descriptions
from rllaunch.units import gib

# Beside each profile that is written, for editors (Taplo, Even Better TOML).
SCHEMA_FILE = "rllaunch-profile.schema.json"
# What a source reads like until someone fills it in; `rllaunch profiles check` refuses any that begins so.
UNSOURCED = "TODO: where the numbers below are from"
WIDTH = 110

# Fact → its unit, and how to find it out.
HOW: Mapping[str, str] = {
    "accelerator": '"cuda" (NVIDIA), "rocm" (AMD) or "cpu".',
    "gpus_per_node": "Count: `nvidia-smi -L | wc -l`. Of a rack of trays (NVL72) the GPUs of one tray.",
    "gpu_memory_bytes": (
        "Bytes, not the vendor's GB: the MiB of `nvidia-smi --query-gpu=memory.total --format=csv` × 1048576."
    ),
    "host_memory_bytes": (
        "Bytes: the smallest of the job's cgroup (`cat /sys/fs/cgroup/memory.max`), Slurm's --mem, "
        "and MemTotal of /proc/meminfo (kB × 1024) without NUMA nodes that have no CPU, which are HBM. "
        "`rllaunch profiles detect` reads all of them."
    ),
    "host_link": (
        'Text: "PCIe Gen4 x16", "PCIe Gen5 x16", "NVLink-C2C". '
        "`nvidia-smi --query-gpu=pcie.link.gen.max,pcie.link.width.max --format=csv`."
    ),
    "host_link_bytes_per_second": (
        "Bytes per second with pinned memory, the slower of the two ways: `rllaunch profiles detect --measure`, or "
        "nvbandwidth (its GB/s × 1e9). The link itself carries 31.5e9 (PCIe Gen4 x16), 63.0e9 (PCIe Gen5 x16), 450e9 "
        "(NVLink-C2C)."
    ),
    "host_pin_bytes_per_second": "Bytes per second: `rllaunch profiles detect --measure`.",
    "hbm_bytes_per_second": "Bytes per second, from the data sheet: 3.35 TB/s is 3.35e12.",
    "gpu_link_bytes_per_second": (
        "Bytes per second, both directions together: twice the sum of `nvidia-smi nvlink -s -i 0`, or the data sheet's "
        "NVLink figure (900 GB/s is 900e9)."
    ),
}


def fact_keys() -> list[str]:
    """The facts a hardware profile may state, in the schema's order."""
    return [key for key in Hardware.model_fields if key != "name"]


def profile_text(
    name: str,
    *,
    description: str,
    source: str,
    base: Profile | None = None,
    facts: Mapping[str, Value] | None = None,
    gpu_names: Sequence[str] = (),
    remarks: Iterable[str] = (),
) -> str:
    """A TOML file. Facts that are not given stand as comments, with what the base says if it says something.

    Args:
        facts: key → value; a source of its own is written beside it.
        remarks: lines that stand above the facts.
    """
    head = {"kind": "hardware", "name": name, "description": description, "source": source}
    if base:
        head["extends"] = base.name
    lines = [f"#:schema ./{SCHEMA_FILE}", "", "[profile]"]
    lines += [f"{key} = {toml(value)}" for key, value in head.items()]
    for remark in ["", *remarks]:
        lines += _comment(remark) if remark else [""]
    if base:
        lines += _comment(f"What is not stated here is as in {base.name}: take the # away where this machine differs.")
    lines.append("[facts]")
    for key in fact_keys():
        lines += [*_comment(descriptions()[f"hardware.{key}"]), *_comment(HOW[key])]
        if facts and key in facts:
            lines.append(_fact(key, facts[key]))
        elif base and f"hardware.{key}" in base.values:
            theirs = base.values[f"hardware.{key}"]
            lines.append(f"# {key} = {toml(theirs.value)}  # {base.name}: {theirs.fact_source}")
        else:
            lines.append(f"# {key} =")
        lines.append("")
    lines += [*_comment("What no key takes (NICs, CPUs, disks) stands as a comment; nothing is planned with it."), ""]
    lines += _comment(
        "What was chosen for this machine: any key of the configuration, under [choices.SECTION] "
        "(`rllaunch schema --of config` has them all)."
    )
    lines += ["# [choices.handoff]", '# colocate_memory_peak_device = "gpu"', "", "[detect]"]
    lines += _comment(
        "Words of the GPU's name (`nvidia-smi -L`) by which --hardware auto knows the machine. Of several profiles "
        "that fit, the one with the longest words is taken, and of equally long ones none."
    )
    if base and base.gpu_names and not gpu_names:
        lines += _comment(
            f"{base.name} is taken for {' and '.join(base.gpu_names)}: those words here too, and neither would be. "
            "Set it for another GPU only."
        )
    lines.append(("" if gpu_names else "# ") + f"gpu_names = {toml(list(gpu_names))}")
    return "\n".join(lines) + "\n"


def _fact(key: str, fact: Value) -> str:
    figure = f"  # {gib(fact.value)}" if key.endswith("_bytes") and isinstance(fact.value, int) else ""
    if not fact.fact_source:
        return f"{key} = {toml(fact.value)}{figure}"
    return f"{key} = {{ value = {toml(fact.value)}, source = {toml(fact.fact_source)} }}{figure}"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def toml(value: Any) -> str:
    """A value as TOML writes it, whatever its text holds."""
    if isinstance(value, str):
        import tomlkit

        return tomlkit.string(value).as_string()
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float) and value >= 1e9:
        return f"{value / 1e12:.4g}e12" if value >= 1e12 else f"{value / 1e9:.4g}e9"
    return show_value(value)
