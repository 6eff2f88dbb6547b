"""What a code of the doctor stands for, as `rllaunch doctor --explain CODE` and docs/rules.md tell it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rllaunch.backends.block_fp8 import BLOCK, FIRST_TOO_NEW, OLDEST
from rllaunch.backends.megatron.shape import built_types
from rllaunch.doctor.engine import ENGINE_CODES
from rllaunch.doctor.finding import Rule
from rllaunch.doctor.profile_facts import CODES
from rllaunch.errors import UsageError, did_you_mean

# What is found before rules are asked: while plugins, backends and the task are looked up.
LAUNCH_CODES = {
    "RL010": "a plugin or a profile cannot be used",
    "RL337": "no plugin brings the backend",
    "RL340": "prompts or reward cannot be used (not with --no-probe)",
    "RL508": "a backend that this version cannot start yet",
    "RL512": "a model that the megatron trainer of this version does not build (a warning with --no-probe)",
    "RL513": "engines whose weights no update brings in the type they hold (a warning with --no-probe)",
}
_FROM, _TO = (".".join(map(str, capability)) for capability in (OLDEST, FIRST_TOO_NEW))
# Of what is found without a rule: why, and what there is to know beside it.
_TOLD: Mapping[str, tuple[str, str]] = {
    "RL001": (
        "a check that raises has said nothing of the launch; taken for passed, it would hide what it looks for",
        "The finding names the rule, its plugin and the line that failed. The other rules are asked all the same.\n\n"
        "RLLAUNCH_DISABLE_PLUGINS leaves a plugin out.",
    ),
    "RL002": (
        "--allow and --explain know a rule by its code: of two with one it would be open which is meant",
        "The first runs: rllaunch's own, then those of plugins as they were found. Codes of plugins begin at RL900.",
    ),
    "RL010": (
        "what it would have brought is missing, and the launch would be judged without it",
        "A warning where a guest is broken, for most launches do not need it; an error where rllaunch's own is.\n\n"
        "`rllaunch plugins` shows what each brings, `rllaunch profiles check` what is wrong with a profile.",
    ),
    "RL337": (
        "trainer.backend and rollout.backend name what a plugin registers: without it nothing trains or generates",
        "`rllaunch plugins` shows who brings which.",
    ),
    "RL340": (
        "a run would find it after the model has been loaded: a file without prompts, a reward that cannot be "
        "imported, a prompt that leaves the response no room",
        "Reads the files of the task, imports the reward's module and counts the tokens of the longest prompt.",
    ),
    "RL390": (
        "an allowance of nothing looks as if it were one",
        "Codes in the table of docs/rules.md with a yes can be allowed; the others stop a run for good reason.",
    ),
    "RL508": (
        "its launches are resolved, planned and checked, but nothing in this version runs them",
        "A warning where nothing would be started: `--no-probe`, `--dry-run`.",
    ),
    "RL512": (
        "the trainer builds a model of Megatron-core's layers, tensor by tensor; of a model it does not know, an "
        "update would bring the engines something else than was loaded",
        f"Model types that it builds: {', '.join(built_types())}.\n"
        "Of these, too, it refuses what Megatron-core computes otherwise (windows but gpt-oss's, biases, other kinds\n"
        "of rotary embedding); the finding names the fact. Of deepseek_v4 it builds local layers only: no Transformer\n"
        "Engine, no FP8, no LoRA.\n\n"
        "All other shipped models can be planned and checked, and `rllaunch train --rehearse` runs them in small,\non "
        "the embedded backend.",
    ),
    "RL513": (
        "an update copies tensors into the parameters that an engine has; into others than it was written for they fit "
        "as bytes, and the engine generates rubbish without an error",
        "What an update brings right:\n\n"
        "- engines in bfloat16 or float32, of a checkpoint that is not quantised;\n"
        "- engines in bfloat16 of gpt-oss's release in MXFP4, from the megatron trainer: they load nothing of it;\n"
        f"- engines in FP8 (`--rollout-dtype fp8`, from the megatron trainer) in blocks of {BLOCK} × {BLOCK}\n"
        "  with scales in float32, of a checkpoint in bfloat16 or in such blocks, on CUDA GPUs of compute\n  "
        f"capability {_FROM} and more, below {_TO} (Ada, Hopper).\n\n"
        "Not: engines of DeepSeek-V4, which no update has been held against; another quantisation; on other GPUs FP8,\n"
        "which SGLang rewrites there after loading; FP8 of gpt-oss and of models with linear attention; and with\n"
        "engines in FP8 of a bfloat16 checkpoint, or in bfloat16 of one in MXFP4, no speculation and no KV cache\n"
        "in FP8, for which an update brings nothing.",
    ),
    "RL600": ("such a profile is in no list, and a launch that names it ends with an unknown name", ""),
    "RL601": (
        "every launch with the profile would be refused for it",
        "`rllaunch schema` prints a JSON schema of profiles, with which editors check them.",
    ),
    "RL602": ("without what it extends it has half of its facts", ""),
    "RL603": (
        "without the memory of a GPU and of the host a plan has no limits, without the link no seconds",
        "An error where nothing could be planned, else a remark.",
    ),
    "RL604": (
        "a number in the wrong unit makes every plan wrong by it without a word: a rack's for a tray's, GB for GiB, "
        "both directions of a link for one",
        "Figures are held against what GPUs' makers give, and against each other.",
    ),
    "RL605": ("nobody can hold a number without a source against anything, once a plan comes out wrong", ""),
    "RL606": ("a profile is for launches; it is tried with the models or machines it is meant for", ""),
    "RL607": (
        "a plan that cannot be made says nothing of whether it fits",
        "Whether it fits is no matter of this: what a launch needs depends on its number of nodes.",
    ),
    "RL608": (
        "what every launch with the profile breaks is the profile's doing, not the user's",
        "An error where all launches that were tried break it, a warning where some do.",
    ),
    "RL609": (
        "--hardware auto takes a profile only where one alone recognises the GPUs",
        "`--hardware NAME` takes it all the same.",
    ),
}
_SECTION = re.compile(r"^(Args|Raises|Source):", re.MULTILINE)


@dataclass(frozen=True)
class Explanation:
    """A code in words.

    Args:
        rule: None for what rllaunch finds without one.
        more: paragraphs from the docstring of the rule's check; empty where it has none.
        reason: why breaking it hurts; the rule's own where there is a rule.
    """

    code: str
    name: str
    rule: Rule | None = None
    more: str = ""
    reason: str = ""

    def lines(self) -> list[str]:
        """Why, what it looks at, whether it can be allowed, and who brings it unless that is rllaunch."""
        if self.rule is None:
            return [f"why: {self.reason}", "found by: rllaunch itself, without a rule", "can be allowed: no"]
        rule = self.rule
        allowed = f"yes, `--allow {rule.code}` turns its errors into warnings" if rule.overridable else "no"
        lines = [f"why: {self.reason}", f"probes: {_probes(rule)}", f"can be allowed: {allowed}"]
        return lines if rule.plugin.split()[0] == "rllaunch" else [*lines, f"from: {rule.plugin}"]

    def text(self) -> str:
        head = "\n".join([f"{self.code}: {self.name}", *(f"  {line}" for line in self.lines())])
        return f"{head}\n\n{self.more}" if self.more else head

    def to_json(self) -> dict[str, Any]:
        rule = self.rule
        return {
            "code": self.code,
            "name": self.name,
            "reason": self.reason,
            "probes": bool(rule and rule.probes),
            "tests_gpu": bool(rule and rule.tests_gpu),
            "overridable": bool(rule and rule.overridable),
            "plugin": rule.plugin if rule else "rllaunch",
            "text": self.more,
        }


def explanations(rules: Iterable[Rule]) -> Mapping[str, Explanation]:
    """Every code there is, in order; of two rules with one code the first, which is the one that runs."""
    found = {}
    for code, name in (ENGINE_CODES | CODES | LAUNCH_CODES).items():
        reason, more = _TOLD[code]
        found[code] = Explanation(code, name, more=more, reason=reason)
    for rule in rules:
        reason = " ".join(rule.reason.split())
        found.setdefault(rule.code, Explanation(rule.code, rule.name, rule, _longer(rule), reason))
    return dict(sorted(found.items()))


def explain(code: str, rules: Iterable[Rule]) -> Explanation:
    """The code in words, in whatever case it is written.

    Raises:
        UsageError: there is no such code; it names the nearest.
    """
    known = explanations(rules)
    found = known.get(code.strip().upper())
    if found is None:
        raise UsageError(f"no rule has the code {code!r}", "--explain", did_you_mean(code, known, "codes"))
    return found


def _probes(rule: Rule) -> str:
    if rule.tests_gpu:
        return "yes, it runs a program on the GPU; only with `--gpu-test`"
    return (
        "yes, it reads this machine; not with `--no-probe`"
        if rule.probes
        else "no, it looks at the values of the launch"
    )


def _longer(rule: Rule) -> str:
    """The docstring of the check up to its sections, which are for callers."""
    doc = inspect.getdoc(rule.check) if inspect.isroutine(rule.check) else ""
    return _SECTION.split(doc or "", maxsplit=1)[0].strip()
