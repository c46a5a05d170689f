"""When an entry of a timetable runs next."""

from timetable.entry import Entry

__all__ = ["Entry"]
