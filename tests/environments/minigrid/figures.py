from pathlib import Path

from tests.environments.figures import print_figures

print_figures("minigrid:MiniGrid-Empty-5x5-v0", Path(__file__).parent)
