"""The demo's weights with a vocabulary whose decoder strips a leading space."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken

from penstock.engine.demo import MODEL_DIR
from tests.engine.tokenizers_for_tests import CHAT_TEMPLATE, LLAMA2_PIECES, llama2

NUM_SPECIAL, NUM_BYTES = 3, 256
PIECES = range(NUM_SPECIAL + NUM_BYTES, NUM_SPECIAL + NUM_BYTES + len(LLAMA2_PIECES))
SPACE_A, THE = PIECES[1], PIECES[2]
# Parts of calls of Qwen3-Coder, each a token. The first lacks the end of its parameter, the last its first tag.
CALL_PARTS = (
    "<tool_call>\n<function=sun>\n<parameter=at>\nno",
    "\n</function>\n</tool_call>",
    "<function=sun>\n<parameter=at>\na\n</parameter>",
)
CALL_PIECES = range(PIECES.stop, PIECES.stop + len(CALL_PARTS))


def write_spaced_model(directory: Path) -> Path:
    shutil.copytree(MODEL_DIR, directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (directory / name).unlink()
    tokenizer = llama2(chat_template=CHAT_TEMPLATE)
    tokenizer.backend_tokenizer.add_tokens([AddedToken(part, normalized=False) for part in CALL_PARTS])
    tokenizer.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return directory
