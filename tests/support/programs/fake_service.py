"""`penstock worker` with the fake engine instead of a model: the whole command but JAX's work.

Run as a program, with the command's own arguments.
"""

from __future__ import annotations

from unittest import mock

from penstock.cli import main
from penstock.tools.chaos.fake_engine import FakeEngine, fake_model

if __name__ == "__main__":
    model = fake_model(FakeEngine(step_s=0.01))
    with mock.patch("penstock.cli.shared.serve.load_model", return_value=model):
        main()
