#!/bin/sh
# ask.sh QUESTION ANSWER: asks the policy once; its last line says what that is worth.
body=$(printf '{"model": "policy", "messages": [{"role": "user", "content": "%s"}]}' "$1")
reply=$(curl --silent --fail --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \
    --data "$body" "$OPENAI_BASE_URL/chat/completions") || exit 1
case $reply in
*"#### $2\""*) echo 1 ;;
*) echo 0 ;;
esac
