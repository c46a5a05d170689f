#!/bin/bash
# says which jobs are in the hands of workers that don't live
hang=0
for id in $(redis-cli -h queue LRANGE mail:processing 0 -1); do
  worker=$(redis-cli -h queue HGET "job:$id" worker)
  [ "$(redis-cli -h queue EXISTS "alive:$worker")" = 1 ] || { echo "job $id hangs at $worker"; hang=1; }
done
[ $hang = 0 ] && echo "no job hangs"
