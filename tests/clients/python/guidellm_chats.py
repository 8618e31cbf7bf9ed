"""Checks guidellm, as it is installed, against a gateway. Usage: guidellm_chats.py URL KEY

It measures, and so never asks again: there is no check with a gateway that is killed.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from checks import KEY, MODEL, QUESTION, TOKENIZER, URL, have, report

APIS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
NUM_TOKENS = 20
GUIDELLM = Path(sys.executable).with_name("guidellm")


def measured(api: str, count: int) -> None:
    """Has it measure requests, each with a stream."""
    with TemporaryDirectory() as folder:
        prompts, written = Path(folder) / "prompts.jsonl", Path(folder) / "report.json"
        prompts.write_text((json.dumps({"prompt": QUESTION, "output_tokens_count": NUM_TOKENS}) + "\n") * count)
        options = {
            "backend": f"kind=openai_http,target={URL},model={MODEL},api_key={KEY},request_format={api}",
            "profile": "kind=synchronous",
            "constraint": f"kind=max_requests,count={count}",
            "data": f"kind=json_file,path={prompts}",
            "tokenizer": f"kind=huggingface_auto,model={TOKENIZER}",
            "output": f"kind=json,path={written}",
        }
        given = [part for name, value in options.items() for part in (f"--{name}", value)]
        subprocess.run([GUIDELLM, "run", *given, "--disable-console"], check=True, stdin=subprocess.DEVNULL)
        (benchmark,) = json.loads(written.read_text())["benchmarks"]
    assert (benchmark["requests"]["errored"], len(benchmark["requests"]["successful"])) == ([], count)
    assert all(each["output"] for each in benchmark["requests"]["successful"])


def streams_measured() -> None:
    for api in APIS.values():
        measured(api, 3)


def worker_killed() -> None:
    have("worker killed")
    measured(APIS["chat"], 1)
    have("looked")


report(APIS, streams_measured, worker_killed)
