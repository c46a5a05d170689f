"""The settings of a training run on either backend: a mistake in them shows before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from agent_rl.backends.verl.config.names import NAMES_ON_VERL
from agent_rl.config import load_config, setting_names
from agent_rl.engines.model_files import require_model
from agent_rl.errors import ConfigError, did_you_mean
from agent_rl.gym.env import Env
from agent_rl.gym.registry import env_ids, spec
from agent_rl.judge.config import MONEY
from agent_rl.store.shards import existing_shards

if TYPE_CHECKING:
    from agent_rl.backends.embedded.config import TrainConfig
    from agent_rl.backends.verl.config.settings import VerlConfig

BACKENDS = ("embedded", "verl")
STORED = ("episodes", "warm_start.episodes")
"""Settings that name stored episodes."""
RESUMED = {"embedded": ("steps", "device", "processes", *MONEY), "verl": ("steps", *MONEY)}
"""The settings that may change when a run is resumed."""
ON_VERL = {
    "model": "set start_from=FOLDER and renderer=NAME; what such a preset clones, freezes and rounds is not verl's",
    "freeze": "all weights are trained, or an adapter of every layer: lora.rank=16",
    "warm_start": "start_from the checkpoint of an embedded run of steps=0 that did it",
    "optimizer": "its settings are those below verl.actor_rollout_ref.actor.optim, such as clip_grad, and lr",
    "dtype": "it is verl.actor_rollout_ref.actor.fsdp_config.model_dtype, and actor_rollout_ref.rollout.dtype",
    **{ours: f"it is {theirs}" for ours, theirs in NAMES_ON_VERL.items()},
}
"""What to do on verl about settings of the embedded backend, or sections of them."""
EnvNames: TypeAlias = str | type[Env] | Sequence[str | type[Env] | Mapping[str, object]]


def training_config(
    env: EnvNames | None = None,
    *,
    backend: str | None = None,
    imports: Sequence[str | Path] = (),
    **settings: object,
) -> TrainConfig | VerlConfig:
    """Return the checked settings of a run; arguments as of `train`.

    Raises:
        ConfigError: naming the setting that is wrong, and the nearest right one.
    """
    if backend not in (None, *BACKENDS):
        raise ConfigError(f"no backend '{backend}'.{did_you_mean(backend, BACKENDS)} There are: {', '.join(BACKENDS)}")
    given = {name.rstrip("_"): value for name, value in settings.items()}
    if env is not None:
        given["env"] = id_of(env) if isinstance(env, str | type) else [*map(_member, env)]
    if imports:
        given["imports"] = [str(Path(file).resolve()) for file in imports]
    if backend == "verl" and "episodes" in given:
        raise ConfigError(
            f"episodes={given['episodes']}: learning from stored episodes is the embedded backend's; on verl, "
            "algorithm=dpo learns from pairs of its own rollouts: leave out episodes, or backend=verl"
        )
    name = given.get("env")
    if isinstance(name, str) and not given.get("imports") and "/" not in name:
        spec(name)  # a wrong one shows before the settings are composed
    if backend == "verl":
        _refuse_embedded(given)
    return load_config(f"backend/{backend or 'embedded'}", schema_of(backend), settings=given)


def _refuse_embedded(given: Mapping[str, object]) -> None:
    """Refuse, on verl, a setting that only the embedded backend has.

    Raises:
        ConfigError: with what serves instead.
    """
    known = {*setting_names(schema_of("verl")), "algorithm", "hardware"}
    if unknown := [key for key in given if key not in known]:
        theirs = {*setting_names(schema_of("embedded")), "model"}
        for key in (key for key in unknown if key in theirs):
            does = ON_VERL.get(key, ON_VERL.get(key.partition(".")[0], "there is none like it: leave it out"))
            raise ConfigError(f"{key}={given[key]} is a setting of the embedded backend. On verl, {does}.")


def require_files(given: Mapping[str, object]) -> None:
    """Check that the model and the episodes that settings name are there, before the settings are composed.

    Raises:
        CheckpointError: if `start_from` has no model.
        StoreError: if there is no file of stored episodes.
    """
    for name, require in (("start_from", require_model), *dict.fromkeys(STORED, existing_shards).items()):
        if isinstance(path := given.get(name), str):
            require(path)


def resumed_changes(backend: str, given: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that change when a run is resumed, by their full names: those that are given.

    None is not given, but for a setting of a section, as `judge.max_cost=null` lifts the limit.

    Raises:
        ConfigError: if one of them can't change, or steps are no number.
    """
    changes, free = dict[str, object](), RESUMED[backend]
    for name, value in given.items():
        if isinstance(value, Mapping):
            changes |= {f"{name}.{inner}": found for inner, found in value.items()}
        elif value is not None or "." in name:
            changes[name] = value
    if odd := ", ".join(sorted({*changes} - {*free})):
        but = ", ".join(free)
        raise ConfigError(f"{odd} can't change when a run is resumed: it keeps its own settings (but for {but})")
    steps = changes.get("steps", 0)
    if not (isinstance(steps, int) and steps >= 0):
        raise ConfigError(f"steps={steps} must be a whole number")
    return changes


def id_of(env: object) -> str:
    """Return the id of an environment, given it or its class.

    Raises:
        ConfigError: if it is not registered.
    """
    if isinstance(env, str):
        return env
    if not isinstance(env, type):
        raise ConfigError(f"env={env!r}: give the class or its id; every episode makes an instance of its own")
    found = next((id for id in env_ids() if spec(id).cls is env), None)
    if found is None:
        raise ConfigError(f"{env.__name__} is not registered: decorate it with @agent_rl.register('name-v0', ...)")
    return found


def _member(choice: str | type[Env] | Mapping[str, object]) -> object:
    return {**choice, "env": id_of(choice.get("env"))} if isinstance(choice, Mapping) else id_of(choice)


def backend_of(folder: Path) -> str:
    """Return the name of the backend that a run is on."""
    return "verl" if (folder / "verl.yaml").exists() else "embedded"


def schema_of(backend: str | None) -> type[TrainConfig] | type[VerlConfig]:
    """Return the settings of runs on a backend; None is the embedded one."""
    if backend == "verl":
        from agent_rl.backends.verl.config.settings import VerlConfig

        return VerlConfig
    from agent_rl.backends.embedded.config import TrainConfig

    return TrainConfig


def require_torch() -> None:
    """Check that [train] is installed.

    Raises:
        ConfigError: if it is not.
    """
    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            raise ConfigError(f"this needs {name}: pip install -e '.[train]' in the checkout, or make setup")


def require_verl() -> None:
    """Check that verl is installed.

    Raises:
        ConfigError: if it is not.
    """
    if find_spec("verl") is None:
        raise ConfigError(
            "backend=verl needs verl, vLLM and Ray: `make setup-verl` installs them for a machine without a GPU, "
            "pip install -e '.[verl]' for one with"
        )
