from pathlib import Path

from tests.environments.figures import print_figures

print_figures("inspect:prices.py@prices", Path(__file__).parent)
