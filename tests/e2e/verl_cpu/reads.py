"""Recorder of the config keys that verl reads: one per process of a run, and a list of all records.

With `AGENT_RL_READS=FOLDER`, each process writes a line for every key and function that reads it. Reads that only copy,
print or check a value do not count: building a dataclass from a section, `__post_init__`, comparisons.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import hydra.utils
from omegaconf import DictConfig, OmegaConf

FOLDER = "AGENT_RL_READS"
_PATH, _SET, _EARLY = "_reads_path", "_reads_set", "_reads_early"
_PASSED_THROUGH = ("/omegaconf/", "/verl/base_config.py", "/verl_cpu/reads.py", "<frozen _collections_abc>")
_CHECKS = (
    "/verl/utils/config.py:",
    "/backends/verl/config/",
    "/backends/verl/driver/run.py:check_run",
    "/backends/verl/driver/checkpoints.py:bytes_of_parts",
    "/hydra/",
    "<string>:",
    "/verl/workers/config/actor.py:validate",
    "/verl/workers/config/critic.py:validate",
)
_COPIES = ("__post_init__", "__repr__", "__eq__", "__deepcopy__", "__reduce_ex__", "replace", "asdict", "_asdict_inner")


class Records:
    """The records of this process: lines `key<TAB>file:function`, each once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / str(os.getpid())).open("a", buffering=1)
        self._known: set[tuple[str, str]] = set()

    def add(self, key: str, reader: str) -> None:
        if (key, reader) not in self._known:
            self._known.add((key, reader))
            self._file.write(f"{key}\t{reader}\n")


def record(folder: Path) -> None:
    """Record the reads of this process from now on."""
    records = Records(folder)
    record_containers(records)
    record_dataclasses(records)


def record_containers(records: Records) -> None:
    """Record reads of OmegaConf's containers, by full key."""
    get, select = DictConfig._get_impl, OmegaConf.select

    def recorded_get(self, key, default_value, *args, **kwargs):
        if (reader := _reader()) is not None:
            records.add(self._get_full_key(key), reader)
        return get(self, key, default_value, *args, **kwargs)

    def recorded_select(cfg, key, *args, **kwargs):
        if isinstance(cfg, DictConfig) and (reader := _reader()) is not None:
            records.add(f"{cfg._get_full_key('')}.{key}".lstrip("."), reader)
        return select(cfg, key, *args, **kwargs)

    DictConfig._get_impl = recorded_get
    OmegaConf.select = staticmethod(recorded_select)


def record_dataclasses(records: Records) -> None:
    """Record reads of verl's dataclasses by the keys that they were made from; an assigned field no longer counts."""
    import verl.utils.config
    from verl.base_config import BaseConfig

    attribute, assign = BaseConfig.__getattribute__, BaseConfig.__setattr__

    def recorded_attribute(self, name):
        own = attribute(self, "__dict__")
        if name in type(self).__dataclass_fields__ and name not in own.get(_SET, ()):
            loads = type(self).__name__ == "HFModelConfig"  # it loads the model's files while it is made
            if (reader := _reader(loads)) is None:
                pass
            elif _PATH in own:
                records.add(f"{own[_PATH]}.{name}", reader)
            else:
                own.setdefault(_EARLY, set()).add((name, reader))
        return attribute(self, name)

    def recorded_assign(self, name, value):
        code = sys._getframe(1).f_code
        if name in self.__dict__ and code.co_name != "__post_init__" and code.co_filename != "<string>":
            self.__dict__.setdefault(_SET, set()).add(name)
        assign(self, name, value)

    def place(made, path, section):
        if isinstance(made, BaseConfig):
            own = attribute(made, "__dict__")
            own.setdefault(_PATH, path)
            for name, reader in own.pop(_EARLY, ()):
                records.add(f"{path}.{name}", reader)
            for name in section:
                node = section._get_node(name)
                if name in own and isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
                    place(own[name], f"{path}.{name}", node)
        return made

    def placed(make):
        def wrapped(config, *args, **kwargs):
            made = make(config, *args, **kwargs)
            return place(made, config._get_full_key(""), config) if isinstance(config, DictConfig) else made

        return wrapped

    BaseConfig.__getattribute__, BaseConfig.__setattr__ = recorded_attribute, recorded_assign
    hydra.utils.instantiate = placed(hydra.utils.instantiate)
    verl.utils.config.omega_conf_to_dataclass = placed(verl.utils.config.omega_conf_to_dataclass)


def _reader(loads: bool = False) -> str | None:
    """Return the function outside the configs' own classes that reads; None if it only copies or checks."""
    frame = sys._getframe(2)
    while frame is not None and any(part in frame.f_code.co_filename for part in _PASSED_THROUGH):
        frame = frame.f_back
    if frame is None:
        return None
    name = frame.f_code.co_name
    reader = f"{frame.f_code.co_filename}:{name}"
    if any(part in reader for part in _CHECKS) or (name in _COPIES and not (loads and name == "__post_init__")):
        return None
    while frame is not None and not loads:
        if "/hydra/_internal/instantiate" in frame.f_code.co_filename:
            return None
        frame = frame.f_back
    return reader


def merged(folders: Iterable[Path]) -> dict[str, str]:
    """Return a reader of every key that was read; verl's own functions come first."""
    found: dict[str, str] = {}
    for folder in folders:
        for file in sorted(folder.iterdir()):
            for line in file.read_text().splitlines():
                key, _, reader = line.partition("\t")
                if reader.endswith(":validate"):
                    continue
                installed = reader.rpartition("site-packages/")[2]
                reader = f"agent_rl/{reader.partition('/agent_rl/')[2]}" if installed.startswith("/") else installed
                known = found.setdefault(key, reader)
                found[key] = min(known, reader, key=lambda r: (r.startswith("agent_rl/"), r))
    return dict(sorted(found.items()))
