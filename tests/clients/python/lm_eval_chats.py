"""Checks lm-eval, as it is installed, against a gateway. Usage: lm_eval_chats.py URL KEY"""

import os
from typing import Any

from checks import BASE, KEY, MODEL, TOKENIZER, Api, Turns, as_messages, run

os.environ["OPENAI_API_KEY"] = KEY

from datasets import Dataset
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

WHERE: dict[str, Any] = {"base_url": f"{BASE}/completions", "model": MODEL, "tokenizer": str(TOKENIZER), "seed": 5}
completions = LocalCompletionsAPI(**WHERE)
chats = LocalChatCompletion(**{**WHERE, "base_url": f"{BASE}/chat/completions"})
CHOICES = {
    "task": "choices",
    "output_type": "multiple_choice",
    "test_split": "test",
    "custom_dataset": lambda **_: {"test": Dataset.from_list([{"question": "What is 1 + 1?", "answer": 0}] * 3)},
    "doc_to_text": "{{question}}",
    "doc_to_choice": ["1 + 1 = 2", "1 + 1 = 3"],
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}


def generated(model: Any, prompt: Any, limit: int) -> str:
    asked = {"max_gen_toks": limit, "temperature": 1.0, "until": ["\n\n\n"]}
    (text,) = model.generate_until([Instance("generate_until", {}, (prompt, asked), 0)])
    return str(text)


def completion(turns: Turns, limit: int) -> str:
    return generated(completions, "\n".join(text for _, text in turns), limit)


def chat(turns: Turns, limit: int) -> str:
    return generated(chats, chats.apply_chat_template(as_messages(turns)), limit)


def choices_by_likelihood() -> None:
    found = simple_evaluate(completions, tasks=[ConfigurableTask(config=CHOICES)], bootstrap_iters=0)
    assert found["results"]["choices"]["acc,none"] == 1.0


run({"completions": Api(completion, None), "chat": Api(chat, None)}, choices_by_likelihood)
