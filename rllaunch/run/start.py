"""From a checked launch to a running one: load the task, make the run directory, hand over to the driver."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rllaunch.backends.base import BackendSpec
from rllaunch.errors import ConfigError, RllaunchError
from rllaunch.plan.architecture import text_facts
from rllaunch.plan.choose import architecture_of
from rllaunch.plan.forecast import PlannedMemory
from rllaunch.plan.handoff import Schedule
from rllaunch.plan.sizes import sizes_of
from rllaunch.plugins import Plugins
from rllaunch.resolve.origins import Resolved
from rllaunch.resolve.schema import LaunchConfig
from rllaunch.run.data import TaskData
from rllaunch.run.record import RunDirectory


def longest_prompt(config: LaunchConfig, data: TaskData) -> int:
    """Tokens of the longest prompt of all.

    Raises:
        ConfigError: prompt and response together exceed what the model or the config allows.
    """
    if data.vocabulary:
        # Each character is a token, and the prompt begins with one more.
        longest = 1 + max(len(p.text) for p in [*data.prompts, *data.eval_prompts])
    else:
        from rllaunch.backends.embedded.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(config, "")
        longest = max(len(tokenizer.encode(p.text)) for p in [*data.prompts, *data.eval_prompts])
    total = longest + config.rollout.rollout_max_response_len
    limits = {
        "rollout.rollout_max_context_len": config.rollout.rollout_max_context_len,
        "model.architecture.max_position_embeddings": text_facts(config.model.architecture).get(
            "max_position_embeddings"
        ),
    }
    for key, limit in limits.items():
        if limit is not None and total > limit:
            raise ConfigError(
                f"the longest prompt has {longest} tokens, a response up to {config.rollout.rollout_max_response_len}: "
                f"{total} exceed {key} = {limit}",
                config.task.prompt_data,
                "shorten the prompts, lower --rollout-max-response-len, or raise the limit",
            )
    return longest


def start(
    plugins: Plugins,
    resolved: Resolved,
    schedule: Schedule,
    data: TaskData,
    longest: int,
    run_dir: Path,
    environment: Mapping[str, str],
    launch_json: Mapping[str, Any],
    summary: dict[str, Any],
    *,
    resume: bool,
    say: Callable[[str], None],
) -> None:
    """Run the launch and fill in its summary, however it ends.

    Raises:
        RllaunchError: what went wrong; the run directory holds everything up to there.
        KeyboardInterrupt: Ctrl-C or SIGTERM.
    """
    config = resolved.config
    record = RunDirectory(run_dir, complain=say)
    launch_json = dict(launch_json) | {"versions": versions()}
    if resume:
        _same_vocabulary(record, data.vocabulary)
        for change in record.resume(config, launch_json):
            say(f"warning: {change}: the numbers may differ from an uninterrupted run's")
        done = record.list_checkpoints()
        if done and done[-1][0] + 1 >= config.run.num_rollout and record.unfinished(done[-1][0] + 1) is None:
            summary |= {"status": "finished", "rollouts": done[-1][0] + 1}
            return
    else:
        record.create(config, launch_json)
    from rllaunch.run.display import watching
    from rllaunch.run.driver import RunInputs, run

    inputs = RunInputs(
        config=config,
        schedule=schedule,
        trainer=_backend(plugins, "trainer", config.trainer.backend),
        rollout=_backend(plugins, "rollout", config.rollout.backend),
        prompts=data.prompts,
        eval_prompts=data.eval_prompts,
        vocabulary=data.vocabulary,
        max_prompt_tokens=longest,
        environment=environment,
        resume=resume,
        plan=_plan(resolved, schedule),
    )
    known = len(plugins.problems)
    record.observers = [(info.label, observer) for info, observer in plugins.observers(config, run_dir)]
    for problem in plugins.problems[known:]:
        say(f"warning: {problem.what}")
    try:
        with watching(config, _parameters(resolved)) as watcher:
            progress = run(inputs, record, watcher, say)
        summary |= {
            "status": "finished",
            "rollouts": progress.next_rollout,
            "worst_plan_ratio": progress.worst_plan_ratio,
            "worst_plan_ratios": progress.worst_ratios,
            "plan_ratio_ranges": progress.ratio_ranges,
            **{k: v for k, v in progress.metrics.items() if k not in ("rollout_id", "seconds")},
        }
    except KeyboardInterrupt:
        summary["status"] = "interrupted"
        raise
    except RllaunchError as err:
        summary["error"] = err.what
        raise
    finally:
        record.close(summary)


def _plan(resolved: Resolved, schedule: Schedule) -> PlannedMemory | None:
    """What memory that is read from the driver is held against; the embedded backend keeps books of its own."""
    config = resolved.config
    if config.hardware.accelerator == "cpu" or "embedded" in (config.trainer.backend, config.rollout.backend):
        return None
    try:
        return PlannedMemory(schedule, sizes_of(config, architecture_of(resolved)))
    except ConfigError:
        return None  # what cannot be planned is said by the doctor


def _parameters(resolved: Resolved) -> int | None:
    """Of the model, by its architecture's facts; None where they do not say, or another checkpoint may."""
    config = resolved.config
    if config.trainer.backend == "embedded" and config.model.hf_checkpoint not in ("", config.model.name):
        return None
    try:
        return architecture_of(resolved).num_parameters
    except ConfigError:
        return None


def _same_vocabulary(record: RunDirectory, vocabulary: str) -> None:
    for _, path in record.list_checkpoints()[-1:]:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        if meta.get("vocabulary") != vocabulary:
            raise ConfigError(
                "the task's characters changed since the checkpoint was written",
                (f"then: {meta.get('vocabulary')!r}", f"now: {vocabulary!r}", str(path / "meta.json")),
                "restore the prompt files, or start a new run",
            )


def _backend(plugins: Plugins, side: str, name: str) -> BackendSpec:
    found = plugins.backends(side)
    assert name in found, "the doctor refuses backends nobody brings"
    return found[name]


def versions() -> dict[str, str]:
    """Versions of what decides a run's numbers."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("rllaunch", "torch", "ray", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
