"""`agent-rl sandbox`: look after the places where model-written code runs."""

from __future__ import annotations

import argparse

from rich.console import Console


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
