"""Labels of people, or of another judge, that a judge is measured with: a CSV file."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from pathlib import Path

from agent_rl.errors import ConfigError, did_you_mean
from agent_rl.judge.rubric import NOT_APPLICABLE, Criterion

COLUMNS = ("episode_id", "criterion_id", "label")
_BINARY = {"0": 0, "false": 0, "no": 0, "unmet": 0, "1": 1, "true": 1, "yes": 1, "met": 1}


@dataclass(frozen=True, slots=True)
class Label:
    """What one rater said of one criterion of one episode."""

    episode: str
    criterion: str
    label: str
    rater: str = ""
    family: str = ""
    """Of the model that wrote the episode, where the file has that column."""
    where: str = ""
    """The file and line, for errors."""

    def choice(self, criterion: Criterion) -> int | None:
        """Return the number of the choice that the label means; None for not applicable.

        It is a choice of the criterion, or of one with two choices 0 or 1, false or true, no or yes, unmet or met.

        Raises:
            ConfigError: if it is none.
        """
        label = self.label.strip().lower()
        if label == NOT_APPLICABLE:
            return None
        for number, choice in enumerate(criterion.choices):
            if label == choice.lower():
                return number
        if len(criterion.choices) == 2 and label in _BINARY:
            return _BINARY[label]
        raise ConfigError(
            f"{self.where}: label '{self.label}' is no choice of criterion '{criterion.id}': "
            f"give one of {', '.join(criterion.choices)}"
        )


def read_labels(path: str | os.PathLike[str]) -> list[Label]:
    """Read a CSV file with the columns episode_id, criterion_id and label, and if there are any rater and family.

    Raises:
        ConfigError: if it can't be read, a column is missing, or a line lacks a value, has one too many or repeats
            another one's.
    """
    file = Path(path)
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            rows = csv.DictReader(lines, strict=True)
            names = list(rows.fieldnames or ())
            for column in COLUMNS:
                if column not in names:
                    raise ConfigError(
                        f"{file} has no column '{column}'.{did_you_mean(column, names)} "
                        f"It has: {', '.join(names)}; the first line names them."
                    )
            return _checked(rows, file)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{file} can't be read as CSV: {error}") from None


def _checked(rows: csv.DictReader[str], file: Path) -> list[Label]:
    found: dict[tuple[str, str, str], Label] = {}
    for row in rows:
        where = f"{file}:{rows.line_num}"
        if any(beyond := row.pop(None, ())):
            raise ConfigError(f"{where}: {beyond} is in no column: put values with a comma in quotes")
        for column in COLUMNS:
            if not (row[column] or "").strip():
                raise ConfigError(f"{where}: {column} is empty: {dict(row)}; leave out lines without a label")
        episode, criterion, said, rater, family = (
            (row.get(column) or "").strip() for column in (*COLUMNS, "rater", "family")
        )
        label = Label(episode, criterion, said, rater, family, where)
        key = (label.episode, label.criterion, label.rater)
        if key in found:
            raise ConfigError(
                f"{where}: label '{label.label}' of episode '{label.episode}', criterion '{label.criterion}' is there "
                f"twice: see {found[key].where}. A column 'rater' tells raters apart."
            )
        found[key] = label
    return list(found.values())
