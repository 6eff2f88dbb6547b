"""`rllaunch plugins`: what is installed and what each contributes; `plugins new`: a package to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rllaunch import console
from rllaunch.cli import COMMANDS
from rllaunch.commands import command_app
from rllaunch.pipeline import plugin_findings
from rllaunch.plugins import load_plugins

app = command_app()


@app.callback(invoke_without_command=True)
def plugins(
    ctx: typer.Context, json: Annotated[bool, typer.Option("--json", help="The list as JSON.")] = False
) -> None:
    """List the plugins, their versions and what each contributes."""
    if ctx.invoked_subcommand is None:
        _list(json)


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="Of the distribution, such as rllaunch-acme.")],
    directory: Annotated[
        Path | None, typer.Option("--directory", metavar="DIR", help="Where to; ./NAME unless set.")
    ] = None,
    extends: Annotated[str, typer.Option("--extends", help="Hardware profile that the new one extends.")] = "H200",
    profile: Annotated[str, typer.Option("--profile", help="Name of the new one; made of both unless set.")] = "",
    rule: Annotated[
        str, typer.Option("--rule", help="Code of its rule, RL900 to RL999; the first free unless set.")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="The files that were written, as JSON.")] = False,
) -> None:
    """Write a package to start a plugin from: a profile, a rule, tests that pass.

    Nothing is asked and nothing is overwritten.
    """
    from rllaunch.scaffold import plan_plugin, write_new

    plan = plan_plugin(load_plugins(), name, extends=extends, profile=profile, rule=rule)
    target = directory or Path(name)
    files = write_new(target, plan.files)
    if json:
        console.data_json({"directory": str(target), "files": files, **plan.names})
        return
    for file in files:
        console.data(str(target / file))
    console.say(f"hint: where rllaunch is installed: pip install -e '{target}[test]', then pytest {target}")


def _list(json: bool) -> None:
    found = load_plugins()
    found.check(COMMANDS)
    profiles = found.profiles().profiles
    rules = found.rules()
    rows: list[dict[str, Any]] = []
    for info in found.infos.values():
        # rllaunch itself is two plugins of one label: its code, and its profiles.
        brings_profiles = {"profile_dirs", "profiles"} & set(info.hooks)
        brought = [f"{p.kind} {p.name}" for p in profiles if brings_profiles and p.plugin == info.label]
        rows.append(
            {
                "name": info.name,
                "version": info.version,
                "module": info.module,
                "hooks": list(info.hooks),
                "profiles": brought,
                "rules": [r.code for r in rules if "rules" in info.hooks and r.plugin == info.label],
                "error": info.error,
            }
        )
    findings = plugin_findings(found)
    if json:
        console.data_json({"plugins": rows, "findings": [f.to_json() for f in findings]})
        return
    table = []
    for row in rows:
        what = [f"broken: {row['error']}"] if row["error"] else []
        what += [f"hooks: {', '.join(row['hooks'])}"] if row["hooks"] else []
        what += [f"profiles: {', '.join(row['profiles'])}"] if row["profiles"] else []
        what += [f"rules: {', '.join(row['rules'])}"] if row["rules"] else []
        table.append((row["name"], row["version"], row["module"], "\n".join(what)))
    console.print_table(("plugin", "version", "module", "contributes"), table)
    for finding in findings:
        where = "".join(f"\n  {line}" for line in finding.origins)
        console.say(f"{finding.level}[{finding.code}]: {finding.message}{where}\n  hint: {finding.fix}")
