"""Entries: minute, hour, day of the month, month and day of the week, of which Sunday is 0."""

from datetime import datetime, timedelta

from timetable.fields import field

YEARS = 9
"""Between two leap days there may be eight years."""


class Entry:
    """An entry of a timetable."""

    def __init__(self, text: str) -> None:
        minute, hour, day, month, weekday = text.split()
        self.minutes, self.hours = sorted(field(minute, 0, 59)), sorted(field(hour, 0, 23))
        self.days, self.months = field(day, 1, 31), field(month, 1, 12)
        self.weekdays = field(weekday, 0, 6)

    def runs_on(self, day: datetime) -> bool:
        """Whether there is a run on a day."""
        return day.month in self.months and day.day in self.days and day.isoweekday() % 7 in self.weekdays

    def next(self, after: datetime) -> datetime:
        """Return the next run after a time.

        Raises:
            ValueError: if there is none.
        """
        day = after.replace(hour=0, minute=0, second=0, microsecond=0)
        for _ in range(366 * YEARS):
            if self.runs_on(day):
                for hour in self.hours:
                    for minute in self.minutes:
                        if (time := day.replace(hour=hour, minute=minute)) > after:
                            return time
            day += timedelta(days=1)
        raise ValueError("it never runs")
