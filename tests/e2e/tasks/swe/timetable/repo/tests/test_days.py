"""The days of entries."""

from datetime import datetime, timedelta

from timetable import Entry

START = datetime(2026, 1, 1)


def days(text: str, count: int, after: datetime = START) -> list[str]:
    """Return the days of the next runs."""
    found = []
    for _ in range(count):
        after = Entry(text).next(after)
        found.append(f"{after:%m-%d}")
        after = after.replace(hour=0) + timedelta(days=1) - timedelta(minutes=1)
    return found


def test_day_of_the_month() -> None:
    assert days("0 9 13 * *", 3) == ["01-13", "02-13", "03-13"]


def test_day_of_the_week() -> None:
    assert days("0 9 * * 5", 3) == ["01-02", "01-09", "01-16"]


def test_leap_day() -> None:
    assert Entry("30 6 29 2 *").next(datetime(2097, 1, 1)) == datetime(2104, 2, 29, 6, 30)
