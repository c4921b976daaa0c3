"""Changes of the registry as scripts that run in Redis: each as a whole, with its audit line, or not at all.

Neighbour: registry.py, which calls them. Keys are those of RegistryKeys in services/common/keys.py.
"""

from __future__ import annotations

# KEYS: name, names, content, audit, changes. ARGV: the name, version, content, who and when, kind, activate, audit
# line, lines kept. A name without an active version takes this one. Says whether the version is new to the name.
SUBMIT = """
local kind = redis.call('HGET', KEYS[1], 'kind')
if kind and kind ~= ARGV[5] then return {'kind', kind, 0} end
redis.call('HSETNX', KEYS[3], ARGV[2], ARGV[3])
local new = redis.call('HSETNX', KEYS[1], 'v:' .. ARGV[2], ARGV[4])
local active = redis.call('HGET', KEYS[1], 'active') or ''
local moved = active ~= ARGV[2] and (active == '' or ARGV[6] == '1')
if moved then redis.call('HSET', KEYS[1], 'active', ARGV[2], 'retired', '0') end
if new == 1 or moved then
  redis.call('SADD', KEYS[2], ARGV[1])
  redis.call('HSET', KEYS[1], 'kind', ARGV[5])
  redis.call('HINCRBY', KEYS[1], 'revision', 1)
  redis.call('INCR', KEYS[5])
end
redis.call('RPUSH', KEYS[4], ARGV[7])
redis.call('LTRIM', KEYS[4], -tonumber(ARGV[8]), -1)
return {'ok', new, tonumber(redis.call('GET', KEYS[5]) or '0')}
"""

# KEYS: name, audit, changes. ARGV: version (empty retires), the version that must be active or '*', audit line,
# lines kept. Says what was active.
MOVE = """
local active = redis.call('HGET', KEYS[1], 'active')
if not active then return {'missing', '', 0} end
if ARGV[1] ~= '' and redis.call('HEXISTS', KEYS[1], 'v:' .. ARGV[1]) == 0 then return {'missing', active, 0} end
if ARGV[2] ~= '*' and ARGV[2] ~= active then return {'other', active, 0} end
redis.call('HSET', KEYS[1], 'active', ARGV[1], 'retired', ARGV[1] == '' and '1' or '0')
redis.call('HINCRBY', KEYS[1], 'revision', 1)
redis.call('RPUSH', KEYS[2], (string.gsub(ARGV[3], '"was":""', '"was":"' .. active .. '"', 1)))
redis.call('LTRIM', KEYS[2], -tonumber(ARGV[4]), -1)
return {'ok', active, redis.call('INCR', KEYS[3])}
"""

# KEYS: name, names. ARGV: the name, revision, kind, active, retired, then pairs of version field and value.
# Versions that are missing are added; the rest only where this copy is newer.
RESTORE = """
for i = 6, #ARGV, 2 do redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1]) end
if tonumber(redis.call('HGET', KEYS[1], 'revision') or '0') < tonumber(ARGV[2]) then
  redis.call('HSET', KEYS[1], 'revision', ARGV[2], 'kind', ARGV[3], 'active', ARGV[4], 'retired', ARGV[5])
end
redis.call('SADD', KEYS[2], ARGV[1])
return 1
"""


# KEYS: changes. ARGV: the time in milliseconds. What was put back is a state that nobody has seen: a count of changes
# that was reached before would pass for the one that is known.
JUMP = """
local count = math.max(tonumber(redis.call('GET', KEYS[1]) or '0') + 1, tonumber(ARGV[1]))
redis.call('SET', KEYS[1], string.format('%.0f', count))
"""
