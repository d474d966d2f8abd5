from pathlib import Path

from tests.environments.figures import print_figures

print_figures("bfcl:multi_turn_base", Path(__file__).parent)
