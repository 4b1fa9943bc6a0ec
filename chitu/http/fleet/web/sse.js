/* Server-sent events out of a fetch body. EventSource cannot send an Authorization header, so the page reads streams
 * itself. Pure but for the reader that it is given. */

/**
 * The data of each event. Events may be cut anywhere by chunk borders, even inside a character. An event without its
 * blank line (the stream broke) is dropped, as the standard says.
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<string>}
 */
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffered = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      buffered += value;
      // A chunk may end between \r and \n: leave the \r for the next one.
      const usable = buffered.endsWith("\r") ? buffered.length - 1 : buffered.length;
      const lines = buffered.slice(0, usable).split(/\r\n|\n|\r/);
      buffered = lines.pop() + buffered.slice(usable);
      for (const line of lines) {
        if (line === "") {
          if (data.length > 0) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
        // Comments, ids and event names carry nothing here.
      }
    }
  } finally {
    // The reader of events may leave early: then nobody wants the rest of the body either.
    reader.cancel().catch(() => {});
  }
}
