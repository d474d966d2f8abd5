from pathlib import Path

from tests.environments.figures import print_figures

print_figures("gymnasium:FrozenLake-v1", Path(__file__).parent, is_slippery=False)
