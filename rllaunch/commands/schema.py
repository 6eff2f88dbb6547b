"""`rllaunch schema`: what a profile or a `--config` file may hold, as a JSON Schema."""

from __future__ import annotations

from typing import Annotated

import typer

from rllaunch import console
from rllaunch.commands import command_app
from rllaunch.errors import UsageError, did_you_mean

app = command_app()
FILES = ("profile", "config")


@app.command()
def schema(
    of: Annotated[str, typer.Option("--of", metavar="|".join(FILES), help="Of which file.")] = "profile",
    json: Annotated[bool, typer.Option("--json", help="It is JSON anyway.")] = False,
) -> None:
    """Print the JSON Schema of a profile's file, or of a --config file: editors complete and check with it.

    A first line `#:schema FILE` in a TOML file names its schema for Taplo and Even Better TOML;
    `rllaunch profiles new` writes both.
    """
    if of not in FILES:
        raise UsageError(f"there is no schema of {of!r}", f"--of {of}", did_you_mean(of, FILES))
    from rllaunch.resolve.json_schema import config_schema, profile_schema

    console.data_json(profile_schema() if of == "profile" else config_schema())
