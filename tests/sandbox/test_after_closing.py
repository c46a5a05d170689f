"""Honest code that what bounds sandboxes must not break."""

from __future__ import annotations

from agent_rl.sandboxes.base import Limits

THREADS = """
import threading
stop, made = threading.Event(), 0
def work():
    kept = [bytes(600) for _ in range(1000)]
    stop.wait()
for _ in range(40): threading.Thread(target=work).start(); made += 1
stop.set()
made
"""


def test_threads_take_little_of_the_address_space(sandboxes, run):
    async def main() -> None:
        box = await sandboxes.open(limits=Limits())
        assert (await box.run_python(THREADS)).value == "40"
        script = await box.exec(["python3", "-c", THREADS + "print(made)"])
        assert script.stdout == "40\n", script.stderr
        assert (await box.run_python("import os\nos._exit(0)")).state_lost  # the next is a program of its own
        assert (await box.run_python(THREADS)).value == "40"
        await box.close()

    run(main())
