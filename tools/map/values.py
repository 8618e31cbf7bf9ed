"""Values of columns, in files that have fewer types than Parquet."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import to_jsonable_python


def as_text(value: Any) -> str:
    """Returns a value as text, for CSV and templates: None becomes an empty text, and anything but text JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    text = as_json(value)
    return str(json.loads(text)) if text.startswith('"') else text


def as_json(value: Any, *, ensure_ascii: bool = False) -> str:
    """Returns a value as JSON. Times and decimals become texts, bytes base64, and numbers that JSON lacks null."""
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii, allow_nan=False)
    except (TypeError, ValueError):
        plain = to_jsonable_python(value, bytes_mode="base64", inf_nan_mode="null")
        return json.dumps(plain, ensure_ascii=ensure_ascii)
