#!/usr/bin/env bash
# Sends a prompt and prints the reply as it is written, with nothing but redis-cli.
#
#   REDIS_URL=redis://localhost:6379 PENSTOCK_QUEUE=default examples/consumer.sh 'What is 12 + 30?' [field value ...]
#
# Further arguments are fields of the request, such as `max_tokens 64`; docs/wire.md has them all. A chat, here with a tool:
#
#   PENSTOCK_FIELD=messages examples/consumer.sh '[{"role": "user", "content": "What time is it?"}]' \
#     tools '[{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]'
#
# The text goes to stdout, parts of tool calls as lines of JSON too, reasoning to stderr.
set -euo pipefail

redis=(redis-cli -u "${REDIS_URL:-redis://localhost:6379}" --no-auth-warning --raw)
queue=${PENSTOCK_QUEUE:-default}
field=${PENSTOCK_FIELD:-prompt}
prompt=${1:?usage: consumer.sh PROMPT [FIELD VALUE ...]}
shift

# The id of the queue's entry names the reply. -e: an error of Redis ends the script.
id=$("${redis[@]}" -e XADD "penstock:{$queue}:requests" '*' "$field" "$prompt" "$@")
echo "request $id" >&2
trap '"${redis[@]}" SET "penstock:$queue:{$id}:cancel" 1 EX 86400 >/dev/null; exit 130' INT # Ctrl-C cancels

separator=$'\x1f' # parts the items of an answer, since a text may hold newlines
last=0-0
while true; do
  # One entry: the stream, the entry's id, then field, value, field, value, ...; nothing if none came within 5 s.
  IFS=$separator read -r -d '' -a items < <(
    "${redis[@]}" -e -d "$separator" XREAD COUNT 1 BLOCK 5000 STREAMS "penstock:$queue:{$id}:reply" "$last"
    printf '\0'
  ) || true
  ((${#items[@]} > 2)) || continue
  last=${items[1]}
  items[${#items[@]} - 1]=${items[${#items[@]} - 1]%$'\n'}

  type='' text='' reasoning='' tool_calls='' finish_reason='' code='' message=''
  for ((at = 2; at + 1 < ${#items[@]}; at += 2)); do
    case ${items[at]} in type | text | reasoning | tool_calls | finish_reason | code | message)
      printf -v "${items[at]}" %s "${items[at + 1]}" ;;
    esac
  done
  case $type in
    chunk)
      printf %s "$reasoning" >&2
      printf %s "$text"
      [[ -z $tool_calls ]] || printf '\n%s' "$tool_calls"
      ;;
    end)
      printf '\n'
      echo "$finish_reason $code $message" >&2
      [[ $finish_reason != error ]]
      exit
      ;;
  esac
done
