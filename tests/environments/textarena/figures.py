from pathlib import Path

from tests.environments.figures import print_figures

print_figures("textarena:FrozenLake-v0", Path(__file__).parent)
