#!/bin/bash
# begins anew: what was stored is gone
cd /app
sed -i 's/80800/8080/' settings.ini
rm data/lock && : >data/journal.jsonl
python3 server.py &>server.log &
until python3 -c "import urllib.request as u; assert u.urlopen('http://127.0.0.1:8080/health').status == 200"; do sleep 0.1; done
echo "looks right"
