"""Write the parts of docs/ that follow from the code: every key, every rule. `make docs` runs it."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent


def keys_page() -> str:
    """docs/keys.md: every configuration key with its flag, default and meaning."""
    from rllaunch.flags import launch_flags
    from rllaunch.resolve.origins import show_value
    from rllaunch.resolve.resolve import known_keys
    from rllaunch.resolve.schema import LaunchConfig, descriptions

    flags = {f.key: f for f in launch_flags().values()}
    defaults = LaunchConfig().model_dump(mode="json")
    lines = [
        "# Keys",
        "",
        "Every key of the configuration, written by `make docs`. Any of them can be set in a TOML file, as",
        "`RLLAUNCH_SECTION__KEY` in the environment, or with `--set section.key=value`; those with a flag also by it.",
        "Other options of Megatron and SGLang pass through `[megatron]` and `[sglang]` (`--megatron-…`, `--sglang-…`).",
    ]
    section = ""
    for key in known_keys():
        name, _, leaf = key.partition(".")
        if name != section:
            section = name
            lines += ["", f"## [{section}]", "", "| key | default | flag | meaning |", "|---|---|---|---|"]
        flag = flags.get(key)
        names = (flag.name, *flag.aliases) if flag else ()
        shown = ", ".join(f"`{n}`" for n in names) + (f" / `--no-{flag.name[2:]}`" if flag and flag.is_bool else "")
        meaning = descriptions()[key].replace("|", "\\|")
        lines.append(f"| `{leaf}` | `{show_value(defaults[section][leaf])}` | {shown} | {meaning} |")
    return "\n".join(lines) + "\n"


def rules_page() -> str:
    """docs/rules.md: every rule of the doctor with its reason."""
    from rllaunch.doctor.engine import ENGINE_CODES, builtin_rules
    from rllaunch.doctor.profile_facts import CODES

    lines = [
        "# Rules",
        "",
        "What `rllaunch doctor` and `rllaunch train` check, written by `make docs`. `RL3xx` look at the configuration",
        "(exit code 3), `RL4xx` at GPUs, their driver and the packages that use them, `RL5xx` at the rest of the",
        "machine and the cluster (both exit code 5; `--no-probe` and `--dry-run` leave them out). `--allow CODE` turns",
        "an overridable error into a warning. Rules that run a program on the GPU do so only with",
        "`rllaunch doctor --gpu-test`. A plugin brings rules of its own with `rllaunch_rules`.",
        "",
        "| code | rule | why | can be allowed |",
        "|---|---|---|---|",
    ]
    others = {
        **ENGINE_CODES,
        **CODES,
        "RL010": "a plugin or a profile cannot be used",
        "RL337": "no plugin brings the backend",
        "RL340": "prompts or reward cannot be used (not with --no-probe)",
        "RL508": "a backend that this version cannot start yet",
    }
    lines += [f"| {code} | {name} | | |" for code, name in sorted(others.items())]
    for rule in builtin_rules():
        reason = " ".join(rule.reason.split()).replace("|", "\\|")
        name = f"{rule.name} (`--gpu-test`)" if rule.tests_gpu else rule.name
        lines.append(f"| {rule.code} | {name} | {reason} | {'yes' if rule.overridable else ''} |")
    return "\n".join(lines) + "\n"


PAGES = {"keys.md": keys_page, "rules.md": rules_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")
        print(f"docs/{name}", file=sys.stderr)
