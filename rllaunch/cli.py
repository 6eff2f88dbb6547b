"""The command line. `rllaunch --help` imports no more than it prints; a command loads itself when it runs."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from rllaunch.errors import EXIT_INTERRUPTED, EXIT_RUN_FAILED, EXIT_USAGE, RllaunchError, UsageError, did_you_mean

if TYPE_CHECKING:
    from typer._click import Command, Context, HelpFormatter

# name → one line for the list; the module is rllaunch.commands.NAME, its Typer app is `app`.
COMMANDS = {
    "train": "Resolve, check, then run the training loop under Ray.",
    "plan": "Will it fit? GPU and host memory of every step.",
    "doctor": "Would it run? Every finding at once.",
    "resolve": "Show the launch: every value and the layer that decided it.",
    "explain": "Who set a key, layer by layer, and what it means.",
    "diff": "What differs between two launches, and what it does to the plan.",
    "export": "A launch as another program's command line.",
    "profiles": "Your own and what ships: list, show, new, check, detect.",
    "schema": "JSON Schema of a profile or of a --config file, for editors.",
    "plugins": "List the plugins and what each contributes; start one of your own.",
}


GROUP_OPTIONS = ("--help", "--version", "--install-completion", "--show-completion")
TRACEBACK_VARIABLE = "RLLAUNCH_TRACEBACK"


class LazyGroup(TyperGroup):
    """Commands by name, imported on use; plugins' commands after the built-in ones."""

    def list_commands(self, ctx: Context) -> list[str]:
        return [*COMMANDS, *_plugin_commands()]

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        if cmd_name in COMMANDS:
            module = import_module(f"rllaunch.commands.{cmd_name}")
            command: Command = typer.main.get_command(module.app)
            command.name = cmd_name
            return command
        return _plugin_commands().get(cmd_name)

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        rows = list(COMMANDS.items())
        rows += [(name, command.get_short_help_str(60)) for name, command in _plugin_commands().items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(self, ctx: Context, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            raise UsageError(f"unknown command {name!r}", "", did_you_mean(name, self.list_commands(ctx), "commands"))
        return super().resolve_command(ctx, args)


def _plugin_commands() -> dict[str, Command]:
    """Commands of installed plugins; none is looked for where only rllaunch itself is installed."""
    global _found
    if _found is None:
        _found = {}
        if _has_guests():
            from rllaunch.plugins import load_plugins

            app = typer.Typer(rich_markup_mode=None, add_completion=False)
            app.callback()(lambda: None)
            load_plugins().add_commands(app, taken=COMMANDS)
            group = typer.main.get_command(app)
            assert isinstance(group, TyperGroup), "an app with a callback is a group"
            _found = {name: c for name, c in group.commands.items() if name not in COMMANDS}
    return _found


_found: dict[str, Command] | None = None


def _has_guests() -> bool:
    """Whether another distribution than rllaunch has an entry point in our group.

    `importlib.metadata` knows, but its import alone would be a third of `--help`.
    """
    disabled = {name.strip() for name in os.environ.get("RLLAUNCH_DISABLE_PLUGINS", "").split(",")}
    for directory in map(Path, dict.fromkeys(sys.path)):
        for file in directory.glob("*.dist-info/entry_points.txt"):
            if file.parent.name.partition("-")[0] == "rllaunch":
                continue
            _, found, section = file.read_text(encoding="utf-8").partition("[rllaunch]")
            names = {line.partition("=")[0].strip() for line in section.partition("[")[0].splitlines() if "=" in line}
            if found and names - disabled:
                return True
    return False


app = typer.Typer(
    cls=LazyGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(show: bool) -> None:
    if show:
        from rllaunch import __version__
        from rllaunch.console import data

        data(f"rllaunch {__version__}")
        raise typer.Exit


@app.callback()
def rllaunch(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Launch colocated RL post-training of language models.

    \b
    rllaunch train --model tiny --hardware cpu     a policy learns, on this machine
    rllaunch doctor --model dsv4 --hardware GB300  would it run there?
    """


def _tell_machine(words: Sequence[str], error: RllaunchError) -> None:
    """An error as a finding on stdout, where `--json` promised data; `train` has told its own."""
    if "--json" in words and not getattr(error, "told", False):
        from rllaunch.console import data_json

        found = {"code": error.code or "RL000", "level": "error", "message": error.what}
        data_json({"ok": False, "findings": [{**found, "origins": list(error.where), "fix": error.fix}]})


def _own_mistake(error: Exception) -> None:
    """A mistake of ours in one error; who wants the traceback can have it."""
    import traceback

    from rllaunch.console import say

    frame = traceback.extract_tb(error.__traceback__)[-1]
    say(
        f"error: rllaunch itself failed: {type(error).__name__}: {error}\n"
        f"  {frame.filename}:{frame.lineno} in {frame.name}\n"
        f"hint: this is a bug; report it with the traceback that {TRACEBACK_VARIABLE}=1 shows"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the code of its kind (see `rllaunch.errors`)."""
    # What start-up makes lives until the end: looking through it for garbage was a quarter of a command's time.
    gc.set_threshold(200_000)
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        if words and words[0].startswith("--") and words[0] not in GROUP_OPTIONS:
            raise UsageError(f"{words[0]} stands before the command", "", f"rllaunch COMMAND {' '.join(words[:2])}")
        code = app(args=list(argv) if argv is not None else None, prog_name="rllaunch", standalone_mode=False)
    except RllaunchError as err:
        from rllaunch.console import say

        say(str(err))
        _tell_machine(words, err)
        sys.exit(err.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(EXIT_INTERRUPTED)
    except typer.Abort:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as err:
        # Typer's own usage errors (a bad option of a command) know how to show themselves.
        if hasattr(err, "show") and hasattr(err, "exit_code"):
            from rllaunch.console import say

            message: str = getattr(err, "format_message")()  # noqa: B009
            if type(err).__name__ == "NoArgsIsHelpError":
                say(message)
            elif message:  # an empty one has shown the help already
                say(f"error: {message[0].lower()}{message[1:].rstrip('.')}\nhint: see --help")
            else:
                err.show()
            sys.exit(EXIT_USAGE)
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        _own_mistake(err)
        sys.exit(EXIT_RUN_FAILED)
    sys.exit(code if isinstance(code, int) else 0)
