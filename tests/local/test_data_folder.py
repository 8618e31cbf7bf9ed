"""Tests of the folder that `penstock serve` keeps its queue in."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from penstock.local.data_folder import DataFolder, FolderTaken, Owner


def test_it_has_one_owner_whom_others_can_name(tmp_path: Path) -> None:
    path = tmp_path / "serve"
    assert DataFolder(path).owner() is None
    with DataFolder(path) as folder:
        with pytest.raises(FolderTaken, match=re.escape(f"another process serves from {path} already")):
            DataFolder(path).__enter__()
        folder.note(owner := Owner(os.getpid(), "redis://127.0.0.1:1/0", "http://127.0.0.1:2"))
        assert DataFolder(path).owner() == owner
        with pytest.raises(FolderTaken, match=rf"process {os.getpid()} \(http://127\.0\.0\.1:2\) serves from"):
            DataFolder(path).__enter__()
    assert DataFolder(path).owner() is None
    with DataFolder(path):
        pass


def test_the_last_port_is_used_again_while_it_is_free(tmp_path: Path) -> None:
    with DataFolder(tmp_path) as folder, socket.create_server(("127.0.0.1", 0)) as taken:
        assert folder.last_port() is None
        port = taken.getsockname()[1]
        folder.note(Owner(1, f"redis://127.0.0.1:{port}/0"))
        assert folder.last_port() is None
        taken.close()
        assert folder.last_port() == port
