"""Text to token ids and back: a tokenizer of single characters, or the one of a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rllaunch.errors import ConfigError, DataError
from rllaunch.resolve.schema import LaunchConfig

_log = logging.getLogger(__name__)

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
NUM_SPECIAL = 3


class Tokenizer(Protocol):
    pad_id: int

    def encode(self, prompt: str) -> list[int]:
        """Ids of a prompt, with what the model wants before it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a response up to its end token."""
        ...


class CharTokenizer:
    """One token a character: pad 0, bos 1, eos 2, then the characters of `vocabulary` in order."""

    pad_id = PAD_ID

    def __init__(self, vocabulary: str) -> None:
        if len(set(vocabulary)) != len(vocabulary):
            twice = sorted({c for c in vocabulary if vocabulary.count(c) > 1})
            raise DataError(f"the vocabulary names {', '.join(map(repr, twice))} more than once", "model.vocabulary")
        self.vocabulary = vocabulary
        self._id_of = {character: NUM_SPECIAL + i for i, character in enumerate(vocabulary)}

    @property
    def vocab_size(self) -> int:
        return NUM_SPECIAL + len(self.vocabulary)

    def encode(self, prompt: str) -> list[int]:
        """bos and one id a character.

        Raises:
            DataError: a character is not in the vocabulary.
        """
        unknown = sorted(set(prompt) - self._id_of.keys())
        if unknown:
            raise DataError(
                f"prompt {prompt!r} has {', '.join(map(repr, unknown))}, which the character vocabulary lacks",
                f"model.vocabulary = {self.vocabulary!r}",
                'add the character, or set model.vocabulary = "auto" to take those of the task',
            )
        return [BOS_ID, *(self._id_of[character] for character in prompt)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text up to the first eos; pad and bos are left out."""
        characters = []
        for token in ids:
            if token == EOS_ID:
                break
            if token >= NUM_SPECIAL:
                characters.append(self.vocabulary[int(token) - NUM_SPECIAL])
        return "".join(characters)


class CheckpointTokenizer:
    """The tokenizer that came with a checkpoint."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        eos_id = tokenizer.eos_token_id
        self._eos_id: int | None = eos_id
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_id or 0

    def encode(self, prompt: str) -> list[int]:
        ids: list[int] = list(self._tokenizer(prompt)["input_ids"])
        if not ids:
            raise DataError(
                f"prompt {prompt!r} has no tokens under the checkpoint's tokenizer",
                "model.hf_checkpoint",
                "a checkpoint with its tokenizer, or --set model.vocabulary=auto for a model of single characters",
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        ids = [int(token) for token in ids]
        if self._eos_id in ids:
            ids = ids[: ids.index(self._eos_id)]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


def vocabulary_of(texts: Iterable[str]) -> str:
    """All characters of `texts`, each once, in the order of their code points."""
    return "".join(sorted(set().union(*texts)))


def load_tokenizer(config: LaunchConfig, vocabulary: str) -> Tokenizer:
    """The character tokenizer where there is a vocabulary, else the checkpoint's.

    Raises:
        ConfigError: there is neither, or the checkpoint has no tokenizer that loads.
    """
    if vocabulary:
        return CharTokenizer(vocabulary)
    checkpoint = config.model.hf_checkpoint
    if not checkpoint:
        raise ConfigError(
            "the model has neither a character vocabulary nor a checkpoint with a tokenizer",
            ["model.vocabulary is empty", "model.hf_checkpoint is empty"],
            "--set model.vocabulary=auto takes the characters of the task, --hf-checkpoint a checkpoint's tokenizer",
        )
    from transformers import AutoTokenizer

    with loading("a tokenizer", checkpoint):
        return CheckpointTokenizer(AutoTokenizer.from_pretrained(checkpoint))


def tokenizer_to_export(config: LaunchConfig, vocabulary: str) -> Any:
    """transformers' tokenizer of the checkpoint that training starts from, which goes with the trained weights.

    None for a character vocabulary, which transformers has no tokenizer for, and where none loads: no checkpoint is
    lost for it, and where a run samples with it that is an error.
    """
    if vocabulary or not config.model.hf_checkpoint:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(config.model.hf_checkpoint)
    except (OSError, ValueError, ImportError) as err:
        _log.warning("exports of this run have no tokenizer: %s", err)
        return None


@contextmanager
def loading(what: str, checkpoint: str) -> Iterator[None]:
    """Around calls that read a checkpoint, of a directory or of the hub.

    Raises:
        ConfigError: it cannot be had, or is not what it should be.
    """
    try:
        yield
    except (OSError, ValueError, ImportError) as err:
        why = str(err).strip().partition("\n")[0]
        raise ConfigError(
            f"cannot load {what} from {checkpoint}: {why}",
            f"model.hf_checkpoint = {checkpoint}",
            "a directory of config.json, weights and tokenizer, or a name at the hub that is in the cache or can be "
            "reached from here (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE)",
        ) from err
