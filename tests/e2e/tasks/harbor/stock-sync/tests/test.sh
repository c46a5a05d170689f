#!/bin/bash
python3 -m pytest -q -p no:cacheprovider /tests/test_stock.py && solved=1
echo "${solved:-0}" >/logs/verifier/reward.txt
