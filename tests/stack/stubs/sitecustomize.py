"""Import stubs for running SGLang where its CUDA kernels have no wheel: on `PYTHONPATH` of these tests only.

SGLang imports `sgl_kernel`, `torchvision` and `vllm._custom_ops` whether it uses them or not. A stub is importable and gives
any name; calling what it gives is an error, so a test that needs a kernel fails instead of computing something else.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

# vLLM's own name stays unimportable beyond this one module: SGLang asks whether the rest is there.
STUBBED = ("sgl_kernel", "torchvision", "vllm", "vllm._custom_ops")


class Absent:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        raise RuntimeError(f"{self._name} is an import stub; this machine has no such kernel")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")


class StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class StubFinder:
    """Finds what `STUBBED` names, and what lies below the first two."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in STUBBED or name.split(".")[0] in STUBBED[:2]:
            return importlib.machinery.ModuleSpec(name, StubFinder, is_package=True)  # type: ignore[arg-type]
        return None

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = StubModule(spec.name)
        module.__dict__["__version__"] = "0.0"
        return module

    @staticmethod
    def exec_module(module: types.ModuleType) -> None: ...


# Last: where the real ones are installed they are found first.
sys.meta_path.append(StubFinder)  # type: ignore[arg-type]
