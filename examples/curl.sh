#!/usr/bin/env bash
# The HTTP API with curl: the models, a completion, a streamed chat answer, and what the cluster did for it.
set -euo pipefail
url=${OPENAI_BASE_URL:-http://127.0.0.1:21003/v1}
ask() { curl --silent --show-error --fail-with-body --header "Authorization: Bearer ${OPENAI_API_KEY:-none}" "$@"; }
json=(--header 'Content-Type: application/json')

echo "# models"
ask "$url/models"

echo; echo "# a completion (without \"model\" the server's own answers)"
ask "$url/completions" "${json[@]}" --data '{"prompt": "The green bridge has number 6200. Question: What number does the green bridge have? Answer:",
  "max_tokens": 24, "temperature": 0, "stop": ["\n"]}'

echo; echo "# a chat answer, streamed: one line for each piece, then [DONE]"
ask --no-buffer "$url/chat/completions" "${json[@]}" --data '{
  "messages": [{"role": "user", "content": "What is 3 plus 39?"}],
  "max_tokens": 16, "temperature": 0, "stream": true, "stream_options": {"include_usage": true}}'

echo "# is it well, and who serves"
ask "${url%/v1}/health"
echo
