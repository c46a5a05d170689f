"""`agent-rl sandbox`: look after the places where model-written code runs."""

from __future__ import annotations

import argparse
from typing import cast

from omegaconf import OmegaConf
from rich.console import Console

from agent_rl.core.messages import JSON


def sandbox_doctor(arguments: argparse.Namespace) -> int:
    """Say what sandboxes guarantee on this machine."""
    from agent_rl.sandboxes.doctor import doctor

    return doctor(Console())


def build_image(arguments: argparse.Namespace) -> int:
    """Make Docker's base image."""
    from agent_rl.sandboxes import docker

    tag = arguments.tag or docker.IMAGE
    print(f"{tag}: {docker.build_image(docker.Engine(), tag)}")
    return 0


def serve_sandboxes(arguments: argparse.Namespace) -> int:
    """Serve sandboxes until Ctrl-C or SIGTERM."""
    from agent_rl.cli.serve import run_server, server_settings
    from agent_rl.sandboxes.registry import make_backend
    from agent_rl.sandboxes.remote.server import serving

    settings = server_settings(arguments, plain=arguments.plain)
    options = cast(dict[str, JSON], OmegaConf.to_container(OmegaConf.from_dotlist(arguments.options)))
    backend = make_backend(arguments.backend, options)
    lines = "env_args.sandbox=remote env_args.sandbox_args.url={}"
    run_server(settings, serving(arguments.backend, backend, settings), "sandboxes", lambda url: [lines.format(url)])
    return 0
