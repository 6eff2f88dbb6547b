"""Finding plugins and asking them; whatever one of them gets wrong becomes a problem with its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from rllaunch import builtin
from rllaunch.errors import PluginError
from rllaunch.hooks import PROJECT, RunObserver, Specs

if TYPE_CHECKING:
    from rllaunch.backends.base import BackendSpec
    from rllaunch.doctor.finding import Rule
    from rllaunch.resolve.detect import MachineFacts
    from rllaunch.resolve.profiles import ProfileStore
    from rllaunch.resolve.schema import LaunchConfig

DISABLE_VARIABLE = "RLLAUNCH_DISABLE_PLUGINS"


@dataclass
class PluginInfo:
    """A plugin as `rllaunch plugins` lists it."""

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
    """All plugins of this installation, behind one typed method a hook."""

    manager: pluggy.PluginManager
    infos: dict[str, PluginInfo]
    problems: list[PluginError] = field(default_factory=list)
    _store: ProfileStore | None = None

    def profiles(self) -> ProfileStore:
        """Every profile of every plugin; read once."""
        if self._store is None:
            from rllaunch.resolve.profiles import Profile, ProfileStore

            self._store = ProfileStore()
            for info, dirs in self._ask("rllaunch_profile_dirs"):
                for directory in self._items(info, "rllaunch_profile_dirs", dirs, os.PathLike):
                    self._store.add_directory(directory, info.label)
            for info, profiles in self._ask("rllaunch_profiles"):
                for profile in self._items(info, "rllaunch_profiles", profiles, Profile):
                    self._store.add(profile)
        return self._store

    def layers(self, model: str, hardware: str) -> list[tuple[PluginInfo, Mapping[str, Any]]]:
        answers = []
        for info, layer in self._ask("rllaunch_layers", model=model, hardware=hardware):
            if not isinstance(layer, Mapping) or not all(isinstance(v, Mapping) for v in layer.values()):
                self._nonsense(info, "rllaunch_layers", layer, "a mapping {section: {key: value}}")
            elif layer:
                answers.append((info, layer))
        return answers

    def rules(self) -> list[Rule]:
        """Rules of all plugins, the built-in ones first, each marked with its plugin."""
        from dataclasses import replace

        from rllaunch.doctor.finding import Rule

        return [
            replace(rule, plugin=info.label)
            for info, rules in self._ask("rllaunch_rules")
            for rule in self._items(info, "rllaunch_rules", rules, Rule)
        ]

    def backends(self, side: str) -> dict[str, BackendSpec]:
        """Backends of the `trainer` or the `rollout` side, by name."""
        from rllaunch.backends.base import BackendSpec

        hook = f"rllaunch_{side}_backends"
        found: dict[str, BackendSpec] = {}
        owner: dict[str, str] = {}
        for info, specs in self._ask(hook):
            for spec in self._items(info, hook, specs, BackendSpec):
                if spec.name in found:
                    self.problems.append(
                        PluginError(
                            f"{side} backend name {spec.name!r} is taken by {owner[spec.name]}",
                            info.label,
                            "give the backend another name, or uninstall one of the two plugins",
                        )
                    )
                    continue
                found[spec.name], owner[spec.name] = spec, info.label
        return found

    def observers(self, config: LaunchConfig, run_dir: Path) -> list[tuple[PluginInfo, RunObserver]]:
        return [
            (info, observer)
            for info, observers in self._ask("rllaunch_run_observers", config=config, run_dir=run_dir)
            for observer in self._items(info, "rllaunch_run_observers", observers, object)
        ]

    def add_commands(self, app: Any) -> None:
        for _ in self._ask("rllaunch_commands", app=app):
            pass

    def detect_hardware(self, machine: MachineFacts) -> str | None:
        for info, answer in self._ask("rllaunch_detect_hardware", machine=machine):
            if isinstance(answer, str):
                return answer
            if answer is not None:
                self._nonsense(info, "rllaunch_detect_hardware", answer, "a profile name or None")
        from rllaunch.resolve.detect import match_hardware

        return match_hardware(machine, self.profiles().detect_table())

    def _ask(self, hook: str, **arguments: Any) -> list[tuple[PluginInfo, Any]]:
        """Each plugin's own answer, so that one that raises is named and the others still count."""
        answers = []
        for impl in getattr(self.manager.hook, hook).get_hookimpls():
            info = self.infos[impl.plugin_name]
            wanted = {name: arguments[name] for name in impl.argnames if name in arguments}
            try:
                answers.append((info, impl.function(**wanted)))
            except Exception as err:
                self.problems.append(
                    PluginError(
                        f"plugin {info.label} failed in {hook}: {type(err).__name__}: {err}",
                        info.module,
                        "update or uninstall the plugin",
                    )
                )
        return answers

    def _items(self, info: PluginInfo, hook: str, answer: Any, kind: type | Any) -> Iterable[Any]:
        if not isinstance(answer, Sequence) or isinstance(answer, (str, bytes)):
            self._nonsense(info, hook, answer, "a list")
            return []
        good = []
        for item in answer:
            if isinstance(item, kind):
                good.append(item)
            else:
                self._nonsense(info, hook, item, f"items of type {getattr(kind, '__name__', kind)}")
        return good

    def _nonsense(self, info: PluginInfo, hook: str, answer: Any, expected: str) -> None:
        text = repr(answer)
        self.problems.append(
            PluginError(
                f"plugin {info.label} answered {hook} with {text if len(text) < 80 else text[:77] + '…'}",
                info.module,
                f"the hook returns {expected}; update or uninstall the plugin",
            )
        )


def load_plugins(extra: Iterable[tuple[str, object]] = ()) -> Plugins:
    """The built-in plugin and every installed one; `extra` are (name, plugin) pairs, for tests.

    `RLLAUNCH_DISABLE_PLUGINS` (names separated by commas) leaves plugins out.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Specs)
    own = version("rllaunch")
    infos = {"rllaunch": PluginInfo("rllaunch", own, builtin.__name__)}
    plugins = Plugins(manager, infos)
    manager.register(builtin, "rllaunch")
    disabled = {n.strip() for n in os.environ.get(DISABLE_VARIABLE, "").split(",") if n.strip()}
    for entry in sorted(entry_points(group=PROJECT), key=lambda e: (e.dist is None or e.dist.name != PROJECT, e.name)):
        if entry.name not in disabled:
            _register_entry(plugins, entry)
    for name, plugin in extra:
        _register(plugins, PluginInfo(name, "test", type(plugin).__name__), partial(_given, plugin))
    return plugins


def _given(plugin: object) -> object:
    return plugin


def _register_entry(plugins: Plugins, entry: EntryPoint) -> None:
    distribution = entry.dist.name if entry.dist else "?"
    name = f"{distribution}:{entry.name}" if distribution == PROJECT else entry.name
    _register(plugins, PluginInfo(name, entry.dist.version if entry.dist else "?", entry.value), entry.load)


def _register(plugins: Plugins, info: PluginInfo, load: Callable[[], object]) -> None:
    plugins.infos[info.name] = info
    try:
        plugin = load()
        plugins.manager.register(plugin, info.name)
        plugins.manager.check_pending()
    except Exception as err:
        info.error = f"{type(err).__name__}: {err}"
        if plugins.manager.get_plugin(info.name) is not None:
            plugins.manager.unregister(name=info.name)
        plugins.problems.append(
            PluginError(
                f"plugin {info.label} cannot be used: {info.error}",
                f"entry point {info.module}",
                f"update or uninstall it, or leave it out with {DISABLE_VARIABLE}={info.name}",
            )
        )
        return
    hooks = [h.name for h in plugins.manager.get_hookcallers(plugin) or []]
    info.hooks = tuple(sorted(h.removeprefix("rllaunch_") for h in hooks))
