"""Files and directories that are written as a whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentrl.base.files import atomic_directory


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_weights_have_the_permissions_of_the_files_beside_them(
    umask: int, mode: int, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        with atomic_directory(tmp_path / "policy") as partial:
            (partial / "config.json").write_text("{}")
            (partial / "parts").mkdir()
            for file in ("model.safetensors", "parts/model.safetensors"):
                save_file({"weight": torch.ones(1)}, partial / file)
            (partial / "secret").touch(mode=0o600)
    finally:
        os.umask(before)
    modes = {
        str(file.relative_to(tmp_path / "policy")): file.stat().st_mode & 0o777
        for file in (tmp_path / "policy").rglob("*")
        if file.is_file()
    }
    written = ("config.json", "model.safetensors", "parts/model.safetensors")
    assert modes == dict.fromkeys(written, mode) | {"secret": 0o600}
