#!/bin/bash
set -e
cd /app
sed -i 's/80800/8080/' settings.ini
python3 - <<'END'
from pathlib import Path

journal = Path("data/journal.jsonl")
journal.write_bytes(journal.read_bytes()[: journal.read_bytes().rindex(b"\n") + 1])
server = Path("server.py")
text = server.read_text()
for before, after in {
    "            self.answer(200, keys[self.key()])\n": """            text = keys.get(self.key())
            self.answer(*((404,) if text is None else (200, text)))
""",
    "            del keys[self.key()]\n            self.note": """            if self.key() not in keys:
                self.answer(404)
                return
            del keys[self.key()]
            self.note""",
    'ensure_ascii=False) + "\\n")\n': 'ensure_ascii=False) + "\\n")\n        journal.flush()\n        os.fsync(journal.fileno())\n',
    "str(len(text)))": "str(len(text.encode())))",
    "if LOCK.exists():": "if LOCK.exists() and Path('/proc', LOCK.read_text()).exists():",
}.items():
    assert text.count(before) == 1, before
    text = text.replace(before, after)
server.write_text(text)
END
python3 server.py &>server.log &
until python3 -c "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8080/health').read().decode())"; do sleep 0.1; done
