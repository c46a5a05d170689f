#!/bin/bash
cp "$(dirname "$0")/requeue.py" /app/ && python3 /app/requeue.py && /app/status.sh
