"""The code of the README runs, with a tiny model in place of the one it names."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_wrap_your_own_agent(tmp_path: Path, tiny_model_dir: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    statements = [line for line in block.splitlines() if line.strip()]
    assert len(statements) <= 12
    script = block.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tiny_model_dir))
    script = script.replace("steps=50", "steps=2, sampling={'max_tokens': 8}")
    assert script != block
    (tmp_path / "script.py").write_text(script)
    result = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert "Result(" in result.stdout
    assert (tmp_path / "runs" / "run" / "curve.png").is_file()
