"""Bodies of answers that come in parts, as the sandbox has no memory to hold them in one piece."""

from __future__ import annotations

from agent_rl.sandboxes.agent.frames import MAX_BODY, PART, FrameError, Head


class Body:
    """The body of an answer, of which some may have come."""

    def __init__(self) -> None:
        self._begun = bytearray()

    def add(self, head: Head, body: bytes) -> bytes | None:
        """Take the next frame of an answer; return the whole body if that is the last one.

        Raises:
            FrameError: if a part is smaller than any is, so that its sender could send too many, or if all have more
                bytes than an answer may.
        """
        is_part = head.get("part") is True
        if (is_part and len(body) < PART) or len(self._begun) + len(body) > MAX_BODY:
            raise FrameError(f"an answer goes on with {len(body)} bytes after {len(self._begun)}")
        if is_part:
            self._begun += body
            return None
        return b"".join((self._begun, body)) if self._begun else body
