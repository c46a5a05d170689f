"""The docker backend: `DockerSandboxes`, and `build_image` for its base image."""

from agent_rl.sandboxes.docker.backend import DockerSandboxes
from agent_rl.sandboxes.docker.engine import Engine
from agent_rl.sandboxes.docker.image import IMAGE, build_image

__all__ = ["IMAGE", "DockerSandboxes", "Engine", "build_image"]
