"""One module a command; `LaunchCommand` gives a command the launch's flags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from rllaunch.flags import launch_flags, take_flags, take_profile_dirs, unknown_flag
from rllaunch.resolve.resolve import Request
from rllaunch.resolve.user_dirs import FLAG

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter

_REQUEST = "rllaunch.request"


def command_app() -> typer.Typer:
    return typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)


def request_of(ctx: typer.Context) -> Request:
    """What the command line asked for, as `LaunchCommand` read it."""
    request: Request = ctx.meta[_REQUEST]
    return request


class LaunchCommand(TyperCommand):
    """A command that takes the launch's flags beside its own options."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        dirs, args = take_profile_dirs(args)
        settings, files, rest = take_flags(args)
        ctx.meta[_REQUEST] = Request(tuple(files), tuple(settings), profile_dirs=tuple(dirs))
        own = [name for p in self.get_params(ctx) for name in (*p.opts, *p.secondary_opts)]
        for token in rest:
            if token == "--":
                break
            if token.startswith("--") and token.partition("=")[0] not in own:
                raise unknown_flag(token.partition("=")[0], own)
        return super().parse_args(ctx, rest)

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        with formatter.section("Layers"):
            formatter.write_dl(
                [
                    ("--config FILE", "TOML file of [section] key = value; repeatable, later files win."),
                    ("--set section.key=value", "Any key of the configuration; repeatable."),
                    ("--profile-dir DIR", "Folder of profiles of your own; repeatable. Also RLLAUNCH_PROFILE_DIR."),
                    ("--megatron-OPTION, --sglang-OPTION", "Any other option of Megatron or SGLang."),
                ]
            )
        sections: dict[str, list[tuple[str, str]]] = {}
        for flag in launch_flags().values():
            name = ", ".join((flag.name, *flag.aliases))
            name = f"{name} / --no-{flag.name[2:]}" if flag.is_bool else f"{name} {flag.metavar}"
            sections.setdefault(flag.key.partition(".")[0], []).append((name, flag.help))
        for section, rows in sections.items():
            with formatter.section(f"[{section}]"):
                formatter.write_dl(rows)

    def shell_complete(self, ctx: Context, incomplete: str) -> list[Any]:
        from typer._click.shell_completion import CompletionItem

        names = [f.name for f in launch_flags().values()]
        names += [f"--no-{f.name[2:]}" for f in launch_flags().values() if f.is_bool]
        names.append(FLAG)
        extra = [CompletionItem(n) for n in names if incomplete.startswith("-") and n.startswith(incomplete)]
        return [*super().shell_complete(ctx, incomplete), *extra]
