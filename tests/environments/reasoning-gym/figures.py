from pathlib import Path

from tests.environments.figures import print_figures

print_figures("reasoning-gym:chain_sum", Path(__file__).parent)
