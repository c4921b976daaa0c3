"""Changes of the registry as scripts that run in Redis: each as a whole, with its audit line, or not at all.

Keys are those of RegistryKeys in common/streams/keys.py. A version that was
removed keeps its field, with `removed` in it: of two states of a version the later one counts.
"""

from __future__ import annotations

# What cannot be read counts as oldest, and as there: so it is put right from a copy, and can be removed.
_HELPERS = """
local function origin_of(text)
  local readable, value = pcall(cjson.decode, text)
  return readable and type(value) == 'table' and type(value.unix_s) == 'number' and value or {unix_s = -1}
end
local function has(key, version)
  local text = redis.call('HGET', key, 'v:' .. version)
  return text and not origin_of(text).removed
end
"""

# KEYS: name, names, content, audit, changes. ARGV: the name, version, content, origin, kind, activate, audit line,
# lines kept, replace. A name without an active version takes this one. Says whether the version is new to the name.
SUBMIT = (
    _HELPERS
    + """
local kind = redis.call('HGET', KEYS[1], 'kind')
if kind and kind ~= ARGV[5] then
  for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
    if string.sub(field, 1, 2) == 'v:' and has(KEYS[1], string.sub(field, 3)) then return {'kind', kind, 0} end
  end
end
redis.call(ARGV[9] == '1' and 'HSET' or 'HSETNX', KEYS[3], ARGV[2], ARGV[3])
local new = has(KEYS[1], ARGV[2]) and 0 or 1
if new == 1 then redis.call('HSET', KEYS[1], 'v:' .. ARGV[2], ARGV[4]) end
local active = redis.call('HGET', KEYS[1], 'active') or ''
local moved = active ~= ARGV[2] and (active == '' or ARGV[6] == '1')
if moved then redis.call('HSET', KEYS[1], 'active', ARGV[2], 'retired', '0') end
if new == 1 or moved or ARGV[9] == '1' then
  redis.call('SADD', KEYS[2], ARGV[1])
  redis.call('HSET', KEYS[1], 'kind', ARGV[5])
  redis.call('HINCRBY', KEYS[1], 'revision', 1)
  redis.call('INCR', KEYS[5])
end
redis.call('RPUSH', KEYS[4], ARGV[7])
redis.call('LTRIM', KEYS[4], -tonumber(ARGV[8]), -1)
return {'ok', new, tonumber(redis.call('GET', KEYS[5]) or '0')}
"""
)

# KEYS: name, audit, changes. ARGV: version (empty retires), the version that must be active or '*', audit line,
# lines kept. Says what was active.
MOVE = (
    _HELPERS
    + """
local active = redis.call('HGET', KEYS[1], 'active')
if not active then return {'missing', '', 0} end
if ARGV[1] ~= '' and not has(KEYS[1], ARGV[1]) then return {'missing', active, 0} end
if ARGV[2] ~= '*' and ARGV[2] ~= active then return {'other', active, 0} end
redis.call('HSET', KEYS[1], 'active', ARGV[1], 'retired', ARGV[1] == '' and '1' or '0')
redis.call('HINCRBY', KEYS[1], 'revision', 1)
redis.call('RPUSH', KEYS[2], (string.gsub(ARGV[3], '"was":""', '"was":"' .. active .. '"', 1)))
redis.call('LTRIM', KEYS[2], -tonumber(ARGV[4]), -1)
return {'ok', active, redis.call('INCR', KEYS[3])}
"""
)

# KEYS: name, names, content, audit, changes, usage. ARGV: version, origin with `removed`, audit line, lines kept, what
# the key of a name begins with. The content goes with the last name that has it.
REMOVE = (
    _HELPERS
    + """
if not has(KEYS[1], ARGV[1]) then return {'missing', 0} end
if redis.call('HGET', KEYS[1], 'active') == ARGV[1] then return {'active', 0} end
redis.call('HSET', KEYS[1], 'v:' .. ARGV[1], ARGV[2])
redis.call('HINCRBY', KEYS[1], 'revision', 1)
redis.call('DEL', KEYS[6])
redis.call('RPUSH', KEYS[4], ARGV[3])
redis.call('LTRIM', KEYS[4], -tonumber(ARGV[4]), -1)
local changes = redis.call('INCR', KEYS[5])
for _, name in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  if has(ARGV[5] .. name, ARGV[1]) then return {'ok', changes} end
end
redis.call('HDEL', KEYS[3], ARGV[1])
return {'ok', changes}
"""
)

# KEYS: name, names. ARGV: the name, revision, kind, active, retired, then pairs of version field and value.
# Of each version the later state counts; of the rest, that of the higher revision.
RESTORE = (
    _HELPERS
    + """
for i = 6, #ARGV, 2 do
  local there = redis.call('HGET', KEYS[1], ARGV[i])
  if not there or origin_of(there).unix_s < origin_of(ARGV[i + 1]).unix_s then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
local revision = tonumber(redis.call('HGET', KEYS[1], 'revision') or '0') or 0
if revision < tonumber(ARGV[2]) or redis.call('HEXISTS', KEYS[1], 'kind') == 0 then
  redis.call('HSET', KEYS[1], 'revision', ARGV[2], 'kind', ARGV[3], 'active', ARGV[4], 'retired', ARGV[5])
end
local active = redis.call('HGET', KEYS[1], 'active') or ''
if active ~= '' and not has(KEYS[1], active) then redis.call('HSET', KEYS[1], 'active', '', 'retired', '1') end
redis.call('SADD', KEYS[2], ARGV[1])
return 1
"""
)


# KEYS: changes. ARGV: the time in milliseconds. What was put back is a state that nobody has seen: a count of changes
# that was reached before would pass for the one that is known.
JUMP = """
local count = math.max(tonumber(redis.call('GET', KEYS[1]) or '0') + 1, tonumber(ARGV[1]))
redis.call('SET', KEYS[1], string.format('%.0f', count))
"""
