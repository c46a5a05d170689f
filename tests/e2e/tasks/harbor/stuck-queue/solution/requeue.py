"""Brings back the jobs of workers that have crashed, in one step of the queue's own."""

import subprocess

SCRIPT = """
local kept, back, seen = {}, {}, {}
for _, id in ipairs(redis.call('LRANGE', 'mail:processing', 0, -1)) do
  local job = 'job:' .. id
  local worker = redis.call('HGET', job, 'worker')
  if worker and redis.call('EXISTS', 'alive:' .. worker) == 1 then
    table.insert(kept, id)
  elseif not seen[id] and redis.call('HGET', job, 'state') ~= 'sent' then
    seen[id] = true
    if tonumber(redis.call('HGET', job, 'attempts')) >= 3 then
      redis.call('HSET', job, 'state', 'dead')
      redis.call('LPUSH', 'mail:dead', id)
    else
      redis.call('HSET', job, 'state', 'new')
      redis.call('HDEL', job, 'worker')
      table.insert(back, tonumber(id))
    end
  end
end
redis.call('DEL', 'mail:processing')
for _, id in ipairs(kept) do redis.call('RPUSH', 'mail:processing', id) end
table.sort(back, function(a, b) return a > b end)
for _, id in ipairs(back) do redis.call('RPUSH', 'mail:pending', id) end
return #back
"""

subprocess.run(["redis-cli", "-h", "queue", "-e", "EVAL", SCRIPT, "0"], check=True)
