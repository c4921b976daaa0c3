"""The lease of a stream's entry, in Lua: the beginning of every script that writes by one.

A consumer group remembers who has an entry and how often it was handed out, and measures idle times by Redis's clock.
`inbox.py` leases entries to services, gateway/sessions/session_store.py rollouts to the workers of agents.
"""

# KEYS[1] is the stream, ARGV[1] the consumer group, ARGV[2] the consumer. `renew` makes a lease that has been silent
# for `idle_ms`: none by default. `finish` returns 1 if the entry was there.
LEASE = """
local function owns(entry, num_deliveries)
  local lease = redis.call('XPENDING', KEYS[1], ARGV[1], entry, entry, 1)[1]
  return lease and lease[2] == ARGV[2] and lease[4] == tonumber(num_deliveries)
end
local function renew(entry, idle_ms)
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, entry, 'IDLE', idle_ms or 0, 'JUSTID')
end
local function finish(entry)
  redis.call('XACK', KEYS[1], ARGV[1], entry)
  return redis.call('XDEL', KEYS[1], entry)
end
"""
