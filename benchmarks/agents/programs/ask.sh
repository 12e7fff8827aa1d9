#!/bin/sh
# Asks two times with curl and jq: `sh ask.sh PROMPT`.
set -e
ask() {
  curl -sf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
    -H "Content-Type: application/json" \
    -d "$(jq -n --argjson messages "$1" '{model: "policy", max_tokens: 10, messages: $messages}')"
}
messages=$(jq -nc --arg prompt "$1" '[{role: "user", content: $prompt}]')
answer=$(ask "$messages")
ask "$(printf %s "$answer" | jq -c --argjson messages "$messages" --arg prompt "$1" \
  '$messages + [.choices[0].message, {role: "user", content: $prompt}]')" >/dev/null
