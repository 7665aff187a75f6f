-- Chooses the replica of a request as prefix_routing.py does: the first in its key's ranking that is
-- not too busy. If that one does not answer, HAProxy itself chooses another.

local HEAD, SLACK, FACTOR = 1024, 4, 1.25
local MOST = 32768  -- bytes of a prefix; the body may be cut where the buffer ends
local SESSION = os.getenv("RAY_SERVE_SESSION_ID_HEADER_KEY") or "x-session-id"

-- Returns the end of the JSON object that starts at `at`; nil if the text ends first.
local function object_end(text, at)
    local depth = 0
    while true do
        at = text:find('["{}]', at)
        if not at then return nil end
        local mark = text:sub(at, at)
        if mark == "{" then
            depth = depth + 1
        elseif mark == "}" then
            depth = depth - 1
            if depth == 0 then return at end
        else
            repeat
                at = text:find('["\\]', at + 1)
                if not at then return nil end
                local ended = text:sub(at, at) == '"'
                if not ended then at = at + 1 end
            until ended
        end
        at = at + 1
    end
end

-- Returns the system messages and the start of the first other one, of a list of messages.
local function of_messages(text, list)
    local at = text:find("%S", list)
    while at and text:sub(at, at) == "{" do
        local last = object_end(text, at)
        local role = last and text:sub(at, last):match('"role"%s*:%s*"(%a+)"')
        if role ~= "system" and role ~= "developer" then
            return text:sub(list, math.min(last or #text, at + HEAD - 1))
        end
        at = text:find("[^%s,]", last + 1)
    end
    return text:sub(list, at)
end

local function prefix_of(body)
    for _, name in ipairs({"messages", "input"}) do
        local _, list = body:find('"' .. name .. '"%s*:%s*%[')
        if list then return of_messages(body, list + 1):sub(1, MOST) end
    end
    for _, name in ipairs({"prompt", "input"}) do
        local first, last = body:find('"' .. name .. '"%s*:%s*["%[]')
        if first then return body:sub(last, last + HEAD) end
    end
end

local function key_of(txn)
    local session = txn.f:req_hdr(SESSION)
    if session and session ~= "" then return session end
    local body = txn.f:req_body()
    local prefix = body and prefix_of(body)
    if not prefix then return nil end
    local function field(name) return body:match('"' .. name .. '"%s*:%s*"([^"]*)"') or "" end
    return txn.c:sha1(field("model") .. "\n" .. field("cache_salt") .. "\n" .. prefix)
end

core.register_action("prefix_server", {"http-req"}, function(txn, backend)
    local key = key_of(txn)
    if not key then return end
    local ranking, loads, sum, least = {}, {}, 0, math.huge
    for name, server in pairs(core.backends[backend].servers) do
        local stats = server:get_stats()
        -- The backup server is Serve's own proxy, for when there is no replica.
        if stats.bck == 0 and stats.status:find("^UP") then
            table.insert(ranking, {txn.c:sha1(key .. name), name})
            loads[name], sum, least = stats.scur, sum + stats.scur, math.min(least, stats.scur)
        end
    end
    if #ranking == 0 then return end
    table.sort(ranking, function(one, other) return one[1] < other[1] end)
    local bound = math.max(math.ceil(FACTOR * (sum + 1) / #ranking), least + SLACK)
    for _, each in ipairs(ranking) do
        if loads[each[2]] < bound then
            txn:set_var("txn.prefix_server", each[2])
            return
        end
    end
end, 1)
