"""Mistral Small 3.1 and Ministral 3 as published: a Mistral, or a Ministral 3, beside a vision tower."""

from __future__ import annotations

from penstock.engine.models.families.ministral3 import MINISTRAL3
from penstock.engine.models.families.mistral import MISTRAL
from penstock.engine.models.families.text_part import text_part

MISTRAL3 = text_part("mistral3", MISTRAL, MINISTRAL3, architecture="Mistral3ForConditionalGeneration")
