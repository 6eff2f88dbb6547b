"""`rllaunch plugins`: what is installed and what each contributes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rllaunch import console
from rllaunch.cli import COMMANDS
from rllaunch.commands import command_app
from rllaunch.pipeline import plugin_findings
from rllaunch.plugins import load_plugins

app = command_app()


@app.command()
def plugins(json: Annotated[bool, typer.Option("--json", help="The list as JSON.")] = False) -> None:
    """List the plugins, their versions and what each contributes."""
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
