"""The demo's weights with a vocabulary whose decoder strips a leading space."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from penstock.engine.demo import MODEL_DIR
from tests.engine.tokenizers_for_tests import CHAT_TEMPLATE, LLAMA2_PIECES, llama2

NUM_SPECIAL, NUM_BYTES = 3, 256
PIECES = range(NUM_SPECIAL + NUM_BYTES, NUM_SPECIAL + NUM_BYTES + len(LLAMA2_PIECES))
SPACE_A, THE = PIECES[1], PIECES[2]


def write_spaced_model(directory: Path) -> Path:
    shutil.copytree(MODEL_DIR, directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (directory / name).unlink()
    llama2(chat_template=CHAT_TEMPLATE).save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return directory
