"""Layers in, one frozen config with origins out.

    schema default < model profile < hardware profile < cell < task < --config < environment < flags

Values that follow from others (GPUs per node from the hardware, the batch from prompts and samples)
are filled in last, where no layer set them, and say what they were derived from.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from rllaunch.errors import ConfigError, UsageError, did_you_mean
from rllaunch.resolve import user_dirs
from rllaunch.resolve.checkpoint import has_weights, is_path
from rllaunch.resolve.links import reached_bytes_per_second
from rllaunch.resolve.origins import Origin, Resolved
from rllaunch.resolve.profiles import Profile, flatten
from rllaunch.resolve.schema import LaunchConfig, PassThrough, descriptions, unit_of
from rllaunch.resolve.toml_lines import key_lines, line_of, parse_toml, read_text
from rllaunch.units import parse_amount

if TYPE_CHECKING:
    from rllaunch.plugins import Plugins

ENV_PREFIX = "RLLAUNCH_"
# Stands where a plugin's label would, for a model that comes from a directory.
CHECKPOINT = "checkpoint"
# Variables of ours that are no config keys.
_OTHER_VARIABLES = {"RLLAUNCH_DISABLE_PLUGINS", "RLLAUNCH_TRACEBACK", user_dirs.VARIABLE}


@dataclass(frozen=True)
class Setting:
    """One key set by one layer. A `text` value came as a string and is parsed by the key's type."""

    key: str
    value: Any
    source: str
    text: bool = False
    fact_source: str = ""


@dataclass(frozen=True)
class Layer:
    name: str
    settings: tuple[Setting, ...]


@dataclass(frozen=True)
class Request:
    """What a user asked for: config files and flags, in the order given.

    Args:
        flags: (key, value, flag as typed); the last of a repeated key wins.
        base: settings below the config files, from a run directory that is resumed.
        profile_dirs: of `--profile-dir`, in the order given.
    """

    config_files: tuple[Path, ...] = ()
    flags: tuple[Setting, ...] = ()
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    base: Layer | None = None
    profile_dirs: tuple[Path, ...] = ()


class NoModelError(ConfigError):
    """No layer names a model, without which there is no launch."""


class LayerSource(PydanticBaseSettingsSource):
    """One layer as a source of pydantic-settings: nested values, nothing parsed twice."""

    def __init__(self, settings_cls: type[BaseSettings], layer: Layer) -> None:
        super().__init__(settings_cls)
        self.layer = layer

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        nested: dict[str, Any] = {}
        for setting in self.layer.settings:
            *parents, leaf = setting.key.split(".")
            node = nested
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = setting.value
        return nested


_LAYERS: ContextVar[Sequence[Layer]] = ContextVar("layers", default=())


class _LayeredConfig(LaunchConfig):
    """`LaunchConfig` read from the layers of the current resolution, highest first."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return tuple(LayerSource(settings_cls, layer) for layer in reversed(_LAYERS.get()))


@contextmanager
def _reading(layers: Sequence[Layer]) -> Iterator[None]:
    token = _LAYERS.set(layers)
    try:
        yield
    finally:
        _LAYERS.reset(token)


def resolve(request: Request, plugins: Plugins) -> Resolved:
    """The launch a request describes.

    Raises:
        ConfigError: an unknown key or profile, a value of the wrong type, a file that cannot be read;
            with its origin and the nearest known name.
    """
    user = [
        *([request.base] if request.base else []),
        *(config_layer(path) for path in request.config_files),
        env_layer(request.environ),
        Layer("flag", tuple(typed(s) for s in request.flags)),
    ]
    profiles = _choose_profiles(user, plugins)
    layers = [*_profile_layers(profiles, plugins, user), *(_named(layer, profiles) for layer in user)]
    if not (named := _last(layers, "hardware.name")) or named.value == "auto":
        detected = Setting("hardware.name", profiles["hardware"].name, "detected on this machine")
        layers.append(Layer("derived", (detected,)))
    _check_keys(layers)
    with _reading(layers):
        try:
            config = LaunchConfig.model_validate(_LayeredConfig().model_dump())
        except ValidationError as err:
            raise _bad_value(err.errors(), layers) from None
    origins = _collect(config, layers)
    derived = _derive(config, origins)
    if derived:
        updated = config.model_dump()
        for setting in derived:
            section, _, key = setting.key.partition(".")
            updated[section][key] = setting.value
            origins[setting.key] = (*origins.get(setting.key, ()), Origin(setting.value, "derived", setting.source))
        config = LaunchConfig.model_validate(updated)
    return Resolved(config, origins, {kind: p.origin for kind, p in profiles.items()})


def _named(layer: Layer, profiles: Mapping[str, Profile]) -> Layer:
    """The layer with profiles' own names in place of aliases, and a model's directory as it is found from anywhere."""
    settings = []
    for setting in layer.settings:
        kind = setting.key.partition(".")[0]
        if setting.key in ("model.name", "hardware.name") and setting.value and setting.value != "auto":
            profile = profiles[kind]
            name = str(profile.directory) if profile.plugin == CHECKPOINT else profile.name
            setting = replace(setting, value=name)
        settings.append(setting)
    return Layer(layer.name, tuple(settings))


def config_layer(path: Path) -> Layer:
    """A `--config FILE` as a layer; relative task files in it are relative to the file."""
    text = read_text(path, "config file", "give an existing TOML file to --config")
    data, lines = parse_toml(text, str(path)), key_lines(text)
    settings = []
    for key, value in flatten(data):
        where = f"{path}:{line_of(lines, key)}"
        if key in LaunchConfig.model_fields:
            raise ConfigError(
                f"[{key}] is a section of keys, not a value or a list", where, f"write [{key}] and its keys below"
            )
        if "." not in key:
            raise ConfigError(
                f"{key!r} stands outside a section",
                where,
                _section_hint(key),
            )
        if isinstance(value, str) and is_list(field_of(key)):
            value = [value]  # one word for a list of one, as on the command line
        settings.append(Setting(key, _beside(key, value, path.parent), where))
    return Layer("config", tuple(settings))


def env_layer(environ: Mapping[str, str]) -> Layer:
    """The variables `RLLAUNCH_SECTION__KEY`; any other `RLLAUNCH_…` is a mistake worth a word."""
    settings = []
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or name in _OTHER_VARIABLES:
            continue
        section, separator, key = name.removeprefix(ENV_PREFIX).partition("__")
        if not separator:
            raise ConfigError(
                f"unknown environment variable {name}",
                "",
                "variables are RLLAUNCH_SECTION__KEY, such as RLLAUNCH_ROLLOUT__ROLLOUT_BATCH_SIZE",
            )
        dotted = f"{section.lower()}.{key.lower().replace('__', '.')}"
        if section == "ENV":
            dotted = f"env.{key}"
        settings.append(typed(Setting(dotted, environ[name], f"{name} in the environment", text=True)))
    return Layer("env", tuple(settings))


def field_of(key: str) -> FieldInfo | None:
    """The schema's field for `section.key`; None for a key that passes through or is a free fact."""
    section, _, rest = key.partition(".")
    model = _section_model(section)
    return None if model is None else model.model_fields.get(rest.partition(".")[0])


def known_keys() -> Iterator[str]:
    """Every `section.key` of the schema, in its order."""
    for section in LaunchConfig.model_fields:
        model = _section_model(section)
        assert model is not None, "every field of the config is a section"
        yield from (f"{section}.{key}" for key in model.model_fields)


def _check_keys(layers: Sequence[Layer]) -> None:
    """Raises one ConfigError for all keys that the schema does not have, each with who set it."""
    found: list[ConfigError] = []
    for setting in (setting for layer in layers for setting in layer.settings):
        try:
            check_key(setting)
        except ConfigError as err:
            found.append(err)
    if len(found) == 1:
        raise found[0]
    if found:
        told = [f"{err.what}   {' '.join(err.where)}   {err.fix}" for err in found]
        raise ConfigError(f"{len(found)} keys cannot be set", told, "correct them")


def check_key(setting: Setting) -> None:
    """Raises ConfigError, naming the nearest key, if the schema has no such key."""
    section, _, rest = setting.key.partition(".")
    model = _section_model(section)
    if model is None:
        sections = list(LaunchConfig.model_fields)
        raise ConfigError(f"unknown section [{section}]", setting.source, did_you_mean(section, sections, "sections"))
    name, _, deeper = rest.partition(".")
    if name in model.model_fields:
        if deeper and not _is_dict(model.model_fields[name]):
            raise ConfigError(f"{section}.{name} has no keys of its own", setting.source, f"set {section}.{name}")
        return
    if not rest:
        raise ConfigError(f"[{section}] is a section, not a key", setting.source, f"set {section}.KEY")
    if issubclass(model, PassThrough):
        if owner := _OWNED.get((section, name)) or _owned_by_trainer(section, name):
            raise ConfigError(f"{section}.{name} is decided by {owner}", setting.source, f"set {owner}")
        if deeper:
            raise ConfigError(f"{section}.{name} has no keys of its own", setting.source, f"set {section}.{name}")
        return
    raise ConfigError(f"unknown key {name!r} in [{section}]", setting.source, _key_hint(section, name))


# Options of a backend that follow from keys of ours: set in two places, one of them would be ignored.
_OWNED = {("sglang", "tp_size"): "rollout.rollout_num_gpus_per_engine", ("sglang", "dtype"): "rollout.dtype"}


def _owned_by_trainer(section: str, name: str) -> str:
    trainer = _section_model("trainer")
    assert trainer is not None, "the schema has a trainer"
    return f"trainer.{name}" if section == "megatron" and name in trainer.model_fields else ""


def _key_hint(section: str, name: str) -> str:
    elsewhere = [k for k in known_keys() if k.partition(".")[2] == name]
    if elsewhere:
        return f"did you mean {elsewhere[0]!r}?"
    model = _section_model(section)
    assert model is not None, "the section was checked before"
    hint = did_you_mean(name, model.model_fields, "known keys")
    if not hint.startswith("did you mean"):
        others = did_you_mean(name, [k.partition(".")[2] for k in known_keys()])
        if others.startswith("did you mean"):
            return others
    return hint


def _section_hint(key: str) -> str:
    homes = [k for k in known_keys() if k.partition(".")[2] == key]
    return f"write it under [{homes[0].partition('.')[0]}]" if homes else _no_home(key)


def _no_home(key: str) -> str:
    return did_you_mean(key, LaunchConfig.model_fields, "sections")


def _section_model(section: str) -> type[BaseModel] | None:
    info = LaunchConfig.model_fields.get(section)
    annotation = info.annotation if info else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _is_dict(info: FieldInfo) -> bool:
    return get_origin(info.annotation) is dict


def is_list(info: FieldInfo | None) -> bool:
    """Whether a key holds several values (`--flag a b`, `a,b` as text)."""
    return info is not None and get_origin(info.annotation) is tuple


def is_bool(info: FieldInfo | None) -> bool:
    return info is not None and (info.annotation is bool or bool in get_args(info.annotation))


def typed(setting: Setting) -> Setting:
    """Text as the key's type wants it: lists are split at commas, free keys read as TOML would."""
    if not setting.text or not isinstance(setting.value, str):
        return setting
    info = field_of(setting.key)
    if is_list(info):
        value: Any = [part.strip() for part in setting.value.strip("[]").split(",") if part.strip()]
        value = [v.strip("\"'") for v in value]
    elif info is None or _is_dict(info):
        value = setting.value if setting.key.startswith("env.") else free_value(setting.value)
    else:
        value = setting.value
        if value.lower() in ("none", "null", "unset") and type(None) in get_args(info.annotation):
            value = None
    return Setting(setting.key, value, setting.source, text=True)


def value_of(setting: Setting) -> Any:
    """What the schema reads a setting of one of its keys as.

    Raises:
        ConfigError: it refuses the value.
    """
    section, _, key = setting.key.partition(".")
    model = _section_model(section)
    assert model is not None, "the key is one of the schema's"
    try:
        return getattr(model.model_validate({key: setting.value}), key)
    except ValidationError as err:
        problems = [{**problem, "loc": (section, *problem["loc"])} for problem in err.errors()]
        raise _bad_value(problems, [Layer("flag", (setting,))]) from None


def free_value(text: str) -> Any:
    """A value for a key without a type: a TOML or JSON scalar or list if it reads as one, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _beside(key: str, value: Any, directory: Path | None) -> Any:
    """A task's data file that is given relative to the file naming it."""
    if key in ("task.prompt_data", "task.eval_prompt_data") and isinstance(value, str) and value and directory:
        path = Path(value)
        return str(path if path.is_absolute() else directory / path)
    return value


def _last(layers: Iterable[Layer], key: str) -> Setting | None:
    found = None
    for layer in layers:
        for setting in layer.settings:
            if setting.key == key:
                found = setting
    return found


def _choose_profiles(user: Sequence[Layer], plugins: Plugins) -> dict[str, Profile]:
    store = plugins.profiles()
    chosen: dict[str, Profile] = {}
    model = _last(user, "model.name")
    if model is None or not model.value:
        hint = "--model NAME; `rllaunch profiles list --kind model` shows what there is"
        raise NoModelError("no model is named", model.source if model else "", hint)
    chosen["model"] = _model_profile(str(model.value), model.source, plugins)
    hardware = _last(user, "hardware.name")
    name, where = (str(hardware.value), hardware.source) if hardware else ("auto", "schema default")
    if name == "auto":
        name, where = _detect(plugins, where), f"detected ({where})"
    chosen["hardware"] = store.get("hardware", name, where)
    if cell := store.cell(chosen["model"].name, chosen["hardware"].name):
        chosen["cell"] = cell
    below = [_layer(chosen[kind]) for kind in ("model", "hardware", "cell") if kind in chosen]
    task = _last([*below, *user], "task.name")
    if task and task.value and not _own_task(user):
        chosen["task"] = store.get("task", str(task.value), task.source)
    return chosen


def _own_task(user: Sequence[Layer]) -> bool:
    """Whether the user brings both prompts and reward, so that a profile's task has no say."""
    return all((s := _last(user, key)) and s.value for key in ("task.prompt_data", "task.reward"))


def _model_profile(name: str, where: str, plugins: Plugins) -> Profile:
    """A model by name, or from the `config.json` of a local directory."""
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not is_path(name):
        return plugins.profiles().get("model", name, where)
    text = read_text(file, "model configuration", "give a directory with a config.json, or a model profile's name")
    try:
        data = json.loads(text)
    except ValueError as err:
        raise ConfigError(f"{file} is not JSON: {err}", where, "use the checkpoint's own config.json") from None
    if not isinstance(data, dict) or "model_type" not in data:
        raise ConfigError(f"{file} has no model_type", where, "use the checkpoint's own config.json")
    return _checkpoint_profile(file, data)


def _checkpoint_profile(file: Path, data: Mapping[str, Any]) -> Profile:
    from rllaunch.resolve.profiles import Value

    lines = {
        m.group(1): n
        for n, line in enumerate(file.read_text().splitlines(), 1)
        if (m := re.match(r'\s*"(\w+)"\s*:', line))
    }
    values = {
        f"model.architecture.{key}": Value(value, f"{file}:{lines.get(key, 1)}", "the checkpoint's config.json")
        for key, value in data.items()
        if value is not None and not key.startswith("_")
    }
    quantisation = data.get("quantization_config")
    if isinstance(quantisation, dict) and quantisation.get("quant_method") == "fp8":
        place = f"{file}:{lines.get('quantization_config', 1)}"
        values["rollout.dtype"] = Value("fp8", place, "the checkpoint's quantization_config")
    directory = file.parent.resolve()
    if has_weights(directory):
        values["model.hf_checkpoint"] = Value(str(directory), str(file), "the checkpoint's directory")
    return Profile("model", directory.name, CHECKPOINT, str(file), values, directory=directory)


def _detect(plugins: Plugins, where: str) -> str:
    from rllaunch.resolve.detect import probe_machine

    machine = probe_machine()
    name = plugins.detect_hardware(machine)
    if name is None:
        names = ", ".join(p.name for p in plugins.profiles().of_kind("hardware"))
        seen = ", ".join(sorted(set(machine.gpu_names))) or "no GPU"
        raise ConfigError(
            f"no hardware profile recognises this machine ({seen})", where, f"--hardware NAME; known: {names}"
        )
    return name


def _layer(profile: Profile) -> Layer:
    """What a profile says, each value above those that the profiles it extends give the key."""
    names = {"model": "model profile", "hardware": "hardware profile"}
    theirs = _layer(profile.base).settings if profile.base else ()
    last = {s.key: s for s in theirs}
    # The base's last word on a key that is inherited is among the profile's own, with the base's place.
    overruled = [s for s in theirs if s.key not in profile.inherited or s is not last[s.key]]
    own = (
        Setting(
            key,
            _beside(key, v.value, profile.directory),
            f"{profile.name} ({profile.plugin}) {v.place}",
            fact_source=v.fact_source,
        )
        for key, v in profile.values.items()
    )
    return Layer(names.get(profile.kind, profile.kind), (*overruled, *own))


def _profile_layers(profiles: Mapping[str, Profile], plugins: Plugins, user: Sequence[Layer]) -> list[Layer]:
    layers = [_layer(profiles[kind]) for kind in ("model", "hardware", "cell") if kind in profiles]
    for info, values in plugins.layers(profiles["model"].name, profiles["hardware"].name):
        source = f"plugin {info.label}"
        layers.append(Layer("cell", tuple(Setting(key, value, source) for key, value in flatten(values))))
    if "task" in profiles:
        name = Setting("task.name", profiles["task"].name, profiles["task"].origin)
        settings = _layer(profiles["task"]).settings
        if (data := _last(user, "task.prompt_data")) and data.value:
            # Held-out prompts of another task say nothing about the user's own data.
            settings = tuple(s for s in settings if s.key != "task.eval_prompt_data")
        layers.append(Layer("task", (name, *settings)))
    elif _own_task(user) and not ((named := _last(user, "task.name")) and named.value):
        layers.append(Layer("task", (Setting("task.name", "", "the task is given by prompt_data and reward"),)))
    return layers


def _collect(config: LaunchConfig, layers: Sequence[Layer]) -> dict[str, tuple[Origin, ...]]:
    """Every key's origins, lowest layer first, each value as its type reads it."""
    origins: dict[str, list[Origin]] = {}
    dumped = config.model_dump(mode="json")
    defaults = LaunchConfig().model_dump(mode="json")
    for key in known_keys():
        section, _, name = key.partition(".")
        origins[key] = [Origin(defaults[section][name], "default", "schema default")]
    for layer in layers:
        for setting in layer.settings:
            given = origins.setdefault(setting.key, [])
            given.append(Origin(_as_typed(setting), layer.name, setting.source, setting.fact_source))
    for table in {key.rpartition(".")[0] for key in origins} & set(origins):
        del origins[table]  # a table's origins are those of its members
    for key, given in origins.items():
        winner = given[-1]
        given[-1] = replace(winner, value=_pick(dumped, key, winner.value))
    return {key: tuple(given) for key, given in origins.items()}


def _as_typed(setting: Setting) -> Any:
    info = field_of(setting.key)
    if isinstance(setting.value, str) and (unit := unit_of(info)):
        # The schema has read it before: it is no number, or one with its unit.
        return free_value(str(parse_amount(setting.value, unit)))
    if not setting.text or info is None or not isinstance(setting.value, str):
        return list(setting.value) if isinstance(setting.value, tuple) else setting.value
    if is_bool(info):
        return setting.value.lower() in ("1", "true", "yes", "on", "t", "y")
    return free_value(setting.value) if info.annotation is not str else setting.value


def _pick(dumped: Mapping[str, Any], key: str, default: Any) -> Any:
    node: Any = dumped
    parts = key.split(".")
    for index, part in enumerate(parts):
        if not isinstance(node, Mapping) or part not in node:
            return node.get(".".join(parts[index:]), default) if isinstance(node, Mapping) else default
        node = node[part]
    return node


def _bad_value(problems: Sequence[Mapping[str, Any]], layers: Sequence[Layer]) -> ConfigError:
    """One error for all values the schema refuses, each with who set it.

    Args:
        problems: as pydantic's `ValidationError.errors()` has them.
    """
    lines, first = [], problems[0]
    fixes = []
    for problem in problems:
        key = ".".join(str(part) for part in problem["loc"][:2])
        setting = _last(layers, key)
        value = setting.value if setting else problem["input"]
        lines.append(f"{key} = {value!r}   {setting.source if setting else 'schema default'}: {_reason(problem)}")
        if isinstance(value, str) and problem["type"] == "literal_error":
            expected = re.findall(r"'([^']+)'", problem["ctx"]["expected"])
            fixes.append(did_you_mean(value, expected, f"{key} is one of"))
    key = ".".join(str(part) for part in first["loc"][:2])
    meaning = descriptions().get(key)
    default_fix = f"{key}: {meaning}" if meaning else "correct the value"
    if unit := unit_of(field_of(key)):
        default_fix += f" A number, or one with its unit: {'512 MiB' if unit == 'B' else '55 GB/s'}."
    what = f"{key} cannot be {(_last(layers, key) or Setting(key, first['input'], '')).value!r}: {_reason(first)}"
    if len(lines) > 1:
        what = f"{len(lines)} values cannot be used"
        return ConfigError(what, lines, fixes[0] if fixes else "correct them")
    setting = _last(layers, key)
    return ConfigError(what, setting.source if setting else "", fixes[0] if fixes else default_fix)


def _reason(problem: Any) -> str:
    message: str = problem["msg"]
    return message[0].lower() + message[1:]


def _derive(config: LaunchConfig, origins: Mapping[str, tuple[Origin, ...]]) -> list[Setting]:
    """Values that follow from others, for keys that nobody set."""
    derived = []
    cluster, rollout, trainer = config.cluster, config.rollout, config.trainer

    def origin_of(key: str) -> str:
        return f"{key} ({origins[key][-1].layer}: {origins[key][-1].source})"

    hardware = config.hardware
    if hardware.host_link_bytes_per_second is None and (reached := reached_bytes_per_second(hardware.host_link)):
        derived.append(Setting("hardware.host_link_bytes_per_second", *reached))
    gpus = cluster.num_gpus_per_node
    if gpus is None:
        gpus = config.hardware.gpus_per_node
        derived.append(Setting("cluster.num_gpus_per_node", gpus, f"follows {origin_of('hardware.gpus_per_node')}"))
    if cluster.actor_num_nodes is None:
        derived.append(Setting("cluster.actor_num_nodes", cluster.num_nodes, "follows cluster.num_nodes"))
    if cluster.actor_num_gpus_per_node is None:
        derived.append(Setting("cluster.actor_num_gpus_per_node", gpus, "follows cluster.num_gpus_per_node"))
    if rollout.rollout_num_gpus is None:
        total = cluster.num_nodes * gpus
        derived.append(Setting("rollout.rollout_num_gpus", total, "colocated: num_nodes × num_gpus_per_node"))
    samples = config.num_samples
    steps, batch = trainer.num_steps_per_rollout, trainer.global_batch_size
    if steps is None:
        steps = max(1, samples // batch) if batch else 1
        source = "samples of a rollout ÷ trainer.global_batch_size" if batch else "schema: one optimizer step a rollout"
        derived.append(Setting("trainer.num_steps_per_rollout", steps, source))
    if batch is None and samples % steps == 0:
        source = "rollout_batch_size × n_samples_per_prompt ÷ num_steps_per_rollout"
        derived.append(Setting("trainer.global_batch_size", samples // steps, source))
    if trainer.backend == "megatron" and trainer.micro_batch_size is None and trainer.max_tokens_per_gpu is None:
        source = "megatron: a micro-batch of several samples where these are short; a longer one is one by itself"
        derived.append(Setting("trainer.max_tokens_per_gpu", 2048, source))
    if trainer.expert_tensor_parallel_size is None:
        source = "follows trainer.tensor_model_parallel_size"
        derived.append(Setting("trainer.expert_tensor_parallel_size", trainer.tensor_model_parallel_size, source))
    if trainer.lr_decay_iters is None and trainer.lr_decay_style != "constant":
        derived.append(
            Setting("trainer.lr_decay_iters", config.run.num_rollout * steps, "the whole run's optimizer steps")
        )
    if config.algorithm.eps_clip_high is None:
        derived.append(Setting("algorithm.eps_clip_high", config.algorithm.eps_clip, "follows algorithm.eps_clip"))
    if config.algorithm.critic_lr is None and config.has_critic:
        derived.append(Setting("algorithm.critic_lr", trainer.lr, "follows trainer.lr"))
    return derived


def find_key(name: str) -> str:
    """`section.key` for a full key, or for a bare one that only one section has.

    Raises:
        ConfigError: no such key, naming the nearest.
        UsageError: several.
    """
    keys = list(known_keys())
    name = name.lstrip("-").replace("-", "_") if name.startswith("--") else name
    if name in keys or (name.split(".")[0] in ("megatron", "sglang", "env") and "." in name):
        return name
    if name.startswith("model.architecture."):
        return name
    homes = [k for k in keys if k.partition(".")[2] == name]
    if len(homes) == 1:
        return homes[0]
    if homes:
        raise UsageError(f"{name!r} is a key of several sections", "", f"one of: {', '.join(homes)}")
    near = did_you_mean(name, [*keys, *(k.partition(".")[2] for k in keys)])
    raise ConfigError(
        f"unknown key {name!r}", "", near if near.startswith("did") else "`rllaunch resolve` lists every key"
    )
