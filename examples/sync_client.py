"""The blocking client: stream one answer, then answer many prompts with a progress bar.

PENSTOCK_REDIS_URL=redis://localhost:6379 PENSTOCK_QUEUE=default python examples/sync_client.py
"""

import os

from penstock import Client, PenstockError

PROMPTS = [f"What is {number} + {number + 1}?" for number in range(1, 9)]


def main() -> None:
    with Client(queue=os.environ.get("PENSTOCK_QUEUE", "default")) as client:  # the URL: PENSTOCK_REDIS_URL
        stream = client.stream([{"role": "user", "content": "Count from 1 to 5."}], max_tokens=64)
        for chunk in stream:
            print(chunk.text, end="", flush=True)
        print()
        if stream.reply is not None:
            print(f"{stream.reply.finish_reason}, {stream.reply.usage.completion_tokens} tokens")

        for result in client.map(PROMPTS, max_in_flight=4, progress=True, max_tokens=32):
            print(f"{result.prompt} -> {result.error or result.text}")


if __name__ == "__main__":
    try:
        main()
    except PenstockError as error:
        raise SystemExit(str(error)) from error
