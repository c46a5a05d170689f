#!/bin/bash
# the text for the key has its length, so that the lengths in the stream stay right
set -e
cd /app/billing
git fast-export --all --signed-tags=strip | sed 's/AKIAIOSFODNN7EXAMPLE/XXXXXXXXXXXXXXXXXXXX/g' >/tmp/stream
git fast-import --quiet --force </tmp/stream
rm /tmp/stream
git reset -q --hard main
git reflog expire --expire=now --expire-unreachable=now --all
git gc -q --prune=now
