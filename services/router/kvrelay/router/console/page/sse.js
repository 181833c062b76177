// Server-sent events from the body of a POST, for which the browser's EventSource is no use.

/** The data of each event, as it comes. */
export async function* events(body) {
  let rest = "";
  for await (const text of pieces(body)) {
    const parts = (rest + text).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part
        .split("\n")
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}

async function* pieces(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
