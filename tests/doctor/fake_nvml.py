"""NVML as a module, with the answers of a machine that is not here; everything else is the real one's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml

H200_BYTES = 143771 * 2**20


class FakeNvml(ModuleType):
    """`count` GPUs that are alike.

    Args:
        used: GPU → bytes in use.
        processes: GPU → (process id, bytes or None) of whoever has memory on it.
        cut: GPUs in MIG mode.
        links_to: what its NVLinks lead to: a constant of NVML, or None without NVLink.
        cluster: last byte of the id of the fabric's cluster; None for a driver that knows no fabric.
        cuda: as the driver writes it, 13000 for 13.0.
        pcie: generation and lanes of each GPU's link; None for a driver that does not tell.
        is_coherent: the GPUs reach their CPU over NVLink-C2C.
    """

    def __init__(
        self,
        count: int = 8,
        *,
        name: str = "NVIDIA H200",
        memory_bytes: int = H200_BYTES,
        used: Mapping[int, int] | None = None,
        processes: Mapping[int, Sequence[tuple[int, int | None]]] | None = None,
        cut: Sequence[int] = (),
        links_to: int | None = pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH,
        cluster: int | None = None,
        cuda: int = 13000,
        pcie: tuple[int, int] | None = (5, 16),
        is_coherent: bool = False,
    ) -> None:
        super().__init__("pynvml")
        self.__dict__.update({k: v for k, v in vars(pynvml).items() if not k.startswith(("__", "nvml"))})
        self.nvmlMemory_v2 = pynvml.nvmlMemory_v2
        self.asked = 0
        self._answers = SimpleNamespace(**{k: v for k, v in locals().items() if k not in ("self", "__class__")})

    def nvmlInit(self) -> None:
        self.asked += 1

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return int(self._answers.count)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return int(self._answers.cuda)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return self._pcie(0)

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return self._pcie(1)

    def _pcie(self, part: int) -> int:
        if self._answers.pcie is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return int(self._answers.pcie[part])

    def nvmlDeviceGetC2cModeInfoV(self, handle: int) -> Any:
        if not self._answers.is_coherent:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(isC2cEnabled=1)

    def nvmlDeviceGetName(self, handle: int) -> str:
        return str(self._answers.name)

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle:08x}-0000-0000-0000-000000000000"

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        return SimpleNamespace(total=self._answers.memory_bytes, used=(self._answers.used or {}).get(handle, 0))

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{handle + 0x1B:02X}:00.0")

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        return [int(handle in self._answers.cut)] * 2

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=nbytes)
            for pid, nbytes in (self._answers.processes or {}).get(handle, ())
        ]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[Any]:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        return "/usr/bin/python3"

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if self._answers.links_to is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return int(link > 0)  # the first one is down

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return int(self._answers.links_to)

    def nvmlDeviceGetGpuFabricInfo(self, handle: int, info: Any) -> None:
        if self._answers.cluster is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        info._obj.state = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
        info._obj.clusterUuid[15] = self._answers.cluster
