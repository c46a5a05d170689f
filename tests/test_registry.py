"""agent_rl.gym.registry: ids, versions, collisions, plugins, user files."""

import importlib.metadata
import pkgutil
import subprocess
import sys
import types

import pytest

from agent_rl import envs, registries
from agent_rl.errors import ConfigError, DefinitionError, NameCollisionError, UnknownEnvError
from agent_rl.gym import registry
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env
from agent_rl.gym.registry import env_ids, load_file, make, register, spec
from agent_rl.registries import Registry

FILE = """
import agent_rl as ar

@ar.register("{id}", tasks={{"train": "tasks.jsonl"}})
class {name}(ar.Env):
    def __init__(self, size: int = 3):
        self.size = size
"""


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    """Start every test with an empty registry, without built-ins and plugins."""
    monkeypatch.setattr(registry, "_specs", Registry("environment"))
    monkeypatch.setattr(registries, "_plugins_loaded", True)
    monkeypatch.setattr(sys, "path", list(sys.path))


class Shop(Env):
    pass


class Sized(Env):
    def __init__(self, size: int, color: str = "red") -> None:
        self.size = size


def load(tmp_path, id="file-v0", name="Mine", file="my_envs.py") -> types.ModuleType:
    (tmp_path / file).write_text(FILE.format(id=id, name=name))
    return load_file(tmp_path / file)


# Ids


def test_register_makes_an_environment():
    assert register("shop-v0", budget=Budget(turns=2), nondeterministic=True)(Shop) is Shop
    assert isinstance(make("shop-v0"), Shop)
    found = spec("shop-v0")
    assert (found.namespace, found.name, found.version) == ("", "shop", 0)
    assert (found.id, found.cls, found.budget, found.nondeterministic) == ("shop-v0", Shop, Budget(turns=2), True)
    assert env_ids() == ("shop-v0",)


@pytest.mark.parametrize("id", ["shop", "shop-v", "a/b/shop-v0", "my shop-v0", "shop-v0 ", "-v0x", "shöp-v0"])
def test_register_refuses_malformed_ids(id):
    with pytest.raises(ConfigError, match="name-v0"):
        register(id)


@pytest.mark.parametrize("id", ["shop-v0", "me/shop-v12", "my.shop_2-x-v0"])
def test_register_takes_good_ids(id):
    register(id)(Shop)
    assert spec(id).id == id


def test_spec_without_version_means_the_newest():
    for version in (2, 10, 9):
        register(f"me/shop-v{version}")(Shop)
    assert spec("me/shop").id == "me/shop-v10"
    assert (spec("me/shop").namespace, spec("me/shop").version) == ("me", 10)
    assert isinstance(make("me/shop"), Shop)
    with pytest.raises(UnknownEnvError):
        spec("shop")


def test_spec_suggests_for_unknown_ids():
    register("shop-v0")(Shop)
    register("shop-v1")(Shop)
    with pytest.raises(UnknownEnvError, match=r"no environment 'shp-v0'\. Did you mean 'shop-v0'\?"):
        spec("shp-v0")
    with pytest.raises(UnknownEnvError, match=r"no environment 'shop-v7'\. Its versions are: shop-v0, shop-v1\."):
        make("shop-v7")


@pytest.mark.parametrize("id", ["host:8000/guess-v0", "http:/host:8000/guess-v0"])
def test_spec_tells_how_an_address_is_written(id: str):
    with pytest.raises(UnknownEnvError, match=r"server, .* before it: http://host:8000/guess-v0\. `agent-rl envs`"):
        spec(id)


@pytest.mark.parametrize("id", ["localhost/shop-v0", "gpu1.lab/shop-v0"])
def test_spec_takes_an_unknown_namespace_for_a_server(id: str):
    register("shop-v0")(Shop)
    register("me/pit-v0")(Shop)
    host, name = id.split("/")
    with pytest.raises(UnknownEnvError, match=f"If '{host}' is a server, write its address: http://{host}:PORT/{name}"):
        spec(id)
    with pytest.raises(UnknownEnvError, match=r"no environment 'me/pot-v0'\. Did you mean 'me/pit-v0'\?"):
        spec("me/pot-v0")


def test_register_refuses_other_objects():
    for thing in (int, Shop(), lambda: Shop()):
        with pytest.raises(DefinitionError, match=r"no subclass of agent_rl\.Env"):
            register("shop-v0")(thing)
    assert env_ids() == ()


# Arguments


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"sise": 3}, r"sized-v0: no argument 'sise'\. Did you mean 'size'\? It takes: size, color\."),
        ({}, "missing a required argument: 'size'"),
        ({"size": 3, "self": 1}, "no argument 'self'"),
    ],
)
def test_make_refuses_wrong_arguments(arguments, complaint):
    register("sized-v0")(Sized)
    assert spec("sized-v0").make(size=3).size == 3
    with pytest.raises(ConfigError, match=complaint):
        spec("sized-v0").make(**arguments)


def test_make_refuses_arguments_without_init():
    register("shop-v0")(Shop)
    with pytest.raises(ConfigError, match=r"no argument 'size'\. It takes none"):
        make("shop-v0", size=3)


def test_make_passes_constructor_errors():
    class Broken(Env):
        def __init__(self) -> None:
            raise TypeError("inside")

    register("broken-v0")(Broken)
    with pytest.raises(TypeError, match="inside") as caught:
        make("broken-v0")
    assert not isinstance(caught.value, ConfigError)


# Collisions and files


def test_built_in_name_is_taken_before_its_module_is_imported(monkeypatch, tmp_path):
    (tmp_path / "built_in_parts.py").write_text("import parts_of_test\nparts_of_test.parts.add('a', 1, print)\n")
    monkeypatch.syspath_prepend(tmp_path)
    parts = Registry[int]("part", builtin={"a": "built_in_parts"})
    monkeypatch.setitem(sys.modules, "parts_of_test", types.SimpleNamespace(parts=parts))
    with pytest.raises(NameCollisionError, match=r"part 'a' is registered twice: by print in builtins, and by Shop in"):
        parts.add("a", 2, Shop)
    assert parts["a"] == 1


def test_register_names_both_colliding_classes(tmp_path):
    register("shop-v0")(Shop)
    with pytest.raises(NameCollisionError, match=r"Shop in .*test_registry\.py, and by Sized in .*test_registry\.py"):
        register("shop-v0")(Sized)
    with pytest.raises(NameCollisionError, match=r"Shop in .*test_registry\.py, and by Shop in .*my_envs\.py"):
        load(tmp_path, "shop-v0", "Shop")
    assert spec("shop-v0").cls is Shop


def test_register_replaces_a_reloaded_class(tmp_path):
    first = load(tmp_path)
    second = load(tmp_path)
    assert first.Mine is not second.Mine
    assert spec("file-v0").cls is second.Mine


def test_register_replaces_a_class_of_the_notebook(monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None, raising=False)
    first, again, renamed = (type(name, (Env,), {"__module__": "__main__"}) for name in ("Mine", "Mine", "Other"))
    register("mine-v0")(first)
    assert capsys.readouterr().out == ""
    register("mine-v0")(again)
    assert capsys.readouterr().out == "environment 'mine-v0' is replaced by the Mine just defined\n"
    register("mine-v0")(renamed)
    assert capsys.readouterr().out == "environment 'mine-v0' is replaced by the Other just defined\n"
    assert spec("mine-v0").cls is renamed
    with pytest.raises(NameCollisionError, match="Other in __main__, and by Shop in"):
        register("mine-v0")(Shop)


def test_load_file_finds_tasks_and_neighbours(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"n": 1}\n')
    (tmp_path / "neighbour_of_my_envs.py").write_text("ID = 'near-v0'\n")
    (tmp_path / "my_envs.py").write_text(
        "from neighbour_of_my_envs import ID\n" + FILE.format(id="x-v0", name="X").replace('"x-v0"', "ID")
    )
    module = load_file(tmp_path / "my_envs.py")
    assert spec("near").tasks.get("train", 0) == {"n": 1}
    assert spec("near").file == tmp_path / "my_envs.py"
    assert sys.modules[module.__name__] is module
    assert make("near", size=5).size == 5


def test_load_file_separates_files_of_one_name(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        load(tmp_path / folder, id=f"{folder}-v0")
    assert env_ids() == ("a-v0", "b-v0")
    assert spec("a").cls.__module__ != spec("b").cls.__module__


def test_load_file_refuses_the_neighbour_of_another_file(tmp_path):
    for name in "ab":
        folder = tmp_path / name
        folder.mkdir()
        (folder / "envs.py").write_text(f"import json, near_in_{name}\n\ndef late():\n    import shared_helper")
        (folder / "other.py").write_text("def late():\n    import shared_helper")
        (folder / f"near_in_{name}.py").write_text("from shared_helper import late")
        (folder / "shared_helper.py").write_text("late = 1")
    load_file(tmp_path / "a" / "other.py")  # which has not imported it yet
    for file, at in (("other.py", "other.py"), ("envs.py", "near_in_b.py|envs.py")):
        found = rf"b/({at}) imports 'shared_helper', .*b/shared_helper.py, but .* is .*a/shared_helper.py already"
        with pytest.raises(ConfigError, match=found):
            load_file(tmp_path / "b" / file)
    load_file(tmp_path / "a" / "envs.py").late()


def test_load_file_refuses_unloadable_files(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    for name, why in (("gone.py", "gone.py does not exist; give"), ("notes.txt", "is no P"), (".", "is no P")):
        with pytest.raises(ConfigError, match=why):
            load_file(tmp_path / name)
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        load_file(tmp_path / "broken.py")
    assert not any("agent_rl_file_broken" in name for name in sys.modules)


# Plugins


class Plugin:
    """A fake entry point."""

    def __init__(self, name, load):
        self.name, self.load = name, load


@pytest.fixture
def plugins(monkeypatch):
    """Replace the entry points by those of this dict, for the test to fill."""
    loads: dict[str, object] = {}

    def entry_points(group):
        return [Plugin(*item) for item in loads.items()] if group == "agent_rl.envs" else []

    monkeypatch.setattr(registries, "_plugins_loaded", False)
    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    return loads


def broken() -> None:
    raise ImportError("no module named 'x'")


def test_broken_plugin_is_skipped_with_a_warning(plugins):
    plugins.update(bad=broken, worse=broken, good=lambda: register("shop-v0")(Shop))
    with pytest.warns(RuntimeWarning) as caught:
        assert env_ids() == ("shop-v0",)
    assert [str(w.message) for w in caught] == [
        f"plugin '{name}' is skipped: ImportError: no module named 'x'" for name in ("bad", "worse")
    ]
    assert env_ids() == ("shop-v0",)  # and is not tried again


def test_plugins_load_under_warnings_as_errors(plugins):
    plugins.update(bad=broken, good=lambda: register("shop-v0")(Shop))
    with pytest.raises(RuntimeWarning, match="'bad'"):
        env_ids()
    assert env_ids() == ("shop-v0",)


def test_colliding_plugin_is_an_error_every_time(plugins):
    register("shop-v0")(Shop)
    plugins.update(rival=lambda: register("shop-v0")(Sized))
    for _ in range(2):
        with pytest.raises(NameCollisionError, match=r"Shop in .* by Sized in"):
            env_ids()


def test_plugin_can_look_up_ids_while_loading(plugins):
    plugins.update(first=lambda: register("shop-v0")(Shop), second=lambda: make("shop-v0"))
    assert env_ids() == ("shop-v0",)


def test_builtin_environments_are_imported_lazily(monkeypatch, tmp_path):
    (tmp_path / "builtin_shop.py").write_text(FILE.format(id="builtin-v0", name="Builtin"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_specs", Registry("environment", builtin={"builtin-v0": "builtin_shop"}))
    assert env_ids() == ("builtin-v0",) and "builtin_shop" not in sys.modules
    with pytest.raises(UnknownEnvError, match="Its versions are: builtin-v0"):
        make("builtin-v1")
    assert "builtin_shop" not in sys.modules
    assert make("builtin").size == 3
    assert sys.modules.pop("builtin_shop")


def test_builtin_table_lists_every_module():
    modules = [f"agent_rl.envs.{m.name}" for m in pkgutil.iter_modules(envs.__path__)]
    others = (".quiz", ".adapters", ".wordnet_corpus")
    assert {*registry.BUILTIN.values()} == {m for m in modules if not m.endswith(others)}
    code = "import agent_rl as ar; print(*(ar.spec(id).id for id in ar.env_ids()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == sorted(registry.BUILTIN)


def test_namespace_imports_its_adapter_or_names_the_extra(monkeypatch, tmp_path):
    adapters = importlib.import_module("agent_rl.envs.adapters")
    monkeypatch.setattr(adapters, "__path__", [*adapters.__path__, str(tmp_path)])
    monkeypatch.setattr(
        registry, "NAMESPACES", {"far_off": "an adapter of this test", "gone": "one without its package"}
    )
    (tmp_path / "far_off.py").write_text(FILE.format(id="far_off/shop-v0", name="FarOff"))
    (tmp_path / "gone.py").write_text("import no_such_package\n")
    assert make("far_off/shop-v0").size == 3 and env_ids() == ("far_off/shop-v0",)
    with pytest.raises(ConfigError, match=r"gone/... needs no_such_package: pip install 'agent-rl\[gone\]'"):
        make("gone/shop-v0")
    with pytest.raises(ConfigError, match=r"no namespace .faroff.[.] Did you mean .far_off."):
        registry.load_namespace("faroff")
    del sys.modules["agent_rl.envs.adapters.far_off"]


def test_make_imports_no_other_environment():
    code = "import sys, agent_rl as ar; ar.make('calculator'); print(*sorted(m for m in sys.modules if '.envs.' in m))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["agent_rl.envs.calculator", "agent_rl.envs.quiz"]


# The package


def test_agent_rl_import_is_light():
    heavy = "torch transformers vllm verl ray gymnasium hydra rich numpy pydantic"
    check = f"import sys, agent_rl; print([m for m in '{heavy}'.split() if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
