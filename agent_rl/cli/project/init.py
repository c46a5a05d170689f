"""The command that writes a project."""

from __future__ import annotations

import argparse
import keyword
import shlex
import sys
from pathlib import Path

from agent_rl.errors import ConfigError

SETTINGS = "train.yaml"
"""The file of a project with the settings of its training runs."""
TEMPLATES = ("environment.py", "tasks.jsonl", SETTINGS, "test_environment.py", "README.md")


def init(arguments: argparse.Namespace) -> int:
    """Write the project and print the command that checks it.

    Raises:
        ConfigError: if the name can't be a module's, or the folder has files.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    folder = Path(arguments.folder)
    name = folder.name
    module = _module_of(name)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"'{folder}' has files already: name a new folder")
    shown = shlex.quote(str(folder))
    title = "".join(word.capitalize() for word in module.split("_"))
    values = {"env": f"{name}-v0", "module": module, "title": title, "folder": shown}
    templates = Environment(
        loader=PackageLoader("agent_rl.cli.project", ""),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,  # none of them is HTML
    )
    folder.mkdir(parents=True, exist_ok=True)
    for template in TEMPLATES:
        text = templates.get_template(f"{template}.j2").render(values)
        (folder / template.replace("environment", module)).write_text(text, encoding="utf-8")
    print(f"Wrote {folder}: read its README.md. Next, check that the oracle solves the environment:")
    print(f"  agent-rl rollout --import {shown}/{module}.py env={values['env']} policy=oracle")
    print("What else may be wrong with it, and what luck scores in it:")
    print(f"  agent-rl check --import {shown}/{module}.py {values['env']}")
    return 0


def _module_of(name: str) -> str:
    """Return the name of the module that has the environment.

    Raises:
        ConfigError: if it can't be one, or the environment's is taken.
    """
    module = name.replace("-", "_")
    if not (module.isidentifier() and module.isascii() and module == module.lower()) or keyword.iskeyword(module):
        raise ConfigError(f"'{name}' can't be an environment's name: use a-z, 0-9, '-' and '_', as in my-env")
    if module in sys.stdlib_module_names or module == "agent_rl":
        raise ConfigError(
            f"'{name}' is a module already, so that 'import {module}' would be another: choose another name"
        )
    from agent_rl.gym.registry import BUILTIN  # not above: what Python's own modules refuse shows before

    if f"{name}-v0" in BUILTIN:
        raise ConfigError(f"'{name}-v0' is a built-in environment: choose another name, such as my-{name}")
    return module
