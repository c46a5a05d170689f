#!/bin/bash
cd /app && diff <(python3 report.py exports/2026-03) expected/2026-03.json && echo "March is right"
