"""From a checked launch to a running one: load the task, make the run directory, hand over to the driver."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllaunch.backends.base import BackendSpec
from rllaunch.errors import ConfigError, DataError, RllaunchError
from rllaunch.plan.handoff import Schedule
from rllaunch.plugins import Plugins
from rllaunch.resolve.origins import Resolved
from rllaunch.resolve.schema import LaunchConfig
from rllaunch.run.data import Prompt, load_prompts, load_reward
from rllaunch.run.record import RunDirectory


@dataclass(frozen=True)
class TaskData:
    """The prompts of a run, and what follows from them.

    Args:
        vocabulary: characters of a character tokenizer, in id order; empty for a checkpoint's tokenizer.
    """

    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    vocabulary: str


def load_task(resolved: Resolved) -> TaskData:
    """Read the prompt files and import the reward: whatever is wrong with them shows before Ray starts.

    Raises:
        DataError, ConfigError: with the line of the file, or the name that cannot be imported.
    """
    config = resolved.config

    def origin(key: str) -> str:
        found = resolved.origin(key)
        return f"{key}   {found.layer}: {found.source}"

    prompts = load_prompts(config.task.prompt_data, origin("task.prompt_data"))
    eval_prompts = []
    if config.task.eval_prompt_data:
        eval_prompts = load_prompts(config.task.eval_prompt_data, origin("task.eval_prompt_data"))
    load_reward(config.task.reward, origin("task.reward"))
    vocabulary = config.model.vocabulary
    if vocabulary == "auto":
        vocabulary = "".join(sorted({c for p in [*prompts, *eval_prompts] for c in p.text + p.label}))
    elif vocabulary:
        _check_vocabulary(config, vocabulary, prompts, eval_prompts, origin("model.vocabulary"))
    return TaskData(prompts, eval_prompts, vocabulary)


def _check_vocabulary(
    config: LaunchConfig, vocabulary: str, prompts: list[Prompt], eval_prompts: list[Prompt], where: str
) -> None:
    for path, group in ((config.task.prompt_data, prompts), (config.task.eval_prompt_data, eval_prompts)):
        for number, prompt in enumerate(group, start=1):
            if unknown := sorted(set(prompt.text) - set(vocabulary)):
                raise DataError(
                    f"prompt {number} has characters the vocabulary lacks: {''.join(unknown)!r}",
                    (path, where),
                    "--set model.vocabulary=auto takes the characters of the task",
                )


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
        "model.architecture.max_position_embeddings": config.model.architecture.get("max_position_embeddings"),
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
    run_dir: Path,
    environment: Mapping[str, str],
    launch_json: Mapping[str, Any],
    *,
    resume: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run the launch and return its summary.

    Raises:
        RllaunchError: what went wrong; the run directory holds everything up to there.
        KeyboardInterrupt: Ctrl-C or SIGTERM.
    """
    config = resolved.config
    data = load_task(resolved)
    longest = longest_prompt(config, data)
    record = RunDirectory(run_dir, complain=say)
    if resume:
        _same_vocabulary(record, data.vocabulary)
    else:
        record.create(config, dict(launch_json) | {"versions": versions()})
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
    )
    known = len(plugins.problems)
    record.observers = [(info.label, observer) for info, observer in plugins.observers(config, run_dir)]
    for problem in plugins.problems[known:]:
        say(f"warning: {problem.what}")
    summary: dict[str, Any] = {"run_dir": str(run_dir), "status": "failed"}
    try:
        with watching(config) as watcher:
            progress = run(inputs, record, watcher, say)
        summary |= {
            "status": "finished",
            "rollouts": progress.next_rollout,
            "worst_plan_ratio": progress.worst_plan_ratio,
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
    return summary


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
