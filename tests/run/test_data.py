"""Prompt files and rewards: what is wrong with them shows before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TINY = ("train", "--model", "tiny", "--hardware", "cpu", "--run-dir", "run")


def write(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    (tmp_path / "mine.py").write_text("def score(prompt, response, label):\n    return float(response == label)\n")


GOOD = '{"prompt": "12=", "label": "21"}\n'
BROKEN = [
    (GOOD + '{"prompt": "12=" "label": 3}\n',
     "error: line 2 is not JSON: Expecting ',' delimiter: line 1 column 18 (char 17)\n  p.jsonl:2\n"
     "  task.prompt_data   flag: --data p.jsonl\n"
     'hint: each line is an object such as {"prompt": "12=", "label": "21"}\n'),
    (GOOD + "\n[1, 2]\n",
     "error: line 3 is list, not an object\n  p.jsonl:3\n  task.prompt_data   flag: --data p.jsonl\n"
     'hint: write {"prompt": …, "label": …}\n'),
    ('{"text": "12=", "label": "21"}\n',
     "error: line 1 has no \"prompt\" (keys: 'text', 'label')\n  p.jsonl:1\n  task.prompt_data   flag: --data p.jsonl\n"
     'hint: name the text "prompt"\n'),
    ('{"prompt": 12}\n',
     'error: "prompt" in line 1 is 12, not a text\n  p.jsonl:1\n  task.prompt_data   flag: --data p.jsonl\n'
     "hint: give a non-empty string\n"),
    ("\n\n",
     "error: prompt file has no prompts: p.jsonl\n  task.prompt_data   flag: --data p.jsonl\n"
     'hint: write one {"prompt": …, "label": …} a line\n'),
]  # fmt: skip


@pytest.mark.parametrize(("text", "error"), BROKEN, ids=["json", "list", "no prompt", "number", "empty"])
def test_a_broken_line_is_named_before_ray_starts(rllaunch: Any, tmp_path: Path, text: str, error: str):
    write(tmp_path, text)
    result = rllaunch(*TINY, "--data", "p.jsonl", "--reward", "mine:score")
    assert result.code == 3
    assert result.err.endswith(error)
    assert "starting Ray" not in result.err
    assert not (tmp_path / "run").exists(), "nothing is written for a run that cannot start"


def test_a_label_by_another_name_is_warned_of(rllaunch: Any, tmp_path: Path):
    write(tmp_path, '{"prompt": "1", "labl": "3"}\n{"prompt": "2", "labl": "3"}\n')
    words = ("--data", "p.jsonl", "--reward", "mine:score", "--dry-run", "--json")
    told = "no line of p.jsonl has a \"label\" for the reward; keys that are not read: 'labl'"
    findings = rllaunch(*TINY, *words).json()["findings"]
    assert [(f["code"], f["level"], f["message"]) for f in findings] == [("RL340", "warning", told)]
    write(tmp_path, '{"prompt": "1", "label": "3", "labl": ""}\n{"prompt": "2", "note": "x"}\n')
    assert rllaunch(*TINY, *words).json()["findings"] == []
    write(tmp_path, '{"prompt": "1"}\n')
    assert rllaunch(*TINY, *words).json()["findings"] == []


def test_prompts_that_no_tokenizer_reads_are_a_finding(rllaunch: Any, tmp_path: Path):
    write(tmp_path, GOOD)
    words = ("doctor", "--model", "tiny", "--hardware", "cpu", "--data", "p.jsonl", "--reward", "mine:score", "--json")
    (finding,) = rllaunch(*words, "--set", "model.vocabulary=").json()["findings"]
    assert (finding["code"], finding["level"]) == ("RL340", "error")
    assert finding["message"] == "the model has neither a character vocabulary nor a checkpoint with a tokenizer"
    assert rllaunch(*words, "--set", "model.vocabulary=auto").json()["findings"] == [], "as the hint says"


def test_a_missing_prompt_file_is_a_finding(rllaunch: Any, tmp_path: Path):
    write(tmp_path, GOOD)
    result = rllaunch(*TINY, "--data", "q.jsonl", "--reward", "mine:score")
    assert result.code == 3
    assert "schedule" not in result.out
    assert result.err == "tiny on cpu: 1 error, nothing was started\n"
    assert result.out.startswith(
        'error[RL349]: the prompt file q.jsonl does not exist\n  task.prompt_data = "q.jsonl"   flag: --data q.jsonl'
    )


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("nowhere:score", "error: reward module 'nowhere' cannot be imported: ModuleNotFoundError: No module named 'nowhere'\n"
         "  task.reward   flag: --reward nowhere:score\n"
         "hint: name an importable module; those of the current directory are found\n"),
        ("mine:skore", "error: mine has no function 'skore'\n  task.reward   flag: --reward mine:skore\nhint: it has: score\n"),
    ],
)  # fmt: skip
def test_a_reward_that_cannot_be_found_is_named(rllaunch: Any, tmp_path: Path, target: str, error: str):
    write(tmp_path, GOOD)
    result = rllaunch(*TINY, "--data", "p.jsonl", "--reward", target)
    assert result.code == 3
    assert result.err.endswith(error)


def test_prompts_too_long_for_the_model_are_told_before_the_start(rllaunch: Any, tmp_path: Path):
    write(tmp_path, '{"prompt": "' + "1" * 80 + '", "label": "1"}\n')
    result = rllaunch(*TINY, "--data", "p.jsonl", "--reward", "mine:score")
    assert result.code == 3
    assert result.err.endswith(
        "error: the longest prompt has 81 tokens, a response up to 4: 85 exceed model.architecture.max_position_embeddings = 64\n"
        "  p.jsonl\nhint: shorten the prompts, lower --rollout-max-response-len, or raise the limit\n"
    )


def test_characters_outside_a_fixed_vocabulary_are_named(rllaunch: Any, tmp_path: Path):
    write(tmp_path, GOOD + '{"prompt": "ab="}\n')
    result = rllaunch(*TINY, "--data", "p.jsonl", "--reward", "mine:score", "--set", "model.vocabulary=0123456789=")
    assert result.code == 3
    assert result.err.endswith(
        "error: prompt 2 has characters the vocabulary lacks: 'ab'\n  p.jsonl\n"
        "  model.vocabulary   flag: --set model.vocabulary=0123456789=\n"
        "hint: --set model.vocabulary=auto takes the characters of the task\n"
    )


def test_a_reward_gets_prompt_response_and_label():
    from rllaunch.run.data import Prompt, score

    seen: list[tuple[str, str, str]] = []

    def reward(prompt: str, response: str, label: str) -> int:
        seen.append((prompt, response, label))
        return 1

    assert score(reward, "mine:score", Prompt("12=", "21"), "2x") == 1.0
    assert seen == [("12=", "2x", "21")]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "one", [1.0, 2.0]])
def test_a_reward_that_is_no_finite_number_stops_with_its_prompt(value: Any):
    from rllaunch.errors import RunError
    from rllaunch.run.data import Prompt, score

    with pytest.raises(RunError) as caught:
        score(lambda *_: value, "mine:score", Prompt("12=", "21"), "2x")
    assert str(caught.value) == (
        f"error: the reward function returned {value!r}, not a finite number\n"
        "  prompt: '12='\n  response: '2x'\n  label: '21'\n  reward: mine:score\n"
        "hint: correct the function; --resume goes on from the last checkpoint, if there is one"
    )


def test_errors_survive_the_way_between_processes():
    import pickle

    from rllaunch.errors import RunError

    error = pickle.loads(pickle.dumps(RunError("what", ("a", "b"), "fix")))
    assert (error.what, error.where, error.fix) == ("what", ("a", "b"), "fix")
    assert error.exit_code == 1
