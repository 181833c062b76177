-- Sends the bodies of a file, one a line, in turn; prints what was measured as one line of JSON.

local requests, at = {}, 0

function init(arguments)
  local headers = {["Content-Type"] = "application/json"}
  for body in io.lines(arguments[1]) do
    requests[#requests + 1] = wrk.format("POST", nil, headers, body)
  end
end

function request()
  at = at % #requests + 1
  return requests[at]
end

function done(summary, latency, _)
  local errors = summary.errors
  io.write(string.format(
    'RESULT {"requests": %d, "seconds": %f, "bytes": %d, "p50_ms": %f, "p99_ms": %f, "refused": %d, "broken": %d}\n',
    summary.requests, summary.duration / 1e6, summary.bytes, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    errors.status, errors.connect + errors.read + errors.write + errors.timeout))
end
