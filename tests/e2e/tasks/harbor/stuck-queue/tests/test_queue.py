"""The queue as it was left, and after another crash."""

import subprocess
import sys

LISTS = ("mail:pending", "mail:processing", "mail:dead")
CRASH = """
FLUSHALL
SET alive:eve 1
RPUSH mail:pending 50
HSET job:50 state new attempts 0
RPUSH mail:processing 104 99 7 103 102 101 100
HSET job:7 state sent worker dan attempts 3
HSET job:99 state taken worker dan attempts 2
HSET job:100 state taken worker dan attempts 1
HSET job:101 state taken worker eve attempts 1
HSET job:102 state taken worker dan attempts 5
HSET job:103 state sent worker eve attempts 1
HSET job:104 state taken worker dan attempts 3
"""


def ask(*words: str, said: str = "") -> list[str]:
    """Return the lines of Redis's answer."""
    command = ["redis-cli", "-h", "queue", *words]
    return subprocess.run(command, input=said, capture_output=True, text=True, check=True).stdout.split()


def state() -> dict[str, list[str]]:
    """Return all of the queue."""
    hashes = {key: sorted(ask("HGETALL", key)) for key in sorted(ask("KEYS", "job:*"))}
    return {name: ask("LRANGE", name, "0", "-1") for name in LISTS} | hashes


def words(text: str) -> list[str]:
    """Return the words of a hash, as `state` has them."""
    return sorted(text.split())


def test_queue_as_it_was_left() -> None:
    left = state()
    assert [left[name] for name in LISTS] == [["31", "30", "23", "21"], ["27", "22"], ["25"]]
    assert left["job:21"] == words("state new attempts 1")
    assert left["job:24"] == words("state sent worker bob attempts 1")
    assert left["job:25"] == words("state dead worker bob attempts 3")


def test_queue_after_another_crash() -> None:
    ask(said=CRASH)
    for _ in range(2):
        subprocess.run([sys.executable, "/app/requeue.py"], check=True)
        left = state()
        assert [left[name] for name in LISTS[:2]] == [["50", "100", "99"], ["103", "101"]]
        assert sorted(left["mail:dead"]) == ["102", "104"]
        assert left["job:7"] == words("state sent worker dan attempts 3")
        assert left["job:103"] == words("state sent worker eve attempts 1")
        assert left["job:99"] == words("state new attempts 2")
