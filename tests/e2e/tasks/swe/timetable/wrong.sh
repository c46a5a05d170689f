#!/bin/bash
# takes either day always: where one is *, that is every day
sed -i 's/day.month in self.months and day.day in self.days and \(.*\)$/day.month in self.months and (day.day in self.days or \1)/' timetable/entry.py
python3 - <<'END' && python3 -m pytest -q -p no:cacheprovider tests/test_fields.py && echo "looks right"
from datetime import datetime
from timetable import Entry
assert Entry("0 9 13 * 5").next(datetime(2026, 1, 10)) == datetime(2026, 1, 13, 9)
END
