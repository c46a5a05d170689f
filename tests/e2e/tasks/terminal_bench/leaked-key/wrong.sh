#!/bin/bash
# rewrites the branch that is checked out, and looks at nothing else
cd /app/billing
git fast-export main | sed 's/AKIAIOSFODNN7EXAMPLE/XXXXXXXXXXXXXXXXXXXX/g' | git fast-import --quiet --force
git reset -q --hard main
[ -z "$(git log -p | grep AKIA)" ] && [ -z "$(git status --porcelain)" ] && echo "looks right"
