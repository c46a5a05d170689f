"""Runs statements of SQL on the database, as one transaction: python3 sql.py STATEMENT ..."""

import json
import sys
from urllib.error import HTTPError
from urllib.request import urlopen

try:
    with urlopen("http://db:4001/", json.dumps(sys.argv[1:]).encode()) as answer:
        for rows in json.load(answer):
            for row in rows:
                print(*row, sep="|")
except HTTPError as error:
    sys.exit(error.read().decode())
