"""Finding plugins and asking them; whatever one of them gets wrong becomes a problem with its name."""

from __future__ import annotations

import importlib
import os
import reprlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points, version
from importlib.resources.abc import Traversable
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

import pluggy

from rllaunch import builtin
from rllaunch.errors import PluginError, RllaunchError, did_you_mean, own_frame
from rllaunch.hooks import PROJECT, RunObserver, Specs

if TYPE_CHECKING:
    from rllaunch.backends.base import BackendSpec
    from rllaunch.doctor.finding import Rule
    from rllaunch.export import Exporter
    from rllaunch.resolve.detect import MachineFacts
    from rllaunch.resolve.profiles import ProfileStore
    from rllaunch.resolve.schema import LaunchConfig
    from rllaunch.resolve.user_dirs import ProfileDir

DISABLE_VARIABLE = "RLLAUNCH_DISABLE_PLUGINS"
# Code of others: one that calls sys.exit() is no reason for rllaunch to end.
_ANY_ERROR = (Exception, SystemExit)
# Profiles are chosen before the layers of plugins are asked for.
_NOT_IN_A_LAYER = ("model", "hardware", "task")


@dataclass
class PluginInfo:
    """A plugin as `rllaunch plugins` lists it; `error` is the first thing it got wrong."""

    name: str
    version: str
    module: str
    hooks: tuple[str, ...] = ()
    error: str = ""

    @property
    def label(self) -> str:
        """Name and version as origins show it; rllaunch's own profiles are rllaunch's."""
        return f"{self.name.partition(':')[0]} {self.version}"


@dataclass
class Plugins:
    """All plugins of this installation, behind one typed method a hook. They are asked in the order of their names."""

    manager: pluggy.PluginManager
    infos: dict[str, PluginInfo]
    problems: list[PluginError] = field(default_factory=list)
    profile_dirs: tuple[ProfileDir, ...] = ()
    """Folders of the user's own profiles; what plugins bring comes before."""
    _store: ProfileStore | None = None

    def check(self, commands: Collection[str] = ()) -> None:
        """Ask every hook that needs no run, so that `problems` and `infos` hold what is wrong with any plugin.

        Args:
            commands: names of the built-in commands, which no plugin may take.
        """
        import typer

        self._check_profiles()
        self.rules()
        for side in ("trainer", "rollout"):
            self.backends(side)
        self.exporters()
        self.add_commands(typer.Typer(), commands)

    def profiles(self) -> ProfileStore:
        """Every profile of every plugin, then the user's own; read once."""
        if self._store is None:
            from rllaunch.resolve.profiles import Profile, ProfileStore

            store = self._store = ProfileStore()
            hook = "rllaunch_profile_dirs"
            for info, dirs in self._ask(hook):
                for directory in self._items(info, hook, dirs, _is_directory, "a list of paths"):
                    before = len(store.problems)
                    path = Path(directory) if isinstance(directory, os.PathLike) else directory
                    store.add_directory(path, info.label)
                    _mark_broken(info, store.problems[before:])
            hook = "rllaunch_profiles"
            for info, profiles in self._ask(hook):
                for profile in self._items(info, hook, profiles, _is_a(Profile, "name"), "a list of profiles"):
                    before = len(store.problems)
                    store.add(replace(profile, plugin=info.label))
                    _mark_broken(info, store.problems[before:])
            for own in self.profile_dirs:
                store.add_user_dir(own)
            # Their profiles are missing: who asks for one is told why.
            store.missing = ["   ".join((problem.what, *problem.where[-1:])) for problem in self.problems]
        return self._store

    def _check_profiles(self) -> None:
        """Hold the keys of guests' profiles against the schema; a launch does so with those it takes."""
        from rllaunch.resolve.profile_keys import mistaken_keys

        guests = {i.label: i for i in self.infos.values() if i.label != self.infos[PROJECT].label}
        for profile in self.profiles().profiles:
            if info := guests.get(profile.plugin):
                for mistake in mistaken_keys(profile):
                    whose = f"{profile.kind} profile {profile.name!r} of plugin {info.label}"
                    self._blame(info, f"{whose} cannot be used: {mistake.what}", mistake.where, mistake.fix)

    def layers(self, model: str, hardware: str) -> list[tuple[PluginInfo, Mapping[str, Any]]]:
        """What plugins set for this pair; a layer the schema would refuse is a problem and left out whole."""
        answers = []
        for info, layer in self._ask("rllaunch_layers", model=model, hardware=hardware):
            if expected := _mistake_in_layer(layer):
                self._nonsense(info, "rllaunch_layers", layer, expected)
            elif layer:
                answers.append((info, layer))
        return answers

    def rules(self) -> list[Rule]:
        """Rules of all plugins, the built-in ones first, each marked with its plugin.

        Rules whose code is taken are among them: the doctor has the word on that.
        """
        from rllaunch.doctor.finding import Rule

        found: list[Rule] = []
        owner: dict[str, str] = {}
        for info, rules in self._ask("rllaunch_rules"):
            for rule in self._items(info, "rllaunch_rules", rules, _is_a(Rule, "code"), "a list of rules"):
                if owner.setdefault(rule.code, info.name) != info.name:
                    info.error = info.error or f"rule code {rule.code} is taken by {self.infos[owner[rule.code]].label}"
                found.append(replace(rule, plugin=info.label))
        return found

    def backends(self, side: str) -> dict[str, BackendSpec]:
        """Backends of the `trainer` or the `rollout` side, by name."""
        from rllaunch.backends.base import BackendSpec

        specs = self._by_name(f"rllaunch_{side}_backends", BackendSpec, f"{side} backend name", "backend")
        return {name: spec for name, (_, spec) in specs.items()}

    def exporters(self) -> dict[str, tuple[PluginInfo, Exporter]]:
        """Targets of `rllaunch export` by name, each with the plugin that brings it."""
        from rllaunch.export import Exporter

        return self._by_name("rllaunch_exporters", Exporter, "export target", "target")

    def _by_name(self, hook: str, kind: type[Any], what: str, short: str) -> dict[str, tuple[PluginInfo, Any]]:
        """What a hook brings, each under its name with the first plugin that has it; every further one is blamed."""
        found: dict[str, tuple[PluginInfo, Any]] = {}
        for info, items in self._ask(hook):
            for item in self._items(info, hook, items, _is_a(kind, "name"), f"a list of {kind.__name__}"):
                if item.name in found:
                    self._blame(
                        info,
                        f"{what} {item.name!r} is taken by {found[item.name][0].label}",
                        info.label,
                        f"give the {short} another name, or uninstall one of the two plugins",
                    )
                    continue
                found[item.name] = (info, item)
        return found

    def observers(self, config: LaunchConfig, run_dir: Path) -> list[tuple[PluginInfo, RunObserver]]:
        hook = "rllaunch_run_observers"
        return [
            (info, observer)
            for info, observers in self._ask(hook, config=config, run_dir=run_dir)
            for observer in self._items(info, hook, observers, _is_observer, "a list of RunObserver")
        ]

    def add_commands(self, app: Any, taken: Collection[str] = ()) -> None:
        """Add the commands of all plugins to a Typer app; all of a plugin's or, where one is wrong, none.

        Args:
            taken: names that are others' already.
        """
        import typer

        hook = "rllaunch_commands"
        owner = dict.fromkeys(taken, self.infos[PROJECT].label)
        for impl in self._impls(hook):
            # Each plugin fills an app of its own first: whatever it does to it stays there.
            own = typer.Typer()
            own.callback()(lambda: None)
            for info, _ in self._call(impl, hook, {"app": own}):
                try:
                    names: list[str] = list(getattr(typer.main.get_command(own), "commands", {}))
                except _ANY_ERROR as err:
                    self._failed(info, hook, err)
                    continue
                if clash := next((name for name in names if name in owner), ""):
                    self._blame(
                        info,
                        f"command {clash!r} of plugin {info.label} is taken by {owner[clash]}",
                        info.module,
                        "none of its commands is there; give it another name, or uninstall one of the two plugins",
                    )
                    continue
                owner |= dict.fromkeys(names, info.label)
                app.registered_commands += own.registered_commands
                app.registered_groups += own.registered_groups

    def detect_hardware(self, machine: MachineFacts) -> str | None:
        hook = "rllaunch_detect_hardware"
        known = {n.casefold() for p in self.profiles().of_kind("hardware") for n in (p.name, *p.aliases)}
        for info, answer in self._ask(hook, machine=machine):
            if isinstance(answer, str) and answer.casefold() in known:
                return answer
            if answer is not None:
                self._nonsense(info, hook, answer, "the name of a hardware profile, or None")
        from rllaunch.resolve.detect import match_hardware

        return match_hardware(machine, self.profiles().detect_table())

    def _ask(self, hook: str, **arguments: Any) -> Iterator[tuple[PluginInfo, Any]]:
        """Each plugin's own answer, so that one that raises is named and the others still count."""
        for impl in self._impls(hook):
            yield from self._call(impl, hook, arguments)

    def _impls(self, hook: str) -> list[pluggy.HookImpl]:
        """In the order of `infos`, rllaunch first: no `tryfirst` or `trylast` takes a built-in's names."""
        order = {name: place for place, name in enumerate(self.infos)}
        impls: list[pluggy.HookImpl] = getattr(self.manager.hook, hook).get_hookimpls()
        return sorted(impls, key=lambda impl: order[impl.plugin_name])

    def _call(self, impl: pluggy.HookImpl, hook: str, arguments: Mapping[str, Any]) -> Iterator[tuple[PluginInfo, Any]]:
        """One plugin and its answer, or nothing where it raises."""
        info = self.infos[impl.plugin_name]
        wanted = {name: arguments[name] for name in impl.argnames if name in arguments}
        try:
            with redirect_stdout(sys.stderr):  # what it prints is no part of a command's data
                answer = impl.function(**wanted)
        except _ANY_ERROR as err:
            self._failed(info, hook, err)
            return
        yield info, answer

    def _items(
        self, info: PluginInfo, hook: str, answer: Any, is_good: Callable[[Any], bool], expected: str
    ) -> Iterable[Any]:
        if not isinstance(answer, Sequence) or isinstance(answer, (str, bytes)):
            self._nonsense(info, hook, answer, expected)
            return []
        good = []
        for item in answer:
            if is_good(item):
                good.append(item)
            else:
                self._nonsense(info, hook, answer, f"{expected}; {reprlib.repr(item)} is none")
        return good

    def _failed(self, info: PluginInfo, hook: str, error: BaseException) -> None:
        text = f"failed in {hook}: {_told(error)}"
        where = (info.module, _place_of(error))
        self._blame(info, f"plugin {info.label} {text}", where, _way_out(info))

    def _nonsense(self, info: PluginInfo, hook: str, answer: Any, expected: str) -> None:
        self._blame(
            info,
            f"plugin {info.label} answered {hook} with {reprlib.repr(answer)}",
            info.module,
            f"the hook returns {expected}; {_way_out(info)}",
        )

    def _blame(self, info: PluginInfo, what: str, where: str | Sequence[str], fix: str) -> None:
        self.problems.append(PluginError(what, where, fix))
        info.error = info.error or what.removeprefix(f"plugin {info.label} ")


def load_plugins(extra: Iterable[tuple[str, object]] = (), profile_dirs: Sequence[ProfileDir] = ()) -> Plugins:
    """The built-in plugin and every installed one; `extra` are (name, plugin) pairs, for tests.

    `RLLAUNCH_DISABLE_PLUGINS` (names as `rllaunch plugins` lists them, separated by commas) leaves plugins out.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Specs)
    plugins = Plugins(manager, {}, profile_dirs=tuple(profile_dirs))
    _register(plugins, PluginInfo(PROJECT, version(PROJECT), builtin.__name__), lambda: builtin)
    disabled = {n.strip() for n in os.environ.get(DISABLE_VARIABLE, "").split(",") if n.strip()}
    found: dict[str, PluginInfo] = {}
    for entry in sorted(entry_points(group=PROJECT), key=lambda e: (_distribution(e)[0] != PROJECT, e.name, e.value)):
        distribution, its_version = _distribution(entry)
        # A name two distributions chose stays with the first; the other goes by its distribution's too.
        is_taken = distribution == PROJECT or entry.name in (PROJECT, *found)
        name = f"{distribution}:{entry.name}" if is_taken else entry.name
        if name in found:
            continue
        info = found[name] = PluginInfo(name, its_version, entry.value)
        if name not in disabled:
            _register(plugins, info, entry.load)
    for name, plugin in extra:
        module = getattr(plugin, "__name__", type(plugin).__name__)
        _register(plugins, PluginInfo(name, "test", module), _giving(plugin))
    for name in sorted(disabled - set(found)):
        hint = did_you_mean(name, found, "can be left out")
        plugins.problems.append(PluginError(f"{DISABLE_VARIABLE} names {name!r}, which is no plugin", "", hint))
    return plugins


def _distribution(entry: EntryPoint) -> tuple[str, str]:
    """Name and version of what an entry point belongs to; `?` where its metadata cannot be read."""
    try:
        assert entry.dist is not None, "installed entry points have one"
        return entry.dist.name or "?", entry.dist.version or "?"
    except Exception:
        return "?", "?"


def _register(plugins: Plugins, info: PluginInfo, load: Callable[[], object]) -> None:
    assert info.name not in plugins.infos, f"two plugins go by the name {info.name}"
    plugins.infos[info.name] = info
    manager, plugin = plugins.manager, None
    try:
        with redirect_stdout(sys.stderr):  # what its module prints is no part of a command's data
            plugin = load()
        manager.register(plugin, info.name)
        info.hooks = _checked_hooks(manager, plugin)
    except _ANY_ERROR as err:
        info.error = err.what if isinstance(err, PluginError) else _told(err)
        if plugin is not None and manager.get_plugin(info.name) is plugin:
            manager.unregister(name=info.name)
        plugins.problems.append(
            PluginError(
                f"plugin {info.label} cannot be used: {info.error}",
                (f"entry point {info.module}", "" if isinstance(err, PluginError) else _place_of(err)),
                _way_out(info),
            )
        )


def _told(error: BaseException) -> str:
    """Kind and words of an error; a SyntaxError's place is told beside."""
    words = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {words}"


def _place_of(error: BaseException) -> str:
    """`file:line` of the plugin's that an error came from; empty where no file of another's took part."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    ours = tuple(f"{Path(module.__file__ or '').parent}{os.sep}" for module in (pluggy, builtin, importlib))
    frames = [f for f in extract_tb(error.__traceback__) if not f.filename.startswith(("<frozen ", *ours))]
    if not frames:
        return ""
    last = own_frame(frames, Path(frames[0].filename).parent)
    return f"{last.filename}:{last.lineno}"


def _way_out(info: PluginInfo) -> str:
    without = f"{DISABLE_VARIABLE}={info.name}"
    return f"correct it if it is yours; else update or uninstall it, or leave it out with {without}"


def _checked_hooks(manager: pluggy.PluginManager, plugin: object) -> tuple[str, ...]:
    """The hooks a registered plugin implements, without their prefix.

    Raises:
        PluginError: one of them does not exist or is a wrapper, or there is none.
    """
    hooks = []
    known = [name for name in vars(Specs) if name.startswith(f"{PROJECT}_")]
    for caller in manager.get_hookcallers(plugin) or []:
        impl = next(i for i in caller.get_hookimpls() if i.plugin is plugin)
        if impl.wrapper or impl.hookwrapper:
            raise PluginError(f"{caller.name} is a wrapper: each plugin answers for itself")
        if caller.has_spec():
            hooks.append(caller.name.removeprefix(f"{PROJECT}_"))
        elif not impl.optionalhook:
            raise PluginError(f"there is no hook {caller.name}: {did_you_mean(caller.name, known)}")
    if not hooks:
        raise PluginError("it implements no hook: mark its functions with @rllaunch.hooks.hookimpl")
    return tuple(sorted(hooks))


def _giving(plugin: object) -> Callable[[], object]:
    return lambda: plugin


def _mark_broken(info: PluginInfo, problems: Sequence[RllaunchError]) -> None:
    if problems:
        info.error = info.error or problems[0].what


def _is_a(kind: type, name: str) -> Callable[[Any], bool]:
    """Whether something is of a kind, and named by a text."""
    return lambda item: isinstance(item, kind) and isinstance(getattr(item, name), str)


def _is_directory(item: Any) -> bool:
    return isinstance(item, (os.PathLike, Traversable))


def _is_observer(item: Any) -> bool:
    moments = [name for name in vars(RunObserver) if name.startswith("on_")]
    return not isinstance(item, type) and any(callable(getattr(item, name, None)) for name in moments)


def _mistake_in_layer(layer: Any) -> str:
    """What a plugin's layer should have been; empty where it can be used."""
    is_nested = isinstance(layer, Mapping) and all(isinstance(values, Mapping) for values in layer.values())
    if not is_nested or not all(isinstance(key, str) for table in (layer, *layer.values()) for key in table):
        return "a mapping {section: {key: value}}"
    from pydantic import ValidationError

    from rllaunch.resolve.schema import LaunchConfig

    for section in _NOT_IN_A_LAYER:
        if "name" in layer.get(section, {}):
            return f"no {section}.name: it is chosen before"
    try:
        LaunchConfig.model_validate(layer)
    except ValidationError as err:
        first = err.errors()[0]
        return f"what the configuration takes ({'.'.join(map(str, first['loc']))}: {first['msg']})"
    return ""
