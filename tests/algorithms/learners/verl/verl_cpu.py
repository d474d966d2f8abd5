"""A platform by which verl runs without a GPU, for tests.

verl loads it by `VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=verl_cpu VERL_ENGINE_DEVICE=cuda`, its
own way to add platforms; the engine device is what its FSDP engine registers under. Logical GPUs
come from `ray.init(num_gpus=N)`. Two functions of verl are repaired for the CPU at the end.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
import verl.utils.distributed
import verl.utils.fsdp_utils
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _nothing(*_: Any) -> None:
    pass


def _zero(*_: Any) -> int:
    return 0


class _Device(types.ModuleType):
    """torch.cpu, with the functions of torch.cuda that verl calls."""

    is_available = staticmethod(lambda: False)  # so that nobody asks for device memory
    empty_cache = ipc_collect = synchronize = set_device = staticmethod(_nothing)
    reset_peak_memory_stats = staticmethod(_nothing)
    memory_allocated = memory_reserved = staticmethod(_zero)
    max_memory_allocated = max_memory_reserved = staticmethod(_zero)
    get_device_name = staticmethod(lambda *_: "CPU")
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: torch.device("cpu"))
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))
    manual_seed = staticmethod(torch.manual_seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def mem_get_info(*_: Any) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _Device("verl_cpu_device")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, float]:
        return {"num_gpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


# verl asks for "cpu:gloo,cpu:gloo", which torch refuses.
_process_group = verl.utils.distributed.initialize_global_process_group_ray


@functools.wraps(_process_group)
def _gloo(timeout_second: float | None = None, backend: str | None = None) -> Any:
    return _process_group(timeout_second, backend or "gloo")


verl.utils.distributed.initialize_global_process_group_ray = _gloo

# A frozen model keeps its weights in pinned memory, of which there is none without a GPU.
_offload = verl.utils.fsdp_utils.CPUOffloadPolicy


def _unpinned(pin_memory: bool = True) -> Any:
    return _offload(pin_memory=False)


verl.utils.fsdp_utils.CPUOffloadPolicy = _unpinned
