-- wrk: POST a body, or by turns each line of a file, of a content type, with more headers, all given in the environment; print the summary as one line of JSON.
local file = os.getenv("BENCH_BODY_FILE")
if file then
  local handle = assert(io.open(file, "rb"))
  wrk.body = handle:read("*a")
  handle:close()
else
  wrk.body = os.getenv("BENCH_BODY")
end
wrk.method = "POST"
wrk.headers["Content-Type"] = os.getenv("BENCH_CONTENT_TYPE")
for name, value in string.gmatch(os.getenv("BENCH_HEADERS") or "", "([^:\n]+): ([^\n]+)") do
  wrk.headers[name] = value
end

local lines = os.getenv("BENCH_BODIES_FILE")
if lines then
  local requests, turn = {}, 0
  function init(args)
    for line in io.lines(lines) do
      requests[#requests + 1] = wrk.format(nil, nil, nil, line)
    end
  end
  function request()
    turn = turn % #requests + 1
    return requests[turn]
  end
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '\nRESULT {"requests": %d, "seconds": %f, "p50": %f, "p99": %f, "refused": %d, "broken": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e6, latency:percentile(99) / 1e6,
    errors.status, errors.connect + errors.read + errors.write + errors.timeout))
end
