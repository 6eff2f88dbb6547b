"""The way a launch goes: resolve → plan → doctor → run; each command stops one stage further."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rllaunch.doctor.engine import RANK, diagnose
from rllaunch.doctor.finding import Finding, Level
from rllaunch.errors import RllaunchError, ScheduleError, did_you_mean
from rllaunch.flags import command_of
from rllaunch.plan.handoff import Schedule, build_schedule, check, options_of
from rllaunch.plugins import Plugins, load_plugins
from rllaunch.resolve.origins import Resolved
from rllaunch.resolve.resolve import Request, resolve
from rllaunch.resolve.schema import LaunchConfig
from rllaunch.resolve.secrets import FREE_SECTIONS, HIDDEN, is_secret
from rllaunch.resolve.user_dirs import FLAG, profile_dirs

# What every process of a run gets unless the user's environment or the config says otherwise.
PROCESS_ENV = {
    # More threads than cores spin against each other; the backends set their own count.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


# Found by a look at the launch alone, and errors only where it would start: a plan or a rehearsal can be had of it.
_REFUSED_AT_START = ("RL508", "RL512", "RL513")


def soundness(findings: Sequence[Finding]) -> str:
    """What a launch without errors is called that nobody starts."""
    refused = ", ".join(f.code for f in findings if f.level == "warning" and f.code in _REFUSED_AT_START)
    return "the configuration is sound" + (f", but `rllaunch train` refuses it ({refused})" if refused else "")


def only_here(looked: Sequence[Finding], alone: Sequence[Finding]) -> list[Finding]:
    """Errors that only a look at this machine shows, of a launch that is sound: on another it may start.

    Args:
        looked: findings of the launch and the machine.
        alone: findings of the launch alone.
    """
    refused_anywhere = {f.code for f in alone} & set(_REFUSED_AT_START)
    return [f for f in looked if f.level == "error" and f.code not in refused_anywhere]


@dataclass(frozen=True)
class Launch:
    """A resolved launch and what is needed to judge and start it."""

    plugins: Plugins
    resolved: Resolved

    @property
    def config(self) -> LaunchConfig:
        return self.resolved.config

    def decided(self) -> Launch:
        """The launch one stage further: what it leaves to `auto`, taken by the memory plan and kept in its config."""
        from rllaunch.plan.choose import decided

        return replace(self, resolved=decided(self.resolved))

    def schedule(self) -> Schedule:
        """The launch's schedule, held against the invariants once more: what runs is what was proved.

        Raises:
            ScheduleError: there is none, or it is not safe.
        """
        schedule = build_schedule(options_of(self.config))
        if problems := check(schedule):
            raise ScheduleError("the handoff schedule is not safe", problems, "report this: the builder is wrong")
        return schedule

    def findings(self, *, probe: bool, gpu_test: bool = False) -> list[Finding]:
        """All findings: plugins and profiles that cannot be used, then every rule's."""
        rules = self.plugins.rules()
        backends = [f for side in ("trainer", "rollout") for f in self._backend_findings(side, probe)]
        found = [*plugin_findings(self.plugins), *backends, *self._model_findings(probe)]
        found += diagnose(self.resolved, rules, probe=probe, gpu_test=gpu_test)
        return sorted(found, key=lambda f: (RANK[f.level], f.code))

    def task_findings(self) -> list[Finding]:
        """What is wrong with prompts and reward: reads the files and imports the reward's module."""
        config = self.config
        if not (config.task.prompt_data and Path(config.task.prompt_data).exists() and ":" in config.task.reward):
            return []  # other rules speak of these
        from rllaunch.backends.embedded.tokenizer import load_tokenizer
        from rllaunch.run.data import load_task
        from rllaunch.run.start import longest_prompt

        try:
            data = load_task(self.resolved)
            if data.vocabulary:
                longest_prompt(config, data)
            elif not config.model.hf_checkpoint:
                load_tokenizer(config, "")
        except RllaunchError as err:
            return [Finding("RL340", "error", err.what, err.where, err.fix)]
        fix = 'name what the reward compares with "label"'
        return [Finding("RL340", "warning", warning, (), fix) for warning in data.warnings]

    def _backend_findings(self, side: str, probe: bool) -> list[Finding]:
        """A backend that nobody brings, or that this version cannot run yet."""
        known, key = self.plugins.backends(side), f"{side}.backend"
        name, where = self.resolved.value(key), (self.resolved.describe(key),)
        if name not in known:
            text = f"no plugin brings a {side} backend {name!r}"
            return [Finding("RL337", "error", text, where, did_you_mean(name, known))]
        if not known[name].target:
            text = f"this version of rllaunch resolves, checks and dry-runs {name} launches; it cannot start them yet"
            fix = "--dry-run shows what it would start, `rllaunch plan` whether it would fit"
            return [Finding("RL508", "error" if probe else "warning", text, where, fix)]
        return []

    def _model_findings(self, probe: bool) -> list[Finding]:
        """What the chosen pair plans and does not run yet, known before any process starts: a model that is not built,
        and engines that an update would fill with rubbish."""
        found: list[Finding] = []
        facts = self.config.model.architecture
        is_megatron = self.config.trainer.backend == "megatron"
        level: Level = "error" if probe else "warning"
        from rllaunch.backends import block_fp8
        from rllaunch.backends.megatron import served, shape

        if is_megatron and "model_type" in facts and (refusal := shape.refusal_of(facts)) is not None:
            text = f"{self.config.model.name} can be planned, checked and rehearsed, not trained yet: {refusal.what}"
            origin = self.resolved.describe("model.architecture.model_type")
            found.append(Finding("RL512", level, text, (origin,), refusal.fix))
        elif (refusal := served.refusal_of(self.config)) is not None:
            text = f"{self.config.model.name} cannot be trained so: {refusal.what}"
            found.append(Finding("RL512", level, text, tuple(map(self._with_place, refusal.where)), refusal.fix))
        if (refusal := block_fp8.refusal_of(self.config)) is not None:
            where = tuple(map(self._with_place, refusal.where))
            found.append(Finding("RL513", level, refusal.what, where, refusal.fix))
        return found

    def _with_place(self, line: str) -> str:
        """A line of an error that begins with a key, with where its value came from; others as they are."""
        key = line.partition(" = ")[0]
        return self.resolved.describe(key) if key in self.resolved.origins else line

    def command(self) -> list[str]:
        """The explicit command: every key that some layer set to other than its default, as a flag.

        Facts of the named model and hardware and the files of the named task are left out: their profiles
        give them again.
        """
        default = LaunchConfig().model_dump(mode="json")
        values: dict[str, Any] = {"model.name": self.config.model.name, "hardware.name": self.config.hardware.name}
        for key, origins in self.resolved.origins.items():
            section, _, name = key.partition(".")
            if section == "hardware" or key.startswith("model.architecture") or key in values:
                continue
            last, below = origins[-1], origins[:-1]
            # A value equal to the schema's default still says something where it overrules a profile.
            differs = last.value != default[section].get(name) or any(o.value != last.value for o in below)
            if last.layer not in ("default", "derived", "task") and differs:
                values[key] = HIDDEN if is_secret(key, last.value) else last.value
        return ["rllaunch", "train", *self.profile_dir_flags, *command_of(values)]

    @property
    def profile_dir_flags(self) -> list[str]:
        """The folders that were named on the command line, as flags: without them its profiles are not found again."""
        return [word for d in self.plugins.profile_dirs if d.origin == FLAG for word in (FLAG, str(d.path))]

    def environment(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Variables for the processes of the run; one that the user's environment has wins."""
        wanted = dict(PROCESS_ENV) | {k: str(v) for k, v in (self.config.env.model_extra or {}).items()}
        return {name: environ.get(name, value) for name, value in wanted.items()}


def launch(request: Request) -> Launch:
    """Resolve a request with the plugins of this installation."""
    plugins = plugins_of(request)
    return Launch(plugins, resolve(request, plugins))


def plugins_of(request: Request) -> Plugins:
    """The plugins of this installation, and the user's own profiles that the request can see."""
    return load_plugins(profile_dirs=profile_dirs(request.profile_dirs, request.environ))


def plugin_findings(plugins: Plugins) -> list[Finding]:
    """What plugins and profiles got wrong.

    A broken guest is a warning: no reason not to run what does not need it. rllaunch's own is an error.
    """
    problems: Sequence[RllaunchError] = [*plugins.problems, *plugins.profiles().problems]
    unique = {str(p): p for p in problems}
    own = f"plugin {plugins.infos['rllaunch'].label} "
    return [
        Finding("RL010", "error" if p.what.startswith(own) else "warning", p.what, p.where, p.fix)
        for p in unique.values()
    ]


def resolved_json(launch: Launch) -> dict[str, Any]:
    """What `resolve --json` prints; secrets, which the doctor refuses, are not shown here either."""
    config = launch.config.model_dump(mode="json")
    for section in FREE_SECTIONS:
        config[section] = {k: HIDDEN if is_secret(f"{section}.{k}", v) else v for k, v in config[section].items()}
    origins: dict[str, list[dict[str, Any]]] = {}
    for key, given in launch.resolved.origins.items():
        shown = [o.shown(key) for o in given]
        origins[key] = [{"value": o.value, "layer": o.layer, "source": o.source} for o in shown]
    return {"config": config, "origins": origins, "command": launch.command()}
