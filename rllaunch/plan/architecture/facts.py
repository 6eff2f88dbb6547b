"""The facts of a `config.json`, each asked for by name: what is missing or malformed is an error, never a guess."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rllaunch.errors import ConfigError, did_you_mean

TAKE_IT_OVER = "take it from the model's config.json into [facts.architecture] of its profile"
# A multi-modal config nests the language model's facts, but these may stand outside.
SAID_OUTSIDE = ("model_type", "tie_word_embeddings", "mtp_config")


def text_facts(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those of the language model, of a multi-modal one too; what its own do not say may be said outside of them."""
    text = facts.get("text_config")
    if not isinstance(text, Mapping):
        return facts
    return {**text, **{name: facts[name] for name in SAID_OUTSIDE if text.get(name) is None and name in facts}}


class Facts:
    """A model's facts under the names of its `config.json`; a null there is as good as absent.

    Args:
        where: what an error names as the place the facts come from.
    """

    def __init__(self, facts: Mapping[str, Any], where: str = "") -> None:
        self._values = text_facts(facts)
        self._where = where
        self.model_type = self._model_type()

    def error(self, what: str, fix: str) -> ConfigError:
        return ConfigError(what, self._where, fix)

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def names(self, name: str) -> bool:
        """Whether the fact is stated, be it as null."""
        return name in self._values

    def count(self, name: str, default: int | None = None, *, also: Sequence[str] = (), minimum: int = 1) -> int:
        """A whole number; without a default the fact is required. `also`: other names it goes by."""
        for known_as in (name, *also):
            value = self._values.get(known_as)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise self.error(f"{known_as} = {value!r} is not a whole number of at least {minimum}", TAKE_IT_OVER)
            return value
        if default is None:
            raise self.missing(name)
        return default

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{name} = {value!r} is neither true nor false", TAKE_IT_OVER)
        return value

    def entries(self, name: str) -> list[Any]:
        """A list; empty if the fact is absent."""
        value = self._values.get(name)
        if value is None:
            return []
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.error(f"{name} = {value!r} is not a list", TAKE_IT_OVER)
        return list(value)

    def per_layer(self, name: str, known: Collection[Any], layers: int) -> list[Any] | None:
        """An entry for each of `layers` layers, each one of `known`; None if the fact is absent."""
        if not self.has(name):
            return None
        values = self.entries(name)
        if len(values) != layers:
            raise self.error(f"{name} has {len(values)} entries for {layers} layers", TAKE_IT_OVER)
        for value in values:
            if value not in known:
                raise self.error(f"{name} holds {value!r}", f"known: {', '.join(map(str, known))}")
        return values

    def text(self, name: str) -> str:
        value = self._values.get(name)
        if not isinstance(value, str):
            raise self.error(f"{name} = {value!r} is not a text", TAKE_IT_OVER)
        return value

    def table(self, name: str) -> Mapping[str, Any]:
        value = self._values.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(f"{name} = {value!r} is not a table", TAKE_IT_OVER)
        return value

    def missing(self, name: str) -> ConfigError:
        return self.error(f"the architecture of model_type {self.model_type!r} lacks the fact {name!r}", TAKE_IT_OVER)

    def unknown_model_type(self, known: Collection[str]) -> ConfigError:
        return self.error(f"unknown model_type {self.model_type!r}", did_you_mean(self.model_type, known, "known"))

    def _model_type(self) -> str:
        value = self._values.get("model_type")
        if not isinstance(value, str) or not value:
            raise self.error("the architecture lacks the fact 'model_type'", TAKE_IT_OVER)
        return value
