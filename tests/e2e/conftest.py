"""Whole runs, each made once a session: the same words give the same run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from launching import Run, finish, start


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """`train("--num-rollout", "3")`: a whole run of `tiny`; the same words again give the same run."""
    made: dict[tuple[str, ...], Run] = {}

    def run(*words: str) -> Run:
        if words not in made:
            directory = tmp_path_factory.mktemp("e2e")
            made[words] = finish(start(directory / "run", *words, cwd=directory), directory / "run")
        return made[words]

    return run
