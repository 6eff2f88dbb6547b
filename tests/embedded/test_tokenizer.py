"""Characters to ids and back, and a checkpoint's tokenizer behind the same two methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rllaunch.backends.embedded.tokenizer import (
    CharTokenizer,
    CheckpointTokenizer,
    load_tokenizer,
    loading,
    vocabulary_of,
)
from rllaunch.errors import ConfigError, DataError
from rllaunch.resolve.schema import LaunchConfig


@given(st.text("abc01 é", max_size=20))
def test_what_is_encoded_decodes_to_itself(text: str):
    tokenizer = CharTokenizer("abc01 é")
    ids = tokenizer.encode(text)
    assert ids[0] == 1
    assert len(ids) == 1 + len(text)
    assert max(ids) < tokenizer.vocab_size == 10
    assert tokenizer.decode(ids) == text


def test_ids_are_pad_bos_eos_and_then_the_vocabulary_in_its_order():
    tokenizer = CharTokenizer("ba")
    assert tokenizer.encode("ab") == [1, 4, 3]
    assert tokenizer.pad_id == 0


def test_a_response_ends_at_its_first_end_token_and_padding_is_left_out():
    assert CharTokenizer("ab").decode([0, 3, 0, 4, 2, 3, 3]) == "ab"


def test_a_character_outside_the_vocabulary_is_named():
    with pytest.raises(DataError) as caught:
        CharTokenizer("ab").encode("a?b!")
    assert str(caught.value) == (
        "error: prompt 'a?b!' has '!', '?', which the character vocabulary lacks\n"
        "  model.vocabulary = 'ab'\n"
        'hint: add the character, or set model.vocabulary = "auto" to take those of the task'
    )


def test_a_character_that_stands_twice_in_a_vocabulary_is_named():
    with pytest.raises(DataError, match="the vocabulary names 'a' more than once"):
        CharTokenizer("aba")


def test_the_vocabulary_of_texts_has_each_character_once_in_order():
    assert vocabulary_of(["cab", "", "b a"]) == " abc"
    assert vocabulary_of([]) == ""


class Words:
    """Answers as a checkpoint's tokenizer does; a word is an id by its length."""

    def __init__(self, eos: int | None, pad: int | None) -> None:
        self.eos_token_id, self.pad_token_id = eos, pad

    def __call__(self, prompt: str) -> dict[str, list[int]]:
        return {"input_ids": [len(w) for w in prompt.split()]}

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return " ".join("x" * i for i in ids)


def test_a_checkpoints_tokenizer_ends_a_response_at_its_own_end_token():
    tokenizer = CheckpointTokenizer(Words(eos=7, pad=None))
    assert tokenizer.encode("a bb") == [1, 2]
    assert tokenizer.decode([2, 1, 7, 3]) == "xx x"


@pytest.mark.parametrize(("eos", "pad", "expected"), [(7, None, 7), (7, 0, 0), (None, None, 0), (0, 5, 5)])
def test_a_checkpoint_without_a_padding_token_pads_with_its_end_token(eos: Any, pad: Any, expected: int):
    assert CheckpointTokenizer(Words(eos, pad)).pad_id == expected


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(DataError, match="prompt ' ' has no tokens under the checkpoint's tokenizer"):
        CheckpointTokenizer(Words(7, 0)).encode(" ")


def test_a_model_with_neither_vocabulary_nor_checkpoint_has_no_tokenizer():
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(LaunchConfig(), "")
    assert str(caught.value) == (
        "error: the model has neither a character vocabulary nor a checkpoint with a tokenizer\n"
        "  model.vocabulary is empty\n"
        "  model.hf_checkpoint is empty\n"
        "hint: --set model.vocabulary=auto takes the characters of the task, --hf-checkpoint a checkpoint's tokenizer"
    )


def test_a_checkpoint_without_a_tokenizer_is_an_error_that_names_it(tmp_path: Path):
    config = LaunchConfig.model_validate({"model": {"hf_checkpoint": str(tmp_path)}})
    with pytest.raises(ConfigError, match=f"cannot load a tokenizer from {tmp_path}"):
        load_tokenizer(config, "")


def test_a_tokenizer_whose_library_is_not_installed_is_an_error_that_names_it():
    with pytest.raises(ConfigError) as caught, loading("a tokenizer", "org/model"):
        raise ImportError("it needs tiktoken\nwhich is not installed")
    assert caught.value.what == "cannot load a tokenizer from org/model: it needs tiktoken"


def test_a_vocabulary_wins_over_a_checkpoint():
    config = LaunchConfig.model_validate({"model": {"hf_checkpoint": "somewhere"}})
    assert load_tokenizer(config, "ab").encode("b") == [1, 4]
