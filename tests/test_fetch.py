"""agent_rl.tools.fetch and tools.web: what is allowed, what a page's text is, and pages that mean harm."""

import asyncio
import socket
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from agent_rl.core.addresses import is_public
from agent_rl.core.messages import Message, ToolCall, ToolErrorKind
from agent_rl.errors import ConfigError
from agent_rl.gym.tool import Tool
from agent_rl.gym.tool_calls import call_tools
from agent_rl.tools.fetch import Place, _allowed, _of_html, fetch_tool
from tests.web_server import drip, reply, serving

PAGE = """<!DOCTYPE html><html><head><title>Ada &amp;
 Charles</title><style>p {color: red}</style><meta charset=utf-8><script>alert("<p>no</p>")</script>
<body><h1>Engines</h1><p>One   <b>difference</b> engine.<p>Two &lt;analytical&gt; engines.
<ul><li>first<li><a href="/b?c=1#d">second</a> <a href="https://elsewhere.org/">third</a></ul>
<pre>a
   b</pre><noscript>hidden</noscript><!-- hidden --><table><tr><td>1<td>2</table>end &"""
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"


RAW = {
    "short": HEAD + b"Content-Length: 100\r\n\r\nbroken",
    "other-protocol": b"220 smtp ready\r\n",
    "many-headers": HEAD + b"X: y\r\n" * 1000 + b"\r\n",
}
SLOW = {"slow-body": HEAD + b"\r\n", "slow-head": b"HTTP/1.1 200 OK\r\nX: "}
TEXTS = {
    "page": (PAGE, "text/html"),
    "json": ('{"a": 1}', "application/json; charset=utf-8"),
    "no-type": ("plain", None),
    "latin": ("caf\xe9".encode("latin-1"), "text/plain; charset=ISO-8859-1"),
    "meta": ('<meta charset="windows-1252"><p>\x80uro'.encode("latin-1"), "text/html"),
    "huge": ("<p>head" + "x" * 3_000_000, "text/html"),
    "binary": (b"\x7fELF", "application/octet-stream"),
}
LEADS = {"off": "http://localhost:1/page", "to-file": "file:///etc/passwd", "round": "/round", "to-page": "/page"}


def answer(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    name, _, rest = handler.path[1:].partition("/")
    if name in RAW:
        handler.wfile.write(RAW[name])
    elif name in SLOW:
        drip(handler, SLOW[name], 20)
    elif name in TEXTS:
        reply(handler, *TEXTS[name])
    elif name in LEADS:
        reply(handler, "", status=302, Location=LEADS[name])
    elif name == "encoding":
        reply(handler, b"\xff\x00\xfeok", f"text/plain; charset={rest}")
    elif name == "gzip":
        reply(handler, b"\x1f\x8b", Content_Encoding="gzip")
    elif name == "silent":
        time.sleep(20)
    else:
        reply(handler, "no", status=404)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(answer) as found:
        yield found


def fetch(tool: Tool, url: str) -> Message:
    (message,) = asyncio.run(call_tools({"fetch": tool}, [ToolCall("c", "fetch", {"url": url})], None))
    return message


def local(url: str, **options: object) -> Tool:
    return fetch_tool([url], allow_private=True, **options)  # type: ignore[arg-type]


def test_fetch_extracts_what_is_seen(url):
    assert (
        fetch(local(url), f"{url}/page").content
        == (
            "Ada & Charles\n\nEngines\n\nOne difference engine.\n\nTwo <analytical> engines.\n\n"
            f"- first\n- second <{url}/b?c=1> third\n\na\n   b\n\n| 1 | 2\nend &"
        )
        or fetch(local(url), f"{url}/page").content
    )


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("json", '{"a": 1}'),
        ("no-type", "plain"),
        ("latin", "café"),
        ("meta", "€uro"),
        *((f"encoding/{name}", "��ok") for name in ("punycode", "hex", "no-such", "idna", "unicode_escape", "utf-7")),
        ("to-page", None),
    ],
)
def test_fetch_reads_text_of_other_kinds(url, path, text):
    message = fetch(local(url), f"{url}/{path}")
    assert message.tool_error is None
    assert message.content == text if text else "Engines" in message.content


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("binary", "is no text: application/octet-stream"),
        ("gzip", "is no text: text/html gzip"),
        ("off", "is not allowed"),
        ("to-file", "is not allowed"),
        ("round", "more than 5 redirects"),
        ("missing", "status 404"),
        ("short", "broke off 94 bytes before the end"),
        ("other-protocol", "answered in no HTTP"),
        ("many-headers", "answered in no HTTP"),
    ],
)
def test_fetch_says_what_is_wrong(url, path, said):
    message = fetch(local(url), f"{url}/{path}")
    assert message.tool_error is ToolErrorKind.EXCEPTION
    assert said in message.content


@pytest.mark.parametrize("path", ["slow-body", "slow-head", "silent"])
def test_fetch_stops_slow_pages(url, path):
    message = fetch(local(url, seconds=0.5), f"{url}/{path}")
    assert message.content == "error: TimeoutError: 127.0.0.1 took more than 0.5 s"


def test_fetch_cuts_huge_pages(url):
    tool = local(url, max_bytes=100_000, max_output=500)
    content = fetch(tool, f"{url}/huge").content
    assert len(content) < 600 and content.startswith("headxxx")
    assert content.endswith("[the page is longer; the rest was not read]") and "characters left out" in content


def test_fetch_refuses_private_addresses(url):
    assert "has a private address" in fetch(fetch_tool([url]), f"{url}/page").content
    with socket.socket() as refusing:  # bound, and not listening
        refusing.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{refusing.getsockname()[1]}"
        assert "ConnectionRefusedError" in fetch(local(closed), closed).content


def test_fetch_uses_an_extractor_of_the_users(url):
    assert fetch(local(url, extract=lambda page: page[:15]), f"{url}/page").content == "<!DOCTYPE html>"
    assert fetch(local(url, extract=lambda page: None), f"{url}/page").content == ""


ALLOW = [
    Place.of(e)
    for e in (
        "docs.org",
        "*.wiki.org",
        "https://site.com/docs/",
        "http://one.com:8080/a",
        "[::1]",
        "https://p.org:443",
        "bücher.de",
    )
]


@pytest.mark.parametrize(
    "url",
    [
        *("http://docs.org", "https://docs.org/x?y=z", "HTTPS://DOCS.ORG./x", "https://docs.org:443/"),
        *("https://en.wiki.org/", "https://a.b.wiki.org/", "https://site.com/docs/a/b", "http://one.com:8080/a"),
        *(
            "http://one.com:8080/a/b",
            "http://one.com:8080/a?b",
            "http://[::1]/",
            "https://p.org/",
            "https://p.org:443/x",
            "https://xn--bcher-kva.de/x",
        ),
    ],
)
def test_fetch_allows_what_the_list_holds(url):
    assert _allowed(url, ALLOW).lower().startswith(url.lower().split(".")[0])


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://docs.org.evil.com/",
            "http://evildocs.org",
            "http://docs.org@evil.com/",
            "http://me:pw@docs.org/",
            "http://docs.org:81/",
        ),
        *("https://wiki.org/", "https://evilwiki.org/", "http://site.com/docs/", "https://site.com/docs"),
        *("https://site.com/docs/../secret", "https://site.com/docs/%2e%2e/secret", "https://site.com/docs/..;/x"),
        *(
            "https://site.com/docs/..\\x",
            "http://one.com:8080/ab",
            "http://one.com/a",
            "ftp://docs.org/",
            "//docs.org/",
        ),
        *("docs.org", "", "http://", "http://docs.org:x/", "http://docs.org\t/", "javascript:alert(1)", "http://[::1"),
        *("file:///etc/passwd", "http://2130706433/", "http://p.org/", "http://docs.org:0/", "http://docs。evil.org/"),
    ],
)
def test_fetch_refuses_what_the_list_lacks(url):
    with pytest.raises(ValueError, match=r"is not allowed|can't be fetched"):
        _allowed(url, ALLOW)


@pytest.mark.parametrize("allow", [[], "docs.org", ["ftp://docs.org"], ["http://"], ["a b"], ["*"], ["http://h:x/"]])
def test_fetch_refuses_lists_without_meaning(allow):
    with pytest.raises(ConfigError):
        fetch_tool(allow)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *((a, True) for a in ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")),
        *((a, False) for a in ("127.0.0.1", "10.0.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "224.0.0.1")),
        *(
            (a, False)
            for a in ("::1", "fe80::1%eth0", "fd00::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::")
        ),
        *((a, False) for a in ("100.64.0.1", "255.255.255.255", "::", "ff02::1")),
    ],
)
def test_addresses_that_are_public(address, public):
    assert is_public(address) is public


@pytest.mark.parametrize(
    "piece",
    ["<", "<!--", "<a ", "<a b='", "&#", "<?", "</", "<script>", "<svg>", "<title>", "<svg></title>", "<![CDATA["],
)
def test_fetch_reads_hostile_pages_in_linear_time(piece):
    def seconds(size: int) -> float:
        started = time.process_time()
        _of_html(piece * (size // len(piece)), "http://docs.org/", ALLOW)
        return time.process_time() - started

    assert seconds(100_000) < 20  # 0.2; 60 and more if all were read again for each piece
