"""Modal and Daytona themselves, each if there is a key."""

from __future__ import annotations

import asyncio
import os

import pytest

from agent_rl.sandboxes.registry import make_backend
from tests.e2e.skips import not_run

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(("name", "key"), [("modal", "MODAL_TOKEN_ID"), ("daytona", "DAYTONA_API_KEY")])
def test_hosted_service_runs_code_and_commands(name: str, key: str) -> None:
    if not os.environ.get(key):
        not_run(f"the {name} sandbox against the service: set {key}")

    async def main() -> None:
        sandboxes = make_backend(name)
        sandbox = await sandboxes.open(owner="agent-rl's tests", lifetime=120)
        try:
            await sandbox.run_python("x = 20")
            assert (await sandbox.run_python("x + 1")).value == "21"
            ran = await sandbox.exec(["sh", "-c", "id -un; setsid sleep 60 & sleep 60"], timeout=2)
            assert ran.timed_out and ran.stdout == "nobody\n"
            sleeping = (
                "[p for p in os.listdir('/proc') if p.isdigit() and b'sleep' in open(f'/proc/{p}/comm', 'rb').read()]"
            )
            assert (await sandbox.run_python(f"import os\n{sleeping}")).value == "[]"
            await sandbox.run_python("open('made', 'w').write(os.getcwd())")
            assert await sandbox.read_file("made") == b"/work"
            assert (await sandbox.exec(["false"])).returncode == 1
        finally:
            await sandboxes.close()

    asyncio.run(main())
