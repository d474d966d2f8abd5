import subprocess
import sys
import tempfile
from pathlib import Path

from tests.environments.figures import print_figures


def make_games(folder: Path, count: int = 5) -> None:
    """Generate games of one room with a coin."""
    program = Path(sys.prefix) / "bin/tw-make"
    for i in range(count):
        command = [sys.executable, program, "tw-coin_collector", "--level", "1", "--seed", str(i)]
        where = folder / f"games/{i}.z8"
        subprocess.run([*command, "--output", where], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make_games(Path(folder))
        print_figures("textworld:games", Path(folder))
