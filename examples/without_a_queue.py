"""The engine without a queue: many prompts at once, a chat, a stream.

pip install '.[worker]' in a clone; python examples/without_a_queue.py
"""

from penstock import LLM


def main() -> None:
    with LLM("demo", max_num_seqs=8, max_batch_tokens=64, kv_cache_bytes="16MiB") as llm:
        for result in llm.generate([f"What is {number} + 85?" for number in (1, 20, 300)], temperature=0):
            print(result.prompt, "->", result.text)

        reply = llm.chat([{"role": "user", "content": "How do you spell river?"}], temperature=0)
        print(reply.text, f"({reply.finish_reason}, {reply.usage.completion_tokens} tokens)")

        for chunk in llm.stream("Tell me a story about a turtle.", max_tokens=40, seed=1):
            print(chunk.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
