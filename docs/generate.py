"""Write the pages of docs/ that follow from the code or the README. `make docs` runs it before it builds the site."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
# What of the README stands on the first page; the pages beside it tell the rest.
START = (
    "",
    "Commands",
    "Will it fit?",
    "What a handoff costs",
    "Your own task",
    "Settings",
    "The run directory",
    "Where it stands",
)


def start_page() -> str:
    """docs/index.md: install, first run and commands, as the README has them."""
    intro, *rest = re.split(r"^## (.+)\n", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    sections = {"": intro} | dict(zip(rest[::2], rest[1::2], strict=True))
    parts = [f"## {title}\n{sections[title]}" if title else sections[title] for title in START]
    page = "<!-- Written by `make docs` from README.md. -->\n\n" + "".join(parts).rstrip() + "\n"
    page = page.replace("](docs/", "](").replace("](CHANGELOG.md)", "](changelog.md)")
    return re.sub(r"\]\((?!https?:)([\w-]+/)", r"](../\1", page)


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
        "Keys that count bytes take a unit too: `512 MiB`, `55 GB/s`.",
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
    """docs/rules.md: every code of the doctor, each in the words of `rllaunch doctor --explain`."""
    from rllaunch.doctor.engine import builtin_rules
    from rllaunch.doctor.explain import explanations

    codes = explanations(builtin_rules())
    lines = [
        "# Rules",
        "",
        "What `rllaunch doctor` and `rllaunch train` check, written by `make docs`. `RL2xx` hold the memory plan",
        "against its limits (exit code 4), `RL3xx` look at the configuration (exit code 3), `RL4xx` at GPUs, their",
        "driver and the packages that use them, `RL5xx` at the rest of the machine and the cluster (both exit code 5;",
        "`--no-probe` leaves them out, `--dry-run` tells them and does not fail). `RL6xx` are findings of",
        "`rllaunch profiles check`. `--allow CODE` turns an overridable error into a warning. Rules that run a",
        "program on the GPU do so only with `rllaunch doctor --gpu-test`. A plugin brings rules of its own with",
        "`rllaunch_rules`, from `RL900` on. One of them by itself:",
        "",
        "```",
        "rllaunch doctor --explain RL203",
        "```",
        "",
        "| code | rule | can be allowed |",
        "|---|---|---|",
    ]
    for code, told in codes.items():
        rule = told.rule
        name = f"{told.name} (`--gpu-test`)" if rule and rule.tests_gpu else told.name
        lines.append(f"| [{code}](#{code.lower()}) | {name} | {'yes' if rule and rule.overridable else ''} |")
    for code, told in codes.items():
        lines += ["", f"## {code}", "", f"**{told.name}**", "", *(f"- {line}" for line in told.lines())]
        lines += ["", told.more] if told.more else []
    return "\n".join(lines) + "\n"


def hooks_page() -> str:
    """docs/hooks.md: every hook with its signature, in the words of its docstring."""
    from rllaunch import hooks

    intro, _, example = (inspect.getdoc(hooks) or "").partition("\n\n    #")
    code = inspect.cleandoc(f"    #{example}").replace("\n\n@", "\n\n\n@")
    lines = [
        "# Hooks",
        "",
        "Written by `make docs` from `rllaunch/hooks.py`. How to make and test one: [writing a plugin](plugins.md).",
        "",
        intro,
        "",
        "```python",
        code,
        "```",
    ]
    for name, spec in vars(hooks.Specs).items():
        if name.startswith("rllaunch_"):
            lines += ["", f"## {name}", "", "```python", _signature(name, spec), "```", "", *_told(spec)]
    observer = hooks.RunObserver
    lines += ["", "## RunObserver", "", *_told(observer)]
    for name, method in vars(observer).items():
        if name.startswith("on_"):
            lines += ["", "```python", _signature(name, method), "```", "", *_told(method)]
    return "\n".join(lines) + "\n"


def _signature(name: str, function: object) -> str:
    assert inspect.isfunction(function), name
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    shown = ", ".join(f"{p.name}: {p.annotation}" for p in parameters)
    return f"def {name}({shown}) -> {signature.return_annotation}: ..."


def _told(documented: object) -> list[str]:
    """A docstring as Markdown: its sections and what they name as list items."""
    lines: list[str] = []
    in_list = False
    for line in (inspect.getdoc(documented) or "").splitlines():
        section = re.match(r"(Moment|Used by): (.*)", line)
        argument = re.match(r"    (\w+): (.*)", line)
        if line == "Args:":
            continue
        if (section or argument) and not in_list:
            in_list = True
            lines += [""] if lines[-1] else []
        if section:
            lines.append(f"- {section[1]}: {section[2]}")
        elif argument:
            lines.append(f"- `{argument[1]}`: {argument[2]}")
        elif line or not in_list:
            lines.append(f"  {line.strip()}" if in_list else line)
    return lines


def exit_codes_page() -> str:
    """docs/exit-codes.md: what each exit code of a command means, and which errors end with it."""
    from rllaunch import errors

    body = ast.parse(inspect.getsource(errors)).body
    lines = [
        "# Exit codes",
        "",
        "Written by `make docs` from `rllaunch/errors.py`. They are the same for every command; what is raised in",
        "Python, by plugins too, ends with the code of its class.",
        "",
        "| code | meaning | raised as |",
        "|---|---|---|",
    ]
    raised = [
        each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.RllaunchError)
    ]
    for constant, meaning in pairwise(body):
        if (
            isinstance(constant, ast.Assign)
            and isinstance(meaning, ast.Expr)
            and isinstance(meaning.value, ast.Constant)
        ):
            code = ast.literal_eval(constant.value)
            classes = ", ".join(f"`{each.__name__}`" for each in raised if each.exit_code == code)
            lines.append(f"| {code} | {meaning.value.value} | {classes} |")
    lines += [
        "",
        "Of findings that end with several codes the doctor takes 3 before 4 before 5. Warnings and infos end with 0.",
        "With `--json` an error is data on stdout too: `ok` is false, and `findings` says why.",
    ]
    return "\n".join(lines) + "\n"


PAGES = {
    "index.md": start_page,
    "hooks.md": hooks_page,
    "rules.md": rules_page,
    "keys.md": keys_page,
    "exit-codes.md": exit_codes_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")
        print(f"docs/{name}", file=sys.stderr)
