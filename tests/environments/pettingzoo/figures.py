from pathlib import Path

from tests.environments.figures import print_figures

print_figures("pettingzoo:classic.tictactoe_v3", Path(__file__).parent)
