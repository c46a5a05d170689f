#!/bin/bash
cp "$(dirname "$0")/receive.py" /app/ && cd /app && python3 receive.py delivery.csv >received.json
