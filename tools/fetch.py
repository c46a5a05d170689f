"""Fetch a page's text, from hosts that the environment allows. What a page says is as untrusted as its author."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from agent_rl.errors import ConfigError
from agent_rl.gym.tool import Tool, tool
from agent_rl.tools.web import PORTS, AddressError, Response, request

MAX_REDIRECTS = 5
_TEXT = re.compile(r"text/|application/(xhtml\+xml|xml|json|.*\+(xml|json))")
_CHARSET = re.compile(rb"""<meta[^>]{0,200}charset\s{0,9}=\s{0,9}["']?([\w:.-]{1,40})""", re.IGNORECASE)
_ENCODINGS = re.compile(
    r"utf-?(8|16|16-le|16-be)|ascii|iso8859-\d+|cp\d+|koi8-[rut]|gb2312|gbk|gb18030|big5|euc_(jp|kr)|shift_jis"
)  # by Python's names; others, such as punycode, are no encodings of pages
_CONTROLS = dict.fromkeys([*range(9), 11, 12, *range(14, 32), 127])
_SKIPPED = {"script", "style", "noscript", "template", "svg", "title"}
_NAMES = """
address article aside blockquote body br dd details div dl dt fieldset figcaption figure footer form h1 h2 h3 h4 h5 h6
header hr html li main nav ol option p pre section summary table tbody tr ul
"""
_BLOCKS = frozenset(_NAMES.split())


@dataclass(frozen=True, slots=True)
class Place:
    """What of the web is allowed: a host, or the URLs that begin as one does."""

    schemes: tuple[str, ...]
    host: str
    """With "*." in front, all hosts below it."""
    port: int | None
    """None is the scheme's own."""
    path: str

    @classmethod
    def of(cls, entry: str) -> Place:
        """Read an entry of an allow-list.

        Raises:
            ConfigError: if it is neither a host nor a URL.
        """
        try:
            parts = urlsplit(entry if "://" in entry else f"//{entry}")
            host, port = (parts.hostname or "").rstrip(".").encode("idna").decode(), parts.port
        except ValueError:
            host, port = "", None
        schemes = (parts.scheme,) if parts.scheme else ("http", "https")
        if not re.fullmatch(r"(\*\.)?[\w.-]+|[\da-f:.]+", host) or not {*schemes} <= {"http", "https"}:
            raise ConfigError(
                f"'{entry}' can't be allowed: give a host, '*.host' or a URL to begin with, such as https://host/docs/"
            )
        return cls(schemes, host, port, unquote(parts.path) or "/")

    def holds(self, scheme: str, host: str, port: int, path: str) -> bool:
        """Whether a URL is there."""
        if scheme not in self.schemes or port != (self.port or PORTS[scheme]):
            return False
        if host != self.host and not (self.host.startswith("*.") and host.endswith(self.host[1:])):
            return False
        return path == self.path or path.startswith(self.path if self.path.endswith("/") else f"{self.path}/")


def fetch_tool(
    allow: Sequence[str],
    *,
    seconds: float = 20.0,
    max_bytes: int = 1_000_000,
    max_output: int = 20_000,
    allow_private: bool = False,
    rate: float | None = None,
    extract: Callable[[str], str | None] | None = None,
) -> Tool[[str], str]:
    """Return a tool `fetch` of pages, for an environment's `extra_tools`.

    Whatever goes wrong is a message to the model, as it chose the page. Proxies are not used.

    Args:
        allow: hosts ("docs.python.org", "*.wikipedia.org") and beginnings of URLs ("https://docs.python.org/3/"). A
            redirect is followed to these only.
        seconds: for the page, and for each redirect on the way to it.
        max_bytes: of a page; the rest is left out, and the model is told.
        max_output: characters of a page's text that the model gets to read: head and tail.
        allow_private: whether an allowed host may have an address of this machine or of a private network.
        rate: pages per second, for all episodes together.
        extract: what makes text of HTML, such as `trafilatura.extract`; all visible text and its links if left out.

    Raises:
        ConfigError: if an entry of `allow` is neither a host nor a URL.
    """
    if isinstance(allow, str) or not allow:
        raise ConfigError(f"fetch_tool(allow={allow!r}): give a list of hosts or URLs, such as ['docs.python.org']")
    places = [Place.of(entry) for entry in allow]

    def get(url: str) -> Response:
        return request(
            url,
            seconds=seconds,
            max_bytes=max_bytes,
            allow_private=allow_private,
            headers={"User-Agent": "agent_rl", "Accept": "text/html, text/*, application/json;q=0.9"},
        )

    def fetch(url: str) -> str:
        for _ in range(MAX_REDIRECTS + 1):
            url = _allowed(url, places)
            response = get(url)
            location = response.headers["Location"]
            if response.status not in (301, 302, 303, 307, 308) or not location:
                return _as_text(url, response, places, extract)
            url = urljoin(url, location)
        raise ConnectionError(f"more than {MAX_REDIRECTS} redirects")

    fetch.__doc__ = f"""Fetch a web page and return its text. Allowed: {", ".join(allow)}.

    Args:
        url: the page's address, with http:// or https://.
    """
    return tool(timeout=seconds * (MAX_REDIRECTS + 1), max_output=max_output, rate=rate)(fetch)


def _allowed(url: str, places: Sequence[Place]) -> str:
    """Return a URL as it is asked for, without its fragment.

    Raises:
        AddressError: if it is not allowed.
    """
    try:
        if re.search(r"[\x00-\x20\x7f\\]", url):
            raise ValueError("it holds a space, a control character or a backslash")
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip(".").encode("idna").decode(), parts.port
        path = unquote(parts.path) or "/"
        if parts.username is not None or {".", ".."} & {*re.split(r"[/\\;]", path)}:
            raise ValueError("it holds a user's name, or dots in its path")
    except ValueError as error:
        raise AddressError(f"'{url}' can't be fetched: {error}") from None
    own = PORTS.get(parts.scheme, 0)
    if not any(place.holds(parts.scheme, host, own if port is None else port, path) for place in places):
        raise AddressError(f"'{url}' is not allowed")
    shown = f"[{host}]" if ":" in host else host
    netloc = shown if port in (None, own) else f"{shown}:{port}"
    return urlunsplit((parts.scheme, netloc, parts.path or "/", parts.query, ""))


def _as_text(url: str, response: Response, places: Sequence[Place], extract: Callable[[str], str | None] | None) -> str:
    if response.status != 200:
        raise ConnectionError(f"{url} answered with status {response.status}")
    kind = response.headers.get_content_type() if response.headers["Content-Type"] else "text/plain"
    if not _TEXT.match(kind) or response.headers.get("Content-Encoding", "identity") != "identity":
        how = response.headers.get("Content-Encoding", "")
        raise ValueError(f"{url} is no text: {kind} {how}".rstrip())
    text = _decoded(response).translate(_CONTROLS)
    if "html" in kind:
        text = (extract(text) or "") if extract else _of_html(text, url, places)
    return f"{text}\n[the page is longer; the rest was not read]" if response.is_cut else text


def _decoded(response: Response) -> str:
    found = _CHARSET.search(response.body[:2048])
    named = response.headers.get_content_charset() or (found[1].decode() if found else "utf-8")
    try:
        encoding = codecs.lookup(named).name
    except (LookupError, ValueError):
        encoding = "utf-8"
    return response.body.decode(encoding if _ENCODINGS.fullmatch(encoding) else "utf-8", errors="replace")


def _of_html(page: str, url: str, places: Sequence[Place]) -> str:
    reader = _Reader(url, places)
    reader.feed(f"{page}\n")  # and no close(): it reads what follows an unclosed comment or tag again for each "<"
    title = " ".join("".join(reader.title).split())
    lines = (line.strip() for line in "".join(reader.parts).split("\n"))
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    return f"{title}\n\n{text}" if title else text


class _Reader(HTMLParser):
    """Gathers the text that a reader sees, and where allowed links lead."""

    def __init__(self, url: str, places: Sequence[Place]) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.title: list[str] = []
        self._url, self._places = url, places
        self._skipping, self._depth = "", 0
        self._link = ""
        self._verbatim = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if not self._skipping and tag in _SKIPPED:
            self._skipping = tag
        self._depth += tag == self._skipping
        if tag in _BLOCKS:
            self.parts.append("\n- " if tag == "li" else "\n")
        elif tag in ("td", "th"):
            self.parts.append(" | ")
        self._verbatim += tag == "pre"
        if tag == "a":
            self._link = self._leads_to(dict(attrs).get("href") or "")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._skipping:
            self._depth -= 1
            self._skipping = tag if self._depth else ""
        if tag in _BLOCKS:
            self.parts.append("\n\n" if tag == "p" else "\n")
        self._verbatim = max(self._verbatim - (tag == "pre"), 0)
        if tag == "a" and self._link:
            self.parts.append(f" <{self._link}>")
            self._link = ""

    def handle_data(self, data: str) -> None:
        if self._skipping == "title":
            self.title.append(data)
        elif not self._skipping:
            self.parts.append(data if self._verbatim else re.sub(r"\s+", " ", data))

    def _leads_to(self, href: str) -> str:
        if not href or href.startswith("#"):
            return ""
        try:
            return _allowed(urljoin(self._url, href), self._places)
        except ValueError:
            return ""
