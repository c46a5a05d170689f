"""agent_rl.tools.mcp with the SDK's own servers, over stdio, HTTP and in this process, and with npm's."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import uvicorn
from mcp_types import CallToolResult, EmbeddedResource, ResourceLink, TextResourceContents

import agent_rl as ar
from agent_rl.core.messages import Message, ToolCall, ToolErrorKind
from agent_rl.errors import ConfigError, DefinitionError, InfrastructureError, ToolServerError
from agent_rl.gym.tool_calls import call_tools
from agent_rl.tools.mcp import McpEnv, McpServer, McpSession
from agent_rl.tools.mcp_results import parts_of, text_of
from tests.adapters.mcp_server import PICTURE, make_server

SCRIPT = (sys.executable, str(Path(__file__).with_name("mcp_server.py")))
NPM = Path(sys.prefix, "npm", "node_modules", "@modelcontextprotocol")


@contextmanager
def served() -> Iterator[tuple[str, Callable[[], None]]]:
    """Serve over HTTP from a thread; give the URL, and a function that ends the server at once."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        app = make_server().streamable_http_app()
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)

        def end() -> None:
            server.should_exit = server.force_exit = True
            thread.join()

        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp", end
        finally:
            end()


async def call(session: McpSession, name: str, **arguments: object) -> Message:
    (message,) = await call_tools(session.tools, [ToolCall("c", name, arguments)], None)  # type: ignore[arg-type]
    return message


def with_session(server: McpServer, use: Callable[[McpSession], Awaitable[None]]) -> None:
    async def main() -> None:
        session = await server.open()
        try:
            await use(session)
        finally:
            await session.close()

    asyncio.run(main())


@pytest.fixture(params=["in process", "stdio", "HTTP"])
def server(request: pytest.FixtureRequest) -> Iterator[McpServer]:
    if request.param == "HTTP":
        with served() as (url, _):
            yield McpServer(url, max_output=1000, timeout=10)
    else:
        where = (make_server(),) if request.param == "in process" else SCRIPT
        yield McpServer(*where, max_output=1000, timeout=10)


def test_mcp_tools_work_over_each_transport(server: McpServer) -> None:
    async def use(session: McpSession) -> None:
        add = session.tools["add"].spec
        assert add.description == "Add two numbers."
        assert add.parameters["properties"]["a"] == {"title": "A", "type": "integer"}  # type: ignore[index, call-overload]
        assert (await call(session, "add", a=2)).content == "3"
        missing = await call(session, "add")
        assert (missing.tool_error, missing.content) == (
            ToolErrorKind.BAD_ARGUMENTS,
            "error: bad arguments: a: missing",
        )
        assert "valid integer" in (await call(session, "add", a="x")).content
        failed = await call(session, "fail")
        assert failed.tool_error is ToolErrorKind.EXCEPTION and "no such thing" in failed.content
        assert (await call(session, "files_list")).content.replace("\n", "").replace(" ", "") == '{"a.txt":3}'
        shown, left_out = ar.Image(PICTURE), "[image left out: image/png, 1200 bytes]"
        assert (await call(session, "picture")).parts == ("a dot", shown, left_out)
        assert await session.call("picture") == f"a dot\n{shown}\n{left_out}" and shown.size == (5, 4)
        flood = (await call(session, "flood")).content
        assert len(flood) < 1100 and flood.startswith("head") and flood.endswith("tail")
        together = await asyncio.gather(*(call(session, "add", a=i) for i in range(20)))
        assert [message.content for message in together] == [str(i + 1) for i in range(20)]
        assert await session.call("add", a=5) == "6"
        with pytest.raises(RuntimeError):
            await session.call("fail")

    with_session(server, use)


def test_mcp_server_that_dies_is_an_infrastructure_failure() -> None:
    async def use(session: McpSession) -> None:
        with pytest.raises(ToolServerError, match=r"was lost.*out of memory"):
            await call(session, "die")
        with pytest.raises(ToolServerError, match="has closed the connection"):
            await call(session, "add", a=1)

    with_session(McpServer(*SCRIPT), use)


def test_mcp_http_server_that_ends_is_an_infrastructure_failure() -> None:
    with served() as (url, end):

        async def use(session: McpSession) -> None:
            assert (await call(session, "add", a=1)).content == "2"
            await asyncio.to_thread(end)
            with pytest.raises(InfrastructureError):
                await call(session, "add", a=1)

        with_session(McpServer(url, timeout=20), use)


def test_mcp_call_that_hangs_is_a_timeout() -> None:
    async def use(session: McpSession) -> None:
        hung, quick = await asyncio.gather(call(session, "hang"), call(session, "add", a=1))
        assert (hung.tool_error, quick.content) == (ToolErrorKind.TIMEOUT, "2")
        assert (await call(session, "add", a=2)).content == "3"

    with_session(McpServer(make_server(), timeout=0.5), use)


def test_mcp_rate_is_shared_by_sessions_and_tools() -> None:
    server = McpServer(make_server(), rate=10, timeout=5)

    async def main() -> float:
        sessions = await asyncio.gather(server.open(), server.open())
        started = time.monotonic()
        calls = [(session, name) for session in sessions for name in ("files/list", "picture")]
        answers = await asyncio.gather(*(call(session, name.replace("/", "_")) for session, name in calls))
        lasted = time.monotonic() - started
        assert {message.tool_error for message in answers} == {None}
        await asyncio.gather(*(session.close() for session in sessions))
        return lasted

    assert asyncio.run(main()) > 0.29


@pytest.mark.parametrize(
    ("server", "error", "said"),
    [
        (McpServer("/no/such/command"), ToolServerError, "did not start.*No such file"),
        (McpServer("sh", "-c", "echo no licence >&2; exit 3"), ToolServerError, "stderr ends with: no licence"),
        (McpServer("sh", "-c", "echo busy >&2; sleep 60", start_seconds=3.0), ToolServerError, "within 3 s.*busy"),
        (McpServer("http://127.0.0.1:1/mcp"), ToolServerError, "did not start"),
        (McpServer("cat"), ToolServerError, "did not start"),
        (McpServer(make_server(), only=("ad",)), ConfigError, "no tool 'ad'. Did you mean 'add'"),
    ],
    ids=str,
)
def test_mcp_server_that_does_not_start_is_named(server: McpServer, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        asyncio.run(server.open())


def test_mcp_results_of_other_kinds_are_said() -> None:
    held = TextResourceContents(uri="file:///a", text="held")
    link = ResourceLink(type="resource_link", name="b", uri="file:///b")
    content = [EmbeddedResource(type="resource", resource=held), link]
    assert text_of(parts_of(CallToolResult(content=content))) == "held\n[resource b: file:///b]"
    assert text_of(parts_of(CallToolResult(content=[], structured_content={"é": 1}))) == '{"é": 1}'


# Environments


TASKS = {
    "train": [{"word": word} for word in ("abc", "def", "ghi")],
    "eval": [{"word": w} for w in ("jkl", "mno", "pqr")],
}


def one_call(name: str, **arguments: object) -> Message:
    return Message("assistant", tool_calls=(ToolCall("c", name, arguments),))  # type: ignore[arg-type]


class Notes(McpEnv):
    """Ask for a note; graded on what the server holds."""

    async def reset(self, task, rng):
        (self.session,) = await self.open_servers()
        self.word = task["word"]
        return f"Note the word {self.word} backwards."

    @ar.tool(inline=True)
    def own(self) -> str:
        """Return "own"."""
        return "own"

    @ar.reward
    async def noted(self, episode) -> bool:
        return await self.session.call("note", text="|") == f"{self.word[::-1]} |"

    def oracle(self):
        yield one_call("note", text=self.word[::-1])
        yield one_call("own")
        yield "done"


def test_mcp_env_has_a_session_per_episode() -> None:
    class Apart(Notes):
        servers = (McpServer(*SCRIPT, only=("note",)),)

    ar.register("mcp-apart-v0", tasks=TASKS)(Apart)
    episodes = ar.run("mcp-apart-v0", n=3, split="train")
    assert [e.reward for e in episodes] == [1.0] * 3
    assert [m.content for m in episodes[0].messages if m.role == "tool"] == ["cba", "own"]
    assert children() == []


def test_mcp_servers_that_give_no_tool_are_an_error() -> None:
    class Closed(Notes):
        servers = (McpServer(*SCRIPT),)

        def reset(self, task, rng):
            return "note"

    ar.register("mcp-closed-v0", tasks=TASKS)(Closed)
    (episode,) = ar.run("mcp-closed-v0", {"name": "constant", "text": "done"}, n=1, split="train")
    assert episode.error is not None and "let Closed.reset await open_servers()" in episode.error.message
    with pytest.raises(DefinitionError, match=r"One.servers is one McpServer; write servers = "):

        class One(Notes):
            servers = McpServer(*SCRIPT)


def children() -> list[str]:
    """Return the commands of this process's children."""
    pids = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    return [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]


def test_mcp_start_that_is_cancelled_leaves_no_process() -> None:
    async def main(seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await McpServer(*SCRIPT).open()

    for seconds in (0, 0.05, 0.3):
        asyncio.run(main(seconds))
    assert children() == []


def test_mcp_session_is_shared_and_opened_again() -> None:
    server = McpServer(*SCRIPT, shared=True)

    class Shared(Notes):
        servers = (server,)

        @ar.reward
        async def noted(self, episode) -> float:
            return len((await self.session.call("note", text="|")).split())

    class Killer(Shared):
        def oracle(self):
            yield one_call("die")

    ar.register("mcp-shared-v0", tasks=TASKS)(Shared)
    ar.register("mcp-killer-v0", tasks=TASKS)(Killer)
    assert sum(e.reward for e in ar.run("mcp-shared-v0", n=3, split="train")) > 3  # they see each other's
    assert len(children()) == 1
    (killed,) = ar.run("mcp-killer-v0", n=1, split="train")
    assert killed.outcome is not ar.Outcome.TERMINATED and killed.reward is None
    assert "was lost" in killed.error.message
    assert ar.run("mcp-shared-v0", n=1, split="train")[0].reward == 2.0
    assert len(children()) == 1  # it ends with the process, or so:
    asyncio.run(asyncio.run(server.open()).close())
    assert children() == []


def test_mcp_env_passes_the_checker() -> None:
    class Checked(Notes):
        @property
        def servers(self):  # a server's notes are an episode's
            return (McpServer(make_server(), only=("note", "add", "fail", "picture")),)

    ar.register("mcp-checked-v0", tasks=TASKS)(Checked)
    report = ar.check("mcp-checked-v0")
    assert report.findings == (), report.findings


def test_mcp_tools_of_one_name_need_a_prefix() -> None:
    class Twice(Notes):
        servers = (McpServer(make_server()), McpServer(make_server()))

    class Prefixed(Notes):
        servers = (McpServer(make_server()), McpServer(make_server(), prefix="b_"))

    async def names(env: McpEnv) -> set[str]:
        try:
            await env.open_servers()
            return {*env.toolbox}
        finally:
            await env.close()

    with pytest.raises(DefinitionError, match=r"two tools 'add'.*prefix="):
        asyncio.run(names(Twice()))
    assert {"own", "add", "b_add"} <= asyncio.run(names(Prefixed()))


# npm's


@pytest.fixture
def npm() -> Callable[..., McpServer]:
    node = shutil.which("node")
    if node is None or not NPM.exists():
        pytest.skip(f"NOT TESTED: npm's MCP servers: node={node}, {NPM}; make setup-adapters installs them")
    return lambda name, *arguments, **options: McpServer(
        node, str(NPM / f"server-{name}" / "dist" / "index.js"), *arguments, **options
    )


def test_mcp_runs_npms_filesystem(npm: Callable[..., McpServer], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")

    async def use(session: McpSession) -> None:
        assert len(session.tools) == 14
        assert (await call(session, "read_text_file", path=str(tmp_path / "a.txt"))).content == "hello"
        await call(session, "write_file", path=str(tmp_path / "b.txt"), content="new")
        assert (tmp_path / "b.txt").read_text() == "new"
        assert "denied" in (await call(session, "read_text_file", path="/etc/passwd")).content

    with_session(npm("filesystem", str(tmp_path)), use)


def test_mcp_runs_npms_memory(npm: Callable[..., McpServer], tmp_path: Path) -> None:
    async def use(session: McpSession) -> None:
        assert len(session.tools) == 9
        entity = {"name": "Ada", "entityType": "person", "observations": ["wrote a program"]}
        assert (await call(session, "create_entities", entities=[entity])).tool_error is None
        assert json.loads((await call(session, "read_graph")).content)["entities"][0]["name"] == "Ada"
        assert (await call(session, "create_entities", entities=[1])).tool_error is ToolErrorKind.EXCEPTION

    with_session(npm("memory", env={"MEMORY_FILE_PATH": str(tmp_path / "memory.json"), **os.environ}), use)


def test_mcp_runs_npms_everything(npm: Callable[..., McpServer]) -> None:
    async def use(session: McpSession) -> None:
        assert len(session.tools) >= 13
        assert (await call(session, "echo", message="hi")).content == "Echo: hi"

    with_session(npm("everything", "stdio"), use)
